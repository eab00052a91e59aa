"""What happens to KvferryConnector's servers, hosts and clients: each request has its right answer or
a clear error within a time, the next ones are served, and no block is lost. They have a secret."""

import json
import os
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import native
import pytest
from client import Refused
from conftest import prompt, wide
from load import Load
from model import LAYERS
from pair import ROLES, kvferry_at, request, served, tokens
from router import CLEAR_S, Router
from server import KV_BYTES

PAUSE_S = 5
# Until a host that was killed is replaced and the router sends requests again.
AGAIN_S = 60
# Until blocks of a killed prefill host are free: its lease.
LEASE_S = 90

# Mode, `kv_load_failure_policy`, where the transfer actors are, and whether with vLLM's default,
# asynchronous scheduling.
PAIRS = [
    ("WRITE", "recompute", "sidecar", True),
    ("READ", "fail", "worker", False),
    ("WRITE", "fail", "worker", False),
    ("READ", "recompute", "sidecar", True),
]

# The first request (one operation per layer) is answered without a copy; from the second on every
# operation fails, until another host takes over, which finds no faults any more.
FAULTS = f"""
[[fault]]
kind = "fabric.no_copy"
on = {{ event = "op.posted" }}
times = {LAYERS}
[[fault]]
kind = "fabric.sibling_failure"
on = {{ event = "op.posted", nth = {LAYERS + 1} }}
times = 1000
"""


@contextmanager
def servers(param: tuple[str, str, str, bool], place):
    mode, policy, actors, asynchronous = param
    connectors = dict.fromkeys(ROLES, kvferry_at(actors, kv_load_failure_policy=policy))
    faults = place.folder(mode) / "faults.toml"
    faults.write_text(FAULTS)
    env = {"KVFERRY_FAULTS": str(faults)} | place.secret
    with served(f"faults-{mode.lower()}", place, mode, connectors, env, asynchronous) as pair:
        pair.policy = policy
        pair.secret = Path(place.secret["KVFERRY_SECRET_FILE"]).read_text()
        # They meet the faults: a copy that is suppressed, and a transfer that fails.
        pair.drills = [outcome(pair, drill_prompt(pair, what)) for what in ("suppressed", "failed")]
        faults.write_text("")
        for server in (pair.prefill, pair.decode):
            replace_host(server)
        wait_served(pair)
        yield pair


@pytest.fixture(scope="module", params=wide(PAIRS, 2), ids=lambda pair: "-".join(pair[:3]))
def own(request, ahead):
    with ahead.servers(servers, request.param) as pair:
        yield pair


def drill_prompt(own, what: str) -> list[int]:
    return prompt(100, f"{own.mode} {what}")


def outcome(own, ids: list[int]) -> list[int] | Refused:
    return complete(own.router, request(ids))


def complete(server, body: dict) -> list[int] | Refused:
    try:
        return tokens(server.complete(body))
    except Refused as refused:
        return refused


def replace_host(server) -> float:
    """Kills the host of a server, and waits for the next one; says when."""
    host = server.host()
    os.kill(host, signal.SIGKILL)
    killed = time.monotonic()
    server.wait_until("a new host", lambda: server.host() not in (None, host), AGAIN_S)
    return killed


def wait_served(own) -> None:
    """Waits until a request is answered: the router may know the pair by what hosts said that are
    gone, and an engine takes a while to join the next one."""
    ids = drill_prompt(own, "again")
    own.decode.wait_until("an answer", lambda: isinstance(outcome(own, ids), list), AGAIN_S)


def prompts(own, seed: str) -> list[list[int]]:
    return [prompt(700 + n, f"{own.mode} {seed}") for n in range(12)]


def check_afterwards(own, reference, seed: str) -> None:
    own.decode.wait_idle(LEASE_S)
    own.prefill.wait_idle(LEASE_S)
    ids = prompt(300, f"{own.mode} after {seed}")
    assert tokens(own.router.complete(request(ids))) == reference(ids)


def test_without_a_copy_the_tokens_differ(own, reference):
    """What the other tests compare comes by the transfer."""
    ids = drill_prompt(own, "suppressed")
    assert isinstance(own.drills[0], list) and own.drills[0] != reference(ids)


def test_a_transfer_that_fails_follows_the_policy(own, reference):
    if own.policy == "recompute":
        assert own.drills[1] == reference(drill_prompt(own, "failed"))
    else:
        assert isinstance(own.drills[1], Refused) and own.drills[1].status >= 500
        assert "(fabric): transfer failed: " in json.loads(own.drills[1].body)["error"]["message"]
    check_afterwards(own, reference, "drills")


def test_a_plain_request_to_a_decode(own, reference):
    ids = prompt(333, f"{own.mode} plain")
    assert tokens(own.decode.complete(request(ids))) == reference(ids)


def test_logprobs_of_the_prompt(own, reference):
    """Decode has to compute the prompt itself."""
    ids = prompt(100, f"{own.mode} logprobs")
    answer = own.router.complete(request(ids, prompt_logprobs=0))
    assert tokens(answer) == reference(ids)
    logprobs = answer["choices"][0]["prompt_logprobs"]
    assert len(logprobs) == len(ids) and all(logprobs[1:])
    check_afterwards(own, reference, "logprobs")


def test_a_server_without_the_secret_is_refused(own, reference):
    """A decode in one mode, a prefill in the other; both sides say why."""
    role = "decode" if own.mode == "WRITE" else "prefill"
    ids = prompt(200, f"{own.mode} stranger")
    with own.another(role, {"KVFERRY_SECRET_FILE": ""}) as stranger:
        pair = {name: getattr(own, name) for name in ROLES} | {role: stranger}
        known = {name: server.log.stat().st_size for name, server in pair.items()}
        pair = SimpleNamespace(mode=own.mode, **pair)
        key = native.key()
        with ThreadPoolExecutor(1) as pool:
            to_prefill = native.to_prefill(pair, key) | request(ids, max_tokens=1)
            prefilled = pool.submit(complete, pair.prefill, to_prefill)
            answer = complete(pair.decode, native.to_decode(pair, key, own.secret) | request(ids))
            prefilled.result()
        for name in ROLES:
            with getattr(pair, name).log.open() as log:
                log.seek(known[name])
                assert "secret" in log.read(), name
    if own.policy == "recompute":
        assert answer == reference(ids)
    else:
        assert isinstance(answer, Refused) and answer.status >= 500
    check_afterwards(own, reference, "a stranger")


def test_a_client_leaves_while_decode_waits(own, reference):
    """Nobody prefills: the leg of the prefill is never sent."""
    ids = prompt(200, f"{own.mode} left")
    first = own.prefill.complete(request(ids, max_tokens=1))
    assert "kv_transfer_params" not in first or first["kv_transfer_params"] is None
    with pytest.raises(RuntimeError):
        own.decode.complete(native.to_decode(own, native.key(), own.secret) | request(ids), 1)
    check_afterwards(own, reference, "left")


def test_clients_leave_in_every_phase(own, reference):
    """Thirty requests whose clients wait from 10 to 600 ms."""

    def ask(n: int) -> None:
        ids = prompt(1200, f"{own.mode} leaves {n}")
        try:
            own.router.complete(request(ids), 0.01 + 0.02 * n)
        except OSError:
            pass

    known = {name: getattr(own, name).log.stat().st_size for name in ROLES}
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(ask, range(30)))
    check_afterwards(own, reference, "leaves")
    for name in ROLES:
        with getattr(own, name).log.open() as log:
            log.seek(known[name])
            warnings = [line for line in log if re.search(r"WARN.*(load failed|rejected|source free)", line)]
        assert not warnings, name


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_killed_host_is_replaced(own, reference, side):
    server = getattr(own, side)
    with Load(own, reference, prompts(own, f"host of {side}")) as load:
        load.answers(4, 60)
        killed = replace_host(server)
        own.router.wait_for("the pair again")
        load.answers(8, AGAIN_S)
    load.check(killed, CLEAR_S)
    # They had said nothing: they were sent again until the next host was there.
    assert load.failed(killed) == []
    check_afterwards(own, reference, f"the host of {side} was killed")


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_host_that_is_paused_goes_on(own, reference, side):
    server = getattr(own, side)
    with Load(own, reference, prompts(own, f"pause of {side}")) as load:
        load.answers(4, 60)
        host = server.host()
        os.kill(host, signal.SIGSTOP)
        paused = time.monotonic()
        try:
            # How long it lasts is what is tried.
            time.sleep(PAUSE_S)
        finally:
            os.kill(host, signal.SIGCONT)
        load.answers(8, AGAIN_S)
    load.check(paused, PAUSE_S + CLEAR_S)
    assert server.host() == host
    check_afterwards(own, reference, f"a pause of {side}")


@pytest.mark.wide
def test_client_of_the_router_sees_that_the_host_of_a_prefill_is_silent(own, reference):
    host = own.prefill.host()
    os.kill(host, signal.SIGSTOP)
    try:
        answer = complete(own.router, request(prompt(120, f"{own.mode} silent")))
    finally:
        os.kill(host, signal.SIGCONT)
    if own.policy == "fail":
        message = json.loads(answer.body)["error"]["message"]
        assert re.search(r"\((peer-silent|unreachable)\): peer .*; check that the host of the prefill runs", message)
    wait_served(own)
    check_afterwards(own, reference, "a silent host")


@pytest.mark.wide
def test_a_failed_load_follows_the_policy(own, reference):
    """The prefill does not know the transfer, and waits half a minute for it."""
    ids = prompt(150, f"{own.mode} failed load")
    try:
        got = tokens(own.decode.complete(native.to_decode(own, native.key(), own.secret) | request(ids), 60))
        assert own.policy == "recompute" and got == reference(ids)
    except (Refused, RuntimeError) as error:
        assert own.policy == "fail", error
        assert isinstance(error, Refused) and error.status == 500
    check_afterwards(own, reference, "a failed load")


def test_a_killed_router_leaves_nothing_behind(own, reference, logs):
    with Load(own, reference, prompts(own, "router killed")) as load:
        load.answers(4, 60)
        own.router.kill()
    own.prefill.wait_idle(LEASE_S)
    own.decode.wait_idle(LEASE_S)
    own.router = Router(logs / f"router-again-{own.mode.lower()}.log", own.router)
    own.router.wait_for("the pair again")
    check_afterwards(own, reference, "the router was killed")


@pytest.mark.wide
def test_a_prefill_comes_back_with_a_smaller_pool(own, reference):
    with Load(own, reference, prompts(own, "smaller pool")) as load:
        load.answers(4, 60)
        killed = time.monotonic()
        own.prefill.kill()
        own.restart("prefill", [f"--kv-cache-memory-bytes={KV_BYTES // 3}"])
        load.answers(8, AGAIN_S)
    load.check(killed, CLEAR_S)
    check_afterwards(own, reference, "a smaller pool")


@pytest.mark.last
def test_a_killed_server_is_a_clear_error(own, reference):
    """The prefill in one mode, the decode in the other."""
    lost, left = own.prefill, own.decode
    if own.mode == "READ":
        lost, left = left, lost
    with Load(own, reference, prompts(own, "server killed")) as load:
        load.answers(4, 60)
        killed = time.monotonic()
        lost.kill()
        left.wait_until("a refusal", lambda: load.asked[-1].error is not None, CLEAR_S)
    load.check(killed, CLEAR_S)
    left.wait_idle(LEASE_S)
