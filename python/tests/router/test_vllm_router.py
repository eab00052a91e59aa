"""The real vllm-router in front of `kvferry serve` instances."""

import http.client
import itertools
import json
import os
import signal
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from ports import free_ports

MODES = ["push", "pull"]
# Together a minute.
SECONDS = float(os.environ.get("KVFERRY_ROUTER_SECONDS", "60")) / len(MODES)
START_S = 30
CLIENTS = 4


class Router:
    """vllm-router in MoRI-IO mode."""

    def __init__(self, log: Path):
        self.port, self.discovery, self.metrics = free_ports(3)
        self.log = log
        self.start()

    def start(self) -> None:
        command = ["vllm-router", "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--vllm-pd-disaggregation", "--kv-connector", "moriio"]
        command += ["--vllm-discovery-address", f"127.0.0.1:{self.discovery}"]
        command += ["--policy", "round_robin", "--prometheus-port", str(self.metrics)]
        with self.log.open("ab") as log:
            self.child = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def stop(self) -> None:
        os.killpg(self.child.pid, signal.SIGKILL)
        self.child.wait()

    def complete(self, prompt: list[int]) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            body = json.dumps({"model": "kvferry-tiny", "prompt": prompt, "max_tokens": 4})
            connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()

    def wait_for_pair(self) -> None:
        """Waits until a request is answered."""
        deadline = time.monotonic() + START_S
        seen: object = None
        while time.monotonic() < deadline:
            try:
                seen = self.complete([1, 2, 3])
                if seen[0] == 200:
                    return
            except OSError as error:
                seen = error
            time.sleep(0.05)
        raise TimeoutError(f"no pair in {START_S} s: {seen}\n{self.log.read_text()[-2000:]}")


def serve(role: str, mode: str, discovery: int) -> subprocess.Popen:
    command = [os.environ["KVFERRY_BIN"], "serve", "--role", role, "--mode", mode]
    command += ["--proxy", f"127.0.0.1:{discovery}"]
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    late = threading.Timer(START_S, child.kill)
    late.start()
    line = child.stdout.readline()
    late.cancel()
    assert line, f"{role} instance does not start"
    return child


@pytest.fixture(params=MODES)
def fleet(request, tmp_path):
    router = Router(tmp_path / "router.log")
    children = []
    try:
        for role in ("prefill", "decode"):
            children.append(serve(role, request.param, router.discovery))
        router.wait_for_pair()
        yield router, children
    finally:
        for child in children:
            child.kill()
            child.wait()
        router.stop()


def prompt(number: int) -> list[int]:
    return [(number * 7 + at) % 251 for at in range(1 + number % 300)]


def check(answer: tuple[int, str]) -> None:
    status, body = answer
    assert status == 200, body
    kv = json.loads(body)["kvferry"]
    assert kv["source"] == "transferred" and kv["digest"] == kv["expected"], kv


def test_no_request_is_dropped_and_a_restart_loses_no_instance(fleet):
    router, children = fleet
    numbers = itertools.count()
    deadline = time.monotonic() + SECONDS

    def client() -> int:
        served = 0
        while time.monotonic() < deadline:
            check(router.complete(prompt(next(numbers))))
            served += 1
        return served

    with ThreadPoolExecutor(CLIENTS) as pool:
        served = sum(pool.map(lambda _: client(), range(CLIENTS)))
    print(f"{served} requests in {SECONDS:.0f} s")
    assert served > CLIENTS
    router.stop()
    router.start()
    router.wait_for_pair()
    for number in range(20):
        check(router.complete(prompt(number)))
    assert all(child.poll() is None for child in children)
