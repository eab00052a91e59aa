"""`kvferry`, also as `python -m kvferry`: the program of this package."""

import sys

from kvferry._native import main as run


def main() -> int:
    """The exit code."""
    return run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
