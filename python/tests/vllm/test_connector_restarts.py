"""Hosts of KvferryConnector's servers that end or stand still, with one spare server of each role: no request is lost.

`KVFERRY_RESTART_REQUESTS` is how many requests a row has: 60, unless given."""

import json
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import pytest
from client import Refused, lines, metric
from conftest import wide
from pair import ROLES, Pair, kvferry_at, prompt, request, tokens
from router import Router
from server import START_S

CLIENTS = 6
REQUESTS = "KVFERRY_RESTART_REQUESTS"
# How long a stopped host stands still: longer than a registration lasts.
STOP_S = 12
# Until all four servers take requests again.
AGAIN_S = 120
# No request waits as long, on a machine that stands still now and then.
ANSWER_S = 240
LEASE_S = 90
# Tokens of a stream: it takes longer than the next host to register.
STREAM_TOKENS = 1500
# Of two servers of each role, and how often each has its turn at most.
PAIRS, TRIES = 4, 5

# Mode and `kv_load_failure_policy`.
FLEETS = [("WRITE", "fail"), ("READ", "fail"), ("WRITE", "recompute"), ("READ", "recompute")]
ROWS = [("prefill", "killed"), ("decode", "stopped"), ("prefill", "stopped"), ("decode", "killed")]


class Fleet:
    """Two prefills and two decodes behind a router with the settings that operators have."""

    def __init__(self, mode: str, policy: str, router: Router, pairs: list[Pair]):
        self.mode = mode
        self.policy = policy
        self.router = router
        self.pairs = pairs

    def servers(self) -> list:
        return [getattr(pair, role) for pair in self.pairs for role in ROLES]

    def remembered(self) -> dict[str, float]:
        """Failures that each process has not forgotten, as its metrics have them."""
        known = {"router": metric(self.router.admin, "kvferry_router_failures_remembered")}
        for server in self.servers():
            known[f"{server.name} {server.port}"] = metric(server.host_metrics(), "kvferry_failures_remembered")
        return known

    def forget(self, seed: str) -> None:
        """Asks until each pair has served one, so that no process remembers a failure."""
        for n in range(PAIRS * TRIES):
            self.router.complete(request(prompt(100, f"{seed} {n}")), ANSWER_S)
            if not any(self.remembered().values()):
                return
        raise AssertionError(f"failures that are still remembered: {self.remembered()}")

    def ready(self) -> None:
        def all_serve() -> bool:
            return self.router.states().count("ready") == len(self.servers())

        self.router.wait_until("all four serve", all_serve, START_S)


@contextmanager
def servers(param: tuple[str, str], place):
    mode, policy = param
    name = f"restarts-{mode.lower()}-{policy}"
    with ExitStack() as stack:
        router = Router(place.logs / f"router-{name}.log", env=place.secret, times=())
        stack.callback(router.stop)
        connectors = dict.fromkeys(ROLES, kvferry_at("sidecar", kv_load_failure_policy=policy))
        env = place.secret | {"KVFERRY_HOST_METRICS": "127.0.0.1:0"}
        pairs = []
        for _ in range(2):
            pair = Pair(mode, place.model, place.logs, router.discovery, connectors, env)
            stack.callback(pair.stop)
            pairs.append(pair)
        place.reference.server.ready()
        for pair in pairs:
            pair.ready()
        fleet = Fleet(mode, policy, router, pairs)
        fleet.ready()
        yield fleet


@pytest.fixture(
    scope="module",
    params=[FLEETS[0], *(pytest.param(it, marks=pytest.mark.wide) for it in FLEETS[1:])],
    ids="-".join,
)
def own(request, ahead):
    with ahead.servers(servers, request.param) as fleet:
        yield fleet


def harm(server, what: str) -> None:
    """Ends the host of a server, or has it stand still for a while; the server goes on."""
    host = server.host()
    if what == "killed":
        os.kill(host, signal.SIGKILL)
        return
    os.kill(host, signal.SIGSTOP)
    try:
        # How long it lasts is what is tried.
        time.sleep(STOP_S)
    finally:
        os.kill(host, signal.SIGCONT)


@pytest.mark.parametrize("lost", wide(ROWS, 2), ids="-".join)
def test_no_request_is_lost_when_a_host_is(own, reference, restarts, lost):
    side, what = lost
    count = int(os.environ.get(REQUESTS, "60"))
    asked = [prompt(64 + n % 640, f"{own.mode} {own.policy} {side} {what} {n}") for n in range(count)]
    expected = [reference(ids) for ids in asked]
    harmed, lasts, failed, wrong = threading.Event(), [], [], []

    def ask(n: int) -> None:
        if n == count // 5:
            harmed.set()
        began = time.monotonic()
        try:
            if tokens(own.router.complete(request(asked[n]), ANSWER_S)) != expected[n]:
                wrong.append(n)
        except (Refused, OSError) as why:
            failed.append(f"{n}: {why}")
        lasts.append(time.monotonic() - began)

    server = getattr(own.pairs[0], side)
    began = time.monotonic()
    with ThreadPoolExecutor(CLIENTS) as pool:
        answers = [pool.submit(ask, n) for n in range(count)]
        harmed.wait()
        harm(server, what)
        for answer in answers:
            answer.result()
    took = time.monotonic() - began
    row = (own.mode, own.policy, f"host of a {side} {what}")
    restarts([*row, *map(str, (count, len(failed), len(wrong))), f"{max(lasts):.1f}", f"{took:.0f}"])
    assert failed == [] and wrong == []
    server.wait_until("a host", lambda: server.host() is not None, AGAIN_S)
    own.ready()
    own.forget(f"{own.mode} {own.policy} {side} {what} again")
    for one in own.servers():
        one.wait_idle(LEASE_S)


@pytest.mark.parametrize("side", wide(["decode", "prefill"]))
def test_streams_outlive_the_host_of_their_server(own, side):
    """Both decodes have streams, so that the one whose host is killed has some."""
    began = threading.Barrier(CLIENTS + 1)

    def stream(n: int) -> tuple[int, str | None]:
        """Its tokens, and how it ended."""
        ids = prompt(90 + n, f"{own.mode} {own.policy} stream {side}")
        events = lines(
            own.router.port,
            "/v1/completions",
            request(ids, max_tokens=STREAM_TOKENS, stream=True),
            ANSWER_S,
        )
        got, last, is_first = 0, None, True
        for line in events:
            if not line.startswith("data: "):
                continue
            last = line.removeprefix("data: ")
            if last != "[DONE]":
                event = json.loads(last)
                assert "error" not in event, event
                got += len(event["choices"][0]["token_ids"] or [])
                # All of them have begun before a host is killed.
                if is_first:
                    is_first = False
                    began.wait(ANSWER_S)
        return got, last

    server = getattr(own.pairs[0], side)
    with ThreadPoolExecutor(CLIENTS) as pool:
        streams = [pool.submit(stream, n) for n in range(CLIENTS)]
        began.wait(ANSWER_S)
        host = server.host()
        os.kill(host, signal.SIGKILL)
        ended = [one.result() for one in streams]
    assert ended == [(STREAM_TOKENS, "[DONE]")] * CLIENTS
    server.wait_until("a new host", lambda: server.host() not in (None, host), AGAIN_S)
    own.ready()
