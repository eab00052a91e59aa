"""Starts and stops vLLM servers; every wait has a deadline and shows the end of the log."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from client import get, metric, post

START_S = 600
STOP_S = 20
LOG_LINES = 40
# Of the stacks of all threads of a server.
STACK_LINES = 600
# For one process to write them.
STACK_S = 1
# What vLLM logs when its worker failed.
LOST = "WorkerProc hit an exception"

BLOCK_TOKENS = 32
BATCHED_TOKENS = 2048
KV_BYTES = 128 << 20

FLAGS = [
    "--enforce-eager",
    *("--dtype", "float32"),
    *("--max-model-len", "4096"),
    *("--block-size", str(BLOCK_TOKENS)),
    *("--kv-cache-memory-bytes", str(KV_BYTES)),
    *("--max-num-batched-tokens", str(BATCHED_TOKENS)),
]

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    # `Process.stacks` asks for them.
    "PYTHONFAULTHANDLER": "1",
    "THP_MEM_ALLOC_ENABLE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
}


class Process:
    """A child in a session of its own, with its output in a file."""

    def __init__(
        self, name: str, command: list[str], env: dict[str, str], log: Path, stdout: int | None = None
    ):
        self.name = name
        self.log = log
        with log.open("wb") as output:
            self.child = subprocess.Popen(
                command,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=output if stdout is None else stdout,
                stderr=output,
                start_new_session=True,
            )

    def tail(self, most: int = LOG_LINES) -> str:
        lines = self.log.read_text(errors="replace").splitlines()[-most:]
        return f"last lines of {self.name}:\n" + "\n".join(lines)

    def wait_until(self, what: str, condition, seconds: float) -> None:
        """Polls `condition` until it holds; fails with the log if the process ends or is late."""
        deadline = time.monotonic() + seconds
        while not condition():
            if self.is_lost():
                raise RuntimeError(f"{self.name} ended before this: {what}\n{self.tail()}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.name}: not in {seconds:.0f} s: {what}\n{self.tail()}")
            time.sleep(0.1)

    def is_lost(self) -> bool:
        """True if it has ended."""
        return self.child.poll() is not None

    def stacks(self) -> str:
        """Ends it and its children; where each of their threads was. They share a log, so they write one after
        the other, and none sees how another one ends."""
        pids = sorted(filter(self._runs, (int(place.name) for place in Path("/proc").glob("[0-9]*"))))
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        for pid in pids:
            os.kill(pid, signal.SIGABRT)
            os.kill(pid, signal.SIGCONT)
            written = time.monotonic() + STACK_S
            while self._runs(pid) and time.monotonic() < written:
                time.sleep(0.05)
        return self.tail(STACK_LINES)

    def _runs(self, pid: int) -> bool:
        """Whether it is one of these processes, and has not ended."""
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        except (FileNotFoundError, ProcessLookupError):
            return False
        return int(state[2]) == self.child.pid and state[0] != "Z"

    def cpu_seconds(self) -> float:
        """CPU time of the process and its children until now."""
        ticks = 0
        for pid in filter(self._runs, (int(place.name) for place in Path("/proc").glob("[0-9]*"))):
            fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
            ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def worker(self) -> int:
        """Process of its worker of vLLM."""
        for name in Path("/proc").glob("[0-9]*/comm"):
            if self._runs(int(name.parent.name)) and "Worker" in name.read_text():
                return int(name.parent.name)
        raise RuntimeError(f"{self.name} has no worker\n{self.tail()}")

    def kill(self) -> None:
        """`kill -9` of the process and its children."""
        try:
            os.killpg(self.child.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.child.wait()

    def stop(self) -> None:
        """SIGTERM, and SIGKILL for what is left."""
        self.child.terminate()
        try:
            self.child.wait(STOP_S)
        except subprocess.TimeoutExpired:
            pass
        self.kill()


class Server(Process):
    """A vLLM server for the tiny model; with `kv`, as one half of a pair."""

    def __init__(
        self,
        name: str,
        model: Path,
        port: int,
        log: Path,
        kv: dict | None,
        env: dict,
        asynchronous: bool = False,
        flags: Sequence[str] = (),
    ):
        command = [
            *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", str(model), "--host", "127.0.0.1", "--port", str(port)),
            *FLAGS,
            "--async-scheduling" if asynchronous else "--no-async-scheduling",
            *flags,
        ]
        if kv is not None:
            command += ["--kv-transfer-config", json.dumps(kv)]
        super().__init__(name, command, os.environ | ENVIRONMENT | env, log)
        self.port = port
        self.kv = kv or {}
        own = self.kv.get("kv_connector_extra_config", {}).get("connectors", [self.kv])[0]
        self.extra = own.get("kv_connector_extra_config", {})

    def ready(self) -> "Server":
        self.wait_until("answers /health", lambda: get(self.port, "/health") == 200, START_S)
        return self

    def is_lost(self) -> bool:
        """Also true for a server that hangs after its worker failed at the start."""
        return super().is_lost() or LOST in self.log.read_text(errors="replace")

    def peer_ports(self) -> tuple[int, int]:
        """Those for handshakes and notices of peers: as they were given, or as its host chose them. Of a
        server that is both those of the prefill."""
        if self.extra["handshake_port"]:
            return self.extra["handshake_port"], self.extra["notify_port"]
        lines = [line for line in self.log.read_text().splitlines() if 'handshake="' in line]
        lines = [line for line in lines if "role=prefill" in line] or lines
        at = (lines[-1].split(f'{what}="')[1].split('"')[0] for what in ("handshake", "notify"))
        handshake, notify = (int(endpoint.rsplit(":", 1)[1]) for endpoint in at)
        return handshake, notify

    def host_metrics(self) -> int:
        """Port at which its host serves them, if it was started to."""
        return int(re.findall(r"metrics=http://127.0.0.1:(\d+)/", self.log.read_text())[-1])

    def host(self) -> int | None:
        """Process of the `kvferry host` beside it."""
        found = self._host()
        return found[0] if found else None

    def socket(self) -> str:
        """Where that listens."""
        found = self._host()
        assert found, f"{self.name} has no host"
        return found[1]

    def _host(self) -> tuple[int, str] | None:
        socket = f"{self.kv['engine_id']}.sock"
        for commands in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                words = commands.read_bytes().decode(errors="replace").split("\0")
            except OSError:
                continue
            places = [word for word in words if word.endswith(socket)]
            if "kvferry.host" in words and places:
                return int(commands.parent.name), places[0]
        return None

    def complete(self, body: dict, seconds: float = 60, headers: dict | None = None) -> dict:
        """Answer to /v1/completions; raises with the log if it is none or late."""
        try:
            return post(self.port, "/v1/completions", body, seconds, headers)
        except OSError as error:
            raise RuntimeError(f"{self.name}: {error}\n{self.tail()}") from error

    def idle(self) -> bool:
        """True if it runs nothing and holds no block."""
        return all(
            metric(self.port, name) == 0
            for name in (
                "vllm:num_requests_running",
                "vllm:num_requests_waiting",
                "vllm:kv_cache_usage_perc",
            )
        )

    def wait_idle(self, seconds: float = 30) -> None:
        self.wait_until("all blocks are free", self.idle, seconds)
