"""KvferryConnector with a host beside each server, both modes, against a single server."""

import json
import os
import re
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import model as tiny
import native
import pytest
from client import Refused, metric, post
from conftest import MODES, at_once, prompt, wide
from pair import PLACES, ROLES, kvferry_at, request, served, tokens
from prompts import assert_hashes_are_logged, sources, wait_for_transfer
from router import BINARY
from server import BLOCK_TOKENS
from soak import CLIENTS, Soak, growth, requests_wanted, sample
from stops import stop
from test_pd import LENGTHS

# After a step of a worker, and of a wait for KV.
SPIN_S = 1.5
WAITING_S = 4.0
# CPU seconds of a decode's processes per second of a wait for KV. It is 1.2 if each step goes to the worker.
BURNT_MAX = 0.3

# What an allocator keeps of a host's memory.
HOST_GROWTH_KIB = 8 << 10


# By which the two engines make different prompts of one chat, of equal length.
TEMPLATES = {role: f"{{% for it in messages %}}{role[0]}{{{{ it.content }}}}{{% endfor %}}" for role in ROLES}

# `test_connector_faults` has a pair with its transfer actors in the workers, too.
PAIRS = wide([(mode, place) for place in PLACES for mode in MODES], 2)


@contextmanager
def servers(param: tuple[str, str], place):
    """With vLLM's default, asynchronous scheduling; `test_connector_mixed` has each side without."""
    mode, actors = param
    connectors = dict.fromkeys(ROLES, kvferry_at(actors))
    name, env = f"own-{mode.lower()}-{actors}", {"KVFERRY_HOST_METRICS": "127.0.0.1:0"}
    flags = {role: ["--chat-template", TEMPLATES[role]] for role in ROLES}
    with served(name, place, mode, connectors, env, asynchronous=True, flags=flags) as pair:
        pair.in_host = actors == "sidecar"
        yield pair


@pytest.fixture(scope="module", params=PAIRS, ids="-".join)
def own(request, ahead):
    with ahead.servers(servers, request.param) as pair:
        yield pair


@pytest.mark.parametrize("length", LENGTHS)
def test_same_tokens_as_a_single_server(own, reference, length):
    ids = prompt(length, f"own {own.mode}")
    assert tokens(own.router.complete(request(ids))) == reference(ids)


@pytest.mark.parametrize("length", [33, 700])
def test_decode_computes_at_most_one_token_of_a_prompt(own, reference, length):
    wait_idle(own)
    ids, before = prompt(length, f"computed {own.mode}"), sources(own.decode)
    assert tokens(own.router.complete(request(ids))) == reference(ids)
    wait_for_transfer(own.decode, before, len(ids))


@pytest.mark.parametrize("length", [33, 700])
@pytest.mark.parametrize("differing", ["one", "all"])
def test_another_prompt_of_equal_length_is_an_error_with_both_hashes(own, length, differing):
    """Stands for one request that two engines render by different templates or tokenizers."""
    ids, other = prompt(length, f"rendered {own.mode} {differing}"), prompt(length, f"another {differing}")
    if differing == "one":
        other = [*other[:1], *ids[1:]]
    assert other != ids
    key = native.key()
    to_prefill = native.to_prefill(own, key) | request(ids, max_tokens=1)
    to_decode = native.to_decode(own, key) | request(other)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(own.prefill.complete, to_prefill)
        with pytest.raises(Refused):
            own.decode.complete(to_decode)
        first.result()
    assert_hashes_are_logged(own.decode, ids, other)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_client_of_the_router_sees_that_two_engines_rendered_different_prompts(own, stream):
    content = f"Once {own.mode} {stream} " + "x" * 300
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 4, "stream": stream}
    known = own.decode.log.stat().st_size
    with pytest.raises(Refused) as refused:
        post(own.router.port, "/v1/chat/completions", body, 60)
    message = json.loads(refused.value.body)["error"]["message"]
    hashes = re.findall(r"the decode's has hash ([0-9a-f]{32}), the prefill's ([0-9a-f]{32});", message)
    assert len(hashes) == 1 and hashes[0][0] != hashes[0][1], message
    assert "send the prompt as token ids" in message and "127.0.0.1" not in refused.value.body
    # The engine and the router have it once: the request is not tried again.
    with own.decode.log.open() as log:
        log.seek(known)
        assert log.read().count(hashes[0][0]) == 1
    assert sum(hashes[0][0] in line for line in own.router.log.read_text().splitlines()) == 1


def test_eight_at_a_time_in_chunks(own, reference):
    answers, expected = at_once(own, reference, f"own {own.mode} at once")
    assert answers == expected


def test_decode_sleeps_while_its_kv_is_computed(own, reference):
    """And serves others meanwhile. A pull is asked for when its KV is there."""
    if own.mode == "READ":
        pytest.skip("the decode leg of a pull comes after the prompt is computed")
    wait_idle(own)
    ids, other = prompt(300, "computed late"), prompt(40, "meanwhile")
    expected = reference(ids)
    worker = own.prefill.worker()
    stop(worker)
    try:
        with ThreadPoolExecutor(1) as pool:
            late = pool.submit(own.router.complete, request(ids))
            waits = lambda: metric(own.decode.port, "vllm:num_requests_waiting") == 1
            own.decode.wait_until("its metrics have the request", waits, 30)
            # vLLM's workers spin for a second after a step.
            time.sleep(SPIN_S)
            before = own.decode.cpu_seconds()
            time.sleep(WAITING_S)
            burnt = (own.decode.cpu_seconds() - before) / WAITING_S
            assert tokens(own.decode.complete(request(other))) == reference(other)
            os.kill(worker, signal.SIGCONT)
            assert tokens(late.result()) == expected
    finally:
        os.kill(worker, signal.SIGCONT)
    assert burnt < BURNT_MAX, f"{burnt} CPU seconds a second"


def test_many_requests_with_aborts_leave_nothing(own, reference):
    """Threads and descriptors are as many as before, and so is the memory of the hosts."""
    soak = Soak(own, reference, f"soak {own.mode}")
    count = requests_wanted()
    soak.run(count // 4)
    wait_idle(own)
    before = sample(own)
    soak.run(count)
    wait_idle(own)
    after = sample(own)
    print(f"{soak.right} right, {soak.left} left early", *growth(before, after), sep="\n")
    assert not soak.wrong, soak.wrong[:5]
    assert soak.right > count / 2 and soak.left > 0
    assert before.keys() == after.keys(), growth(before, after)
    for pid, was in before.items():
        now = after[pid]
        assert now.threads <= was.threads + 1, (was, now)
        # Connections that clients of the server keep.
        assert now.descriptors <= was.descriptors + CLIENTS, (was, now)
        assert "host" not in was.name or now.memory <= was.memory + HOST_GROWTH_KIB, (was, now)


def moved(server) -> float:
    """Bytes of KV, as vLLM's own metrics say; there is no series before the first."""
    try:
        return metric(server.port, "vllm:kvferry_transfer_bytes_total")
    except KeyError:
        return 0


def test_a_transfer_is_in_the_metrics_of_vllm(own):
    blocks = 22
    expected = blocks * BLOCK_TOKENS * tiny.LAYERS * tiny.KV_HEADS * 2 * tiny.HEAD_DIM * 4
    wait_idle(own)
    # A prefill that is read from does not see it, and the host of a worker that is written to only later.
    sides = [own.decode] if own.mode == "READ" else [own.prefill, own.decode][: 1 + own.in_host]
    before = [moved(server) for server in sides]
    own.router.complete(request(prompt(700, f"metrics {own.mode}")))
    for server, bytes_before in zip(sides, before, strict=True):
        after = bytes_before + expected
        server.wait_until(f"{after} bytes are in its metrics", lambda: moved(server) == after, 30)
        for series in ("duration_seconds_count", "queue_seconds_count"):
            assert metric(server.port, f"vllm:kvferry_transfer_{series}") > 0
    assert metric(own.prefill.port, "vllm:kvferry_transfers_total") > 0
    assert metric(own.prefill.port, "vllm:kvferry_trust") == 1


def test_hosts_serve_their_own_metrics(own):
    for server in (own.prefill, own.decode):
        assert metric(server.host_metrics(), "kvferry_transfers_total") >= 1


def test_the_last_transfers_can_be_exported(own, tmp_path):
    own.router.complete(request(prompt(100, f"export {own.mode}")))
    wait_idle(own)
    file = tmp_path / "trace.json"
    live = [f"--live={server.socket()}" for server in (own.prefill, own.decode)]
    subprocess.run([os.environ[BINARY], "export", *live, f"--out={file}"], check=True)
    slices = [event for event in json.loads(file.read_text())["traceEvents"] if event["ph"] == "X"]

    def newest(process: int, name: str) -> dict:
        of_side = [event for event in slices if (event["pid"], event["name"]) == (process, name)]
        return max(of_side, key=lambda event: event["ts"])["args"]

    sides = newest(1, "held" if own.mode == "READ" else "transfer"), newest(2, "transfer")
    assert [(side["outcome"], side["why"]) for side in sides] == [("done", None)] * 2, sides
    assert sides[0]["transfer"] == sides[1]["transfer"]


def test_afterwards_every_block_is_free(own):
    wait_idle(own)


def wait_idle(own) -> None:
    own.prefill.wait_idle(90)
    own.decode.wait_idle(90)
