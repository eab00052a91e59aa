"""Processes that stand still, and processes that have nothing to do."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

# Longest wait for a thread that is to have its turn.
LIMIT_S = 60
# Of what Linux says of a thread: whether it runs or is to run, and how often it ceased to.
SCHEDULED = ("State:", "voluntary_ctxt_switches:", "nonvoluntary_ctxt_switches:")

# Those by thread.
Threads = dict[str, list[str]]


def stop(pid: int) -> None:
    """Returns when no thread of it runs any more: one of them takes the signal and stops the others, as soon
    as it has its turn."""
    os.kill(pid, signal.SIGSTOP)
    _until(pid, lambda threads: _all("stopped", threads))


def until_idle(pid: int) -> None:
    """Returns when it has done all that it was told to: between two looks no thread ran, or was to."""
    before: Threads = {}

    def idle(threads: Threads) -> bool:
        nonlocal before
        same, before = threads == before, threads
        return same and _all("sleeping", threads)

    _until(pid, idle)


def _all(state: str, threads: Threads) -> bool:
    return all(state in line for line, *_ in threads.values())


def _until(pid: int, holds: Callable[[Threads], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not holds(threads := _threads(pid)):
        assert time.monotonic() < deadline, f"process {pid} does not come to it: {threads}"


def _threads(pid: int) -> Threads:
    found = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            lines = (task / "status").read_text().splitlines()
        except (FileNotFoundError, ProcessLookupError):
            # It has ended meanwhile.
            continue
        found[task.name] = [line for line in lines if line.startswith(SCHEDULED)]
    return found
