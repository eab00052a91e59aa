"""Prints the folder to put on PYTHONPATH."""

from pathlib import Path

print(Path(__file__).parent)
