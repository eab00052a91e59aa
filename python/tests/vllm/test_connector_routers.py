"""KvferryConnector on both sides behind routers that are not ours: the real vllm-router, and legs as
llm-d and vLLM's toy proxy send them."""

import json
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import pytest
from client import Refused, metric
from conftest import MODES, at_once, prompt, wide
from legs import of, params, router_id
from pair import KVFERRY, ROLES, TOKENS, Pair, request, tokens
from prompts import assert_hashes_are_logged, sources, wait_for_transfer
from router import Router
from vllm_router import VllmRouter

LENGTHS = [1, 33, 257, 2500]
# What vLLM's toy proxy takes from the answer of a prefill.
COPIED = ("remote_engine_id", "remote_block_ids", "transfer_id")


class Front:
    """The router, with answers as the other tests want them."""

    def __init__(self, router: VllmRouter):
        self.router = router

    def complete(self, body: dict, seconds: float = 60) -> dict:
        status, text = self.router.complete(body, seconds)
        if status != 200:
            raise Refused(status, text)
        return json.loads(text)


def spoken(own: Pair) -> dict[str, float]:
    """Transfers of the decode that were done, by dialect; there is no series before the first."""
    sums = dict.fromkeys(("native", "moriio"), 0.0)
    for dialect in sums:
        with suppress(KeyError):
            name = "vllm:kvferry_transfers_spoken_total"
            sums[dialect] = metric(own.decode.port, name, f'dialect="{dialect}"')
    return sums


def assert_one_more_was_native(own: Pair, before: dict[str, float]) -> None:
    after = before | {"native": before["native"] + 1}
    own.decode.wait_until(f"{after} were spoken", lambda: spoken(own) == after, 30)


@contextmanager
def servers(mode: str, place):
    router, pair = VllmRouter(place.logs / f"vllm-router-{mode}.log"), None
    connectors = dict.fromkeys(ROLES, KVFERRY)
    try:
        pair = Pair(mode, place.model, place.logs, router.discovery, connectors, asynchronous=True)
        pair.router = Front(router)
        place.reference.server.ready()
        pair.ready()
        router.wait_for_pair({"prompt": [1], "max_tokens": 1})
        yield pair
    finally:
        if pair is not None:
            pair.stop()
        router.stop()


@pytest.fixture(scope="module", params=wide(MODES))
def own(request, ahead):
    with ahead.servers(servers, request.param) as pair:
        yield pair


@pytest.mark.parametrize("length", LENGTHS)
def test_behind_the_vllm_router(own, reference, length):
    ids = prompt(length, f"vllm-router {own.mode}")
    assert tokens(own.router.complete(request(ids))) == reference(ids)


def test_behind_the_vllm_router_eight_at_a_time(own, reference):
    answers, expected = at_once(own, reference, f"vllm-router {own.mode} at once")
    assert answers == expected


def test_the_vllm_router_starts_again(own, reference):
    router = own.router.router
    router.stop()
    router.start()
    router.wait_for_pair({"prompt": [1], "max_tokens": 1})
    ids = prompt(300, f"vllm-router again {own.mode}")
    assert tokens(own.router.complete(request(ids))) == reference(ids)


@pytest.mark.parametrize("length", wide(LENGTHS, 3))
def test_legs_that_name_host_and_ports(own, reference, length):
    """As llm-d sends them: nothing is in the request's id."""
    ids = prompt(length, f"llm-d {own.mode}")
    assert own.complete(ids) == reference(ids)


def test_decode_computes_at_most_one_token_of_a_prompt(own, reference):
    ids, before = prompt(700, f"computed {own.mode}"), sources(own.decode)
    assert own.complete(ids) == reference(ids)
    wait_for_transfer(own.decode, before, len(ids))


def test_another_prompt_of_equal_length_is_an_error_with_both_hashes(own):
    ids, other = prompt(700, f"rendered {own.mode}"), prompt(700, f"another {own.mode}")
    with pytest.raises(Refused):
        own.complete(ids, other)
    assert_hashes_are_logged(own.decode, ids, other)


@pytest.mark.parametrize("length", wide(LENGTHS, 3))
def test_legs_of_the_toy_proxy(own, reference, length):
    """It asks decode for one token less, and copies little of the answer of a prefill."""
    ids, transfer = prompt(length, f"toy {own.mode}"), f"tx-{uuid.uuid4()}"
    id = {"X-Request-Id": router_id(of(own.prefill), of(own.decode))}
    first = request(ids, max_tokens=1) | params(transfer, True)
    second = request(ids, max_tokens=TOKENS - 1) | params(transfer, False)
    if own.mode == "READ":
        answer = own.prefill.complete(first, headers=id)["kv_transfer_params"]
        second["kv_transfer_params"] |= {key: answer[key] for key in COPIED}
        got = own.decode.complete(second, headers=id)
    else:
        with ThreadPoolExecutor(1) as pool:
            pending = pool.submit(own.prefill.complete, first, headers=id)
            got = own.decode.complete(second, headers=id)
            pending.result()
    assert tokens(got) == reference(ids)[: TOKENS - 1]


# Legs to a prefill of routers that name no decode, and what they change of its answer: llm-d's nixlv2 (and KServe,
# which has no other), Ray Serve, and production-stack.
NULL = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
CARRIERS = {
    "llm-d-nixlv2": (NULL, {}),
    "ray-serve": (NULL, {}),
    "production-stack": (NULL, {"remote_host": "127.0.0.9"}),
}


@pytest.mark.parametrize("length", wide(LENGTHS, 3))
@pytest.mark.parametrize("carrier", CARRIERS)
def test_an_answer_that_is_carried_to_the_decode_is_enough(own, reference, carrier, length):
    leg, changed = CARRIERS[carrier]
    ids, before = prompt(length, f"{carrier} {own.mode}"), spoken(own)
    id = {"X-Request-Id": str(uuid.uuid4())}
    body = request(ids, max_tokens=1) | {"kv_transfer_params": leg}
    params = own.prefill.complete(body, headers=id)["kv_transfer_params"] | changed
    answer = own.decode.complete(request(ids) | {"kv_transfer_params": params}, headers=id)
    assert tokens(answer) == reference(ids)
    assert_one_more_was_native(own, before)


def test_behind_our_router_that_was_named_the_servers(own, reference, tmp_path):
    named = tuple(f"--{role}=http://127.0.0.1:{getattr(own, role).port}" for role in ROLES)
    router = Router(tmp_path / "router.log", args=named)
    try:
        router.wait_for("the pair that it was named")
        ids, before = prompt(700, f"named {own.mode}"), spoken(own)
        assert tokens(router.complete(request(ids))) == reference(ids)
        assert_one_more_was_native(own, before)
        # It has read which models they serve.
        with pytest.raises(Refused) as refused:
            router.complete(request(ids) | {"model": "another"})
        assert "model_not_found" in str(refused.value)
    finally:
        router.stop()


def llmd_write(own, transfer: str) -> dict:
    """The leg to a prefill of llm-d's `--moriio-write-mode`."""
    handshake, notify = own.decode.peer_ports()
    return NULL | {
        "remote_host": "127.0.0.1",
        "remote_notify_port": notify,
        "remote_dp_rank": 0,
        "remote_dp_rank_override": True,
        "remote_handshake_port": handshake,
        "transfer_id": transfer,
        "tp_size": 1,
        "remote_dp_size": 1,
    }


@pytest.mark.parametrize("length", wide(LENGTHS, 3))
@pytest.mark.parametrize("how", ["serial", "parallel"])
def test_legs_of_llmd_in_write_mode(own, reference, how, length):
    if own.mode != "WRITE":
        pytest.skip("llm-d has servers in push mode for it")
    ids, before = prompt(length, f"llm-d write {how}"), spoken(own)
    id, transfer = {"X-Request-Id": str(uuid.uuid4())}, f"tx{uuid.uuid4()}"
    first = request(ids, max_tokens=1) | {"kv_transfer_params": llmd_write(own, transfer)}
    if how == "serial":
        params = own.prefill.complete(first, headers=id)["kv_transfer_params"]
        params |= {"remote_dp_rank": 0, "remote_dp_rank_override": True}
        answer = own.decode.complete(request(ids) | {"kv_transfer_params": params}, headers=id)
    else:
        handshake, notify = own.prefill.peer_ports()
        params = llmd_write(own, transfer) | {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "remote_handshake_port": handshake,
            "remote_notify_port": notify,
        }
        with ThreadPoolExecutor(1) as pool:
            pending = pool.submit(own.prefill.complete, first, headers=id)
            second = request(ids) | {"kv_transfer_params": params}
            answer = own.decode.complete(second, headers=id)
            pending.result()
    assert tokens(answer) == reference(ids)
    assert_one_more_was_native(own, before)


def test_afterwards_every_block_is_free(own):
    own.prefill.wait_idle(90)
    own.decode.wait_idle(90)
