"""The rows of faults, as a table at the end."""

import os
import shutil

import pytest

ROWS = pytest.StashKey[list[list[str]]]()
HEADER = ["mode", "fault", "requests", "failed", "longest s", "hung", "wrong", "recovered s"]


def pytest_configure(config):
    config.stash[ROWS] = []
    lacks = [name for name in ("ip", "tc", "nft") if shutil.which(name) is None]
    if lacks:
        pytest.exit(f"{', '.join(lacks)}: not there; install iproute2 and nftables", 2)
    if os.geteuid() != 0:
        pytest.exit("network namespaces are made as root", 2)


@pytest.fixture
def row(request):
    return request.config.stash[ROWS].append


def pytest_terminal_summary(terminalreporter, config):
    rows = config.stash[ROWS]
    if not rows:
        return
    terminalreporter.section("faults of the wires")
    widths = [max(map(len, column)) for column in zip(HEADER, *rows, strict=True)]
    for cells in [HEADER, *rows]:
        texts = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
        terminalreporter.line("  ".join(texts).rstrip())
