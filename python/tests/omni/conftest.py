"""What the tests of the connector share."""

import shutil
import tempfile
from pathlib import Path

import pytest
import torch

from stages import Pipeline

# Processes are forked from this one: no threads of OpenMP here, which a fork does not have.
torch.set_num_threads(1)


@pytest.fixture
def folder():
    """Of short paths: those of sockets have 107 bytes at most."""
    path = Path(tempfile.mkdtemp(prefix="kvferry-"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def pipeline(folder):
    """Stages with one host, started by the first of them."""
    made = Pipeline(folder)
    yield made
    made.end()
