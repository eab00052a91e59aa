"""vLLM's connector on one side and `kvferry serve` on the other: the bytes that arrive are those that
were there, read past both data planes."""

import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest
from conftest import prompt
from instance import Instance
from kv import Memory, assert_copied
from pair import request

LENGTHS = [33, 64, 300, 1500]


@pytest.fixture(scope="session")
def instances(pair, logs):
    """An instance of either role in the mode of the pair."""
    made = {}
    try:
        for role in ("prefill", "decode"):
            made[role] = Instance(role, pair.mode, logs / f"{role}-instance-{pair.mode.lower()}.log")
        yield made
    finally:
        for instance in made.values():
            instance.stop()


def address(handshake: int, notify: int) -> str:
    return f"host:127.0.0.1,handshake:{handshake},notify:{notify}"


def of(server) -> str:
    """Address of a vLLM server."""
    return address(server.extra["handshake_port"], server.extra["notify_port"])


def router_id(prefill: str, decode: str) -> str:
    return f"___prefill_addr_{prefill}___decode_addr_{decode}_{uuid.uuid4().hex}"


def params(transfer: str, to_prefill: bool) -> dict:
    return {
        "kv_transfer_params": {
            "transfer_id": transfer,
            "do_remote_decode": to_prefill,
            "do_remote_prefill": not to_prefill,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_dp_size": 1,
            "remote_tp_size": 1,
        }
    }


def both(mode: str, prefill, decode, ids: list[int]) -> tuple[dict, dict]:
    """Answers of both legs, dispatched as a router does; the callables take a body."""
    transfer = f"tx-{uuid.uuid4().hex}"
    to_prefill = request(ids, max_tokens=1) | params(transfer, True)
    to_decode = request(ids)
    if mode == "READ":
        first = prefill(to_prefill)
        return first, decode(to_decode | {"kv_transfer_params": first["kv_transfer_params"]})
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(prefill, to_prefill)
        second = decode(to_decode | params(transfer, False))
        return first.result(), second


@pytest.mark.parametrize("length", LENGTHS)
def test_vllm_prefills_and_kvferry_decodes(pair, instances, length):
    ours = instances["decode"]
    id = router_id(of(pair.prefill), address(ours.handshake, ours.notify))
    ids = prompt(length, f"{pair.mode} mixed")
    first, second = both(
        pair.mode,
        lambda body: pair.prefill.complete(body, headers={"X-Request-Id": id}),
        lambda body: ours.complete(body, id),
        ids,
    )
    blocks = first["kv_transfer_params"]["remote_block_ids"][0]
    kv = second["kvferry"]
    assert kv["source"] == "transferred"
    memory = Memory(pair.prefill.extra["handshake_port"])
    assert kv["digest"] == memory.digest(blocks, length)


@pytest.mark.parametrize("length", LENGTHS)
def test_kvferry_prefills_and_vllm_decodes(pair, instances, length):
    ours = instances["prefill"]
    id = router_id(address(ours.handshake, ours.notify), of(pair.decode))
    ids = prompt(length, f"{pair.mode} mixed the other way")
    first, _ = both(
        pair.mode,
        lambda body: ours.complete(body, id),
        lambda body: pair.decode.complete(body | {"max_tokens": 1}, headers={"X-Request-Id": id}),
        ids,
    )
    blocks = first["kv_transfer_params"]["remote_block_ids"][0]
    source = Memory(ours.handshake)
    assert first["kvferry"]["expected"] == source.digest(blocks, length)
    # Decode computes the last token of the prompt itself.
    assert_copied(source, blocks, Memory(pair.decode.extra["handshake_port"]), 1)
