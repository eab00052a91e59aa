"""The rows of faults, as a table at the end."""

import os
import shutil
from collections import Counter

import pytest

ROWS = pytest.StashKey[list[list[str]]]()
# Faults of scenario files that were not played, and why.
LEFT = pytest.StashKey[list[str]]()
HEADER = ["mode", "fault", "requests", "failed", "longest s", "hung", "wrong", "recovered s", "stood still s"]


def pytest_configure(config):
    config.stash[ROWS], config.stash[LEFT] = [], []
    lacks = [name for name in ("ip", "tc", "nft") if shutil.which(name) is None]
    if lacks:
        pytest.exit(f"{', '.join(lacks)}: not there; install iproute2 and nftables", 2)
    if os.geteuid() != 0:
        pytest.exit("network namespaces are made as root", 2)


@pytest.fixture
def row(request):
    return request.config.stash[ROWS].append


@pytest.fixture
def left(request):
    return request.config.stash[LEFT].append


def pytest_terminal_summary(terminalreporter, config):
    if config.stash[LEFT]:
        terminalreporter.section("faults of scenario files that were not played on wires")
    for line, number in Counter(config.stash[LEFT]).items():
        terminalreporter.line(f"{number:3} x {line}")
    rows = config.stash[ROWS]
    if not rows:
        return
    terminalreporter.section("faults of the wires")
    widths = [max(map(len, column)) for column in zip(HEADER, *rows, strict=True)]
    for cells in [HEADER, *rows]:
        texts = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
        terminalreporter.line("  ".join(texts).rstrip())
