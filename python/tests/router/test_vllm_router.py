"""The real vllm-router in front of `kvferry serve` instances."""

import itertools
import json
import os
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from started import line_of
from vllm_router import VllmRouter

MODES = ["push", "pull"]
# Together a minute.
SECONDS = float(os.environ.get("KVFERRY_ROUTER_SECONDS", "60")) / len(MODES)
CLIENTS = 4


def serve(role: str, mode: str, discovery: int) -> subprocess.Popen:
    command = [os.environ["KVFERRY_BIN"], "serve", "--role", role, "--mode", mode]
    command += ["--proxy", f"127.0.0.1:{discovery}"]
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    line_of(child)
    return child


@pytest.fixture(params=MODES)
def fleet(request, tmp_path):
    router = VllmRouter(tmp_path / "router.log")
    children = []
    try:
        for role in ("prefill", "decode"):
            children.append(serve(role, request.param, router.discovery))
        router.wait_for_pair(request_of([1, 2, 3]))
        yield router, children
    finally:
        for child in children:
            child.kill()
            child.wait()
        router.stop()


def request_of(ids: list[int]) -> dict:
    return {"model": "kvferry-tiny", "prompt": ids, "max_tokens": 4}


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
            check(router.complete(request_of(prompt(next(numbers)))))
            served += 1
        return served

    with ThreadPoolExecutor(CLIENTS) as pool:
        served = sum(pool.map(lambda _: client(), range(CLIENTS)))
    print(f"{served} requests in {SECONDS:.0f} s")
    assert served > CLIENTS
    router.stop()
    router.start()
    router.wait_for_pair(request_of([1, 2, 3]))
    for number in range(20):
        check(router.complete(request_of(prompt(number))))
    assert all(child.poll() is None for child in children)
