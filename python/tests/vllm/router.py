"""`kvferry router` between the tests and a pair of servers."""

import json
import os
import subprocess
import threading
from pathlib import Path

from client import exchange, get, post
from server import START_S, Process

BINARY = "KVFERRY_BIN"
RETRIES = 4
# Seconds without a sign of life after which it forgets an instance. Virtual machines stand still for
# longer than its default.
EXPIRY_S = 60
# Pauses between tries in seconds, which double, and `--queue-timeout`.
PAUSE_S, QUEUE_S = 0.5, 2.0
# Within which who asked has an answer or an error after an instance died: before each try the pause,
# the pause again and the wait in the queue. What is beyond is for a machine that does other work.
CLEAR_S = sum(2 * PAUSE_S * 2**n + QUEUE_S for n in range(RETRIES)) + 10


class Router(Process):
    """Listens at ports of its own choice, which it tells in its first line, or at those of another one.
    It sends again what failed, for longer than a host takes to be replaced on a busy machine."""

    def __init__(
        self,
        log: Path,
        before: "Router | None" = None,
        env: dict[str, str] | None = None,
        args: tuple[str, ...] = (),
        times: tuple[str, ...] = ("--retries", str(RETRIES), "--expiry", str(EXPIRY_S)),
    ):
        """`env` is what it is told beside its arguments: the fleet's secret, which its legs are sealed
        with."""
        self.told = before.told if before else env or {}
        if BINARY not in os.environ:
            raise RuntimeError(f"set {BINARY} to the path of the program kvferry")
        command = [os.environ[BINARY], "router", "--json", *times]
        http, discovery = (before.port, before.discovery) if before else (0, 0)
        command += ["--listen", f"127.0.0.1:{http}", "--discovery", f"127.0.0.1:{discovery}"]
        command += ["--admin-addr", "127.0.0.1:0", *args]
        super().__init__("router", command, os.environ | self.told, log, stdout=subprocess.PIPE)
        try:
            line = self._first_line()
        except BaseException:
            self.kill()
            raise
        self.port = int(line["http"].rsplit(":", 1)[1])
        self.discovery = int(line["discovery"].rsplit(":", 1)[1])
        self.admin = int(line["admin"].rsplit(":", 1)[1])

    def _first_line(self) -> dict:
        late = threading.Timer(30, self.child.kill)
        late.start()
        line = self.child.stdout.readline()
        late.cancel()
        if not line:
            raise RuntimeError(f"the router does not start\n{self.tail()}")
        return json.loads(line)

    def wait_for(self, what: str) -> None:
        """Waits until it has a prefill and a decode that it can use."""
        self.wait_until(f"it knows {what}", lambda: get(self.port, "/readiness") == 200, START_S)

    def states(self) -> list[str]:
        """What it makes of each instance."""
        status, page = exchange(self.admin, "GET", "/workers", None, {}, 10)
        return [it["state"] for it in json.loads(page)["workers"]] if status == 200 else []

    def complete(self, body: dict, seconds: float = 60) -> dict:
        """Answer to /v1/completions; `Refused` carries its error."""
        return post(self.port, "/v1/completions", body, seconds)
