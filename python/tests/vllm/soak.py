"""Many requests with random aborts, and what the processes of a pair have meanwhile."""

import os
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from client import Refused
from conftest import prompt
from pair import request, tokens

CLIENTS = 16
# Prompts whose answers are known; some are sent to be cached on both sides.
KNOWN = 24
ABORTED = 0.2


@dataclass
class Process:
    """What a process has; memory of its own in KiB, without the KV cache that servers share with hosts."""

    name: str
    memory: int
    threads: int
    descriptors: int

    @classmethod
    def of(cls, pid: int, name: str) -> "Process":
        folder = Path("/proc") / str(pid)
        status = dict(
            line.split(":", 1) for line in (folder / "status").read_text().splitlines() if ":" in line
        )
        memory, threads = int(status["RssAnon"].split()[0]), int(status["Threads"])
        return cls(name, memory, threads, len(list((folder / "fd").iterdir())))


def processes(pair) -> dict[int, str]:
    """Those of both servers and their hosts."""
    found = {}
    for role in ("prefill", "decode"):
        server = getattr(pair, role)
        found[server.host()] = f"{role} host"
        for status in Path("/proc").glob("[0-9]*/stat"):
            try:
                head, _, rest = status.read_text().rpartition(")")
            except OSError:
                continue
            # The session is the sixth field.
            if int(rest.split()[3]) == server.child.pid:
                pid = int(status.parent.name)
                found.setdefault(pid, f"{role} {head.split('(', 1)[1]}")
    return found


def sample(pair) -> dict[int, Process]:
    return {pid: Process.of(pid, name) for pid, name in processes(pair).items()}


class Soak:
    """`count` requests by 16 clients, one in five of which leaves early."""

    def __init__(self, pair, reference, seed: str):
        self.pair = pair
        lengths = random.Random(seed)
        self.prompts = [prompt(lengths.randrange(1, 900), f"{seed} {n}") for n in range(KNOWN)]
        self.expected = [reference(ids) for ids in self.prompts]
        self.right = self.left = 0
        self.wrong: list[str] = []
        self._lock = threading.Lock()

    def run(self, count: int) -> None:
        with ThreadPoolExecutor(CLIENTS) as pool:
            list(pool.map(self._ask, range(count)))

    def _ask(self, number: int) -> None:
        draw = random.Random(f"{len(self.prompts)} {number}")
        at = draw.randrange(KNOWN)
        leaves = draw.random() < ABORTED
        seconds = draw.uniform(0.005, 0.5) if leaves else 120
        try:
            got = tokens(self.pair.router.complete(request(self.prompts[at]), seconds))
            fault = None if got == self.expected[at] else f"prompt {at}: {got}"
        except Refused as refused:
            fault = f"prompt {at}: {refused}"
        except OSError as error:
            fault = None if leaves else f"prompt {at}: {error}"
            got = None
        with self._lock:
            if fault is not None:
                self.wrong.append(fault)
            elif got is None:
                self.left += 1
            else:
                self.right += 1


def growth(before: dict[int, Process], after: dict[int, Process]) -> list[str]:
    """A line for each process, with what it had and has."""
    return [
        f"{was.name:<28} memory {was.memory / 1024:.0f} -> {now.memory / 1024:.0f} MiB, "
        f"threads {was.threads} -> {now.threads}, descriptors {was.descriptors} -> {now.descriptors}"
        for pid, was in sorted(before.items(), key=lambda item: item[1].name)
        if (now := after.get(pid)) is not None
    ]


def requests_wanted() -> int:
    """How many requests the test sends in each mode; a soak of hours is a matter of the environment."""
    return int(os.environ.get("KVFERRY_SOAK_REQUESTS", "80"))
