"""A router and instances on hosts of their own, and clients that look at every answer."""

import http.client
import itertools
import json
import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from started import line_of
from wires import Wires

# Longer than any time that a request may take by the settings below: who waits so long hangs.
HANG_S = 90.0
CLIENTS = 4


@dataclass
class Answer:
    """What became of a request."""

    begun: float
    ended: float
    # None if there was no answer within HANG_S.
    status: int | None
    # Of an answer, digests or tokens of what was computed and of what it has to be, and where the KV comes from.
    kv: dict = field(default_factory=dict)
    why: str = ""

    def is_wrong(self) -> bool:
        return self.status == 200 and self.kv["digest"] != self.kv["expected"]

    def is_transferred(self) -> bool:
        return self.status == 200 and self.kv["source"] == "transferred"


class Fleet:
    """A router `r` and instances, `p...` prefills and `d...` decodes, by the names of their hosts."""

    def __init__(self, wires: Wires, mode: str, folder: Path):
        self.wires, self.mode, self.folder = wires, mode, folder
        self.secret = folder / "secret"
        if not self.secret.exists():
            self.secret.write_text("0123456789abcdef0123456789abcdef")
            self.secret.chmod(0o400)
        self.processes: dict[str, subprocess.Popen] = {}
        self.instances: dict[str, dict] = {}
        self.http = f"{wires.address('r')}:8000"
        # Requests that clients began.
        self.asked = 0
        try:
            for name in wires.names:
                self.start(name)
        except BaseException:
            self.close()
            raise

    def start(self, name: str) -> None:
        address, router = self.wires.address(name), self.wires.address("r")
        command = [os.environ["KVFERRY_BIN"]]
        if name == "r":
            command += ["router", "--json", "--listen", self.http, "--discovery", f"{address}:36367"]
            command += ["--admin-addr", f"{address}:29000", "--answer-timeout", "60", "--idle-timeout", "60"]
            command += ["--require-signed"]
        else:
            role = "prefill" if name.startswith("p") else "decode"
            command += ["serve", "--role", role, "--mode", self.mode, "--host", address]
            command += ["--proxy", f"{router}:36367"]
        command += ["--secret-file", str(self.secret)]
        with (self.folder / f"{name}.log").open("a") as log:
            process = self.wires.start(name, command, stdout=subprocess.PIPE, stderr=log, stdin=subprocess.DEVNULL)
        self.processes[name] = process
        self.instances[name] = json.loads(line_of(process))

    def close(self) -> None:
        for process in self.processes.values():
            process.send_signal(signal.SIGKILL)
            process.wait()

    def body(self, number: int) -> dict:
        """Of 64 to 1,087 tokens, 1 to 17 MiB of KV."""
        prompt = [number % 251, number // 251 % 251, *(at % 251 for at in range(62 + number * 37 % 1024))]
        return {"model": "kvferry-tiny", "prompt": prompt, "max_tokens": 4}

    def kv(self, _number: int, answer: dict) -> dict:
        """Of `Answer`."""
        return answer["kvferry"]

    def get(self, name: str, address: str, path: str) -> str:
        """The body of a page, asked for on that host."""

        def ask() -> str:
            connection = http.client.HTTPConnection(address, timeout=HANG_S)
            connection.request("GET", path)
            return connection.getresponse().read().decode()

        return self.wires.on(name, ask)

    def held(self) -> dict[str, str]:
        """KV blocks that each instance holds, as its metrics have them."""
        return self._of_instances("kvferry_blocks_held")

    def remembered(self) -> dict[str, str]:
        """Failures that each process has not forgotten, as its metrics have them."""
        own = {"r": self.metric("r", f"{self.wires.address('r')}:29000", "kvferry_router_failures_remembered")}
        return own | self._of_instances("kvferry_failures_remembered")

    def metric(self, name: str, address: str, series: str) -> str:
        """A value of a page of metrics on that host."""
        lines = (line.split() for line in self.get(name, address, "/metrics").splitlines())
        return next(words[-1] for words in lines if words and words[0].split("{")[0] == series)

    def _of_instances(self, series: str) -> dict[str, str]:
        return {name: self.metric(name, it["http"], series) for name, it in self.instances.items() if name != "r"}


@contextmanager
def served(names: list[str], mode: str, folder: Path, seed: int, make: Callable[..., Fleet] = Fleet) -> Iterator[Fleet]:
    """A fleet on hosts of these names; `seed` is of what happens to packets."""
    wires = Wires(names, seed)
    fleet = None
    try:
        fleet = make(wires, mode, folder)
        yield fleet
    finally:
        if fleet:
            fleet.close()
        wires.close()


class Clients:
    """They ask one request after the other, each with a prompt of its own, until they are told to end."""

    def __init__(self, fleet: Fleet):
        self.fleet = fleet
        self.answers: list[Answer] = []
        self.numbers = itertools.count()
        # Seconds for which not even this process ran, on a machine that has other work: times are longer by that.
        self.still = 0.0
        self.is_over = threading.Event()
        self.threads = [threading.Thread(target=fleet.wires.on, args=("r", self._ask_on)) for _ in range(CLIENTS)]
        self.threads.append(threading.Thread(target=self._watch))

    def __enter__(self) -> "Clients":
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.is_over.set()
        for thread in self.threads:
            thread.join()

    def _watch(self) -> None:
        looked = time.monotonic()
        while not self.is_over.wait(0.1):
            self.still = max(self.still, time.monotonic() - looked - 0.1)
            looked = time.monotonic()

    def _ask_on(self) -> None:
        while not self.is_over.is_set():
            self.answers.append(self._ask(next(self.numbers)))
            # What is refused at once is not asked for without end.
            if self.answers[-1].status != 200:
                self.is_over.wait(0.05)

    def _ask(self, number: int) -> Answer:
        body = self.fleet.body(number)
        self.fleet.asked += 1
        begun = time.monotonic()
        connection = http.client.HTTPConnection(self.fleet.http, timeout=HANG_S)
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        # Looks are counted, not time: in what this process stood still, the others may have as well.
        if not any(select.select([connection.sock], [], [], 1.0)[0] for _ in range(round(HANG_S))):
            return Answer(begun, time.monotonic(), None)
        response = connection.getresponse()
        text = response.read()
        connection.close()
        if response.status != 200:
            return Answer(begun, time.monotonic(), response.status, why=text.decode())
        return Answer(begun, time.monotonic(), 200, self.fleet.kv(number, json.loads(text)))

    def served_since(self, moment: float, number: int) -> bool:
        """True if of the requests that began after that so many in a row were served by a hand-over."""
        since = [answer for answer in list(self.answers) if answer.begun >= moment]
        row = 0
        for answer in sorted(since, key=lambda answer: answer.ended):
            row = row + 1 if answer.is_transferred() else 0
            if row >= number:
                return True
        return False
