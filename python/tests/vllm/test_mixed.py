"""vLLM's connector on one side and `kvferry serve` on the other: the bytes that arrive are those that
were there, read past both data planes."""

import pytest
from conftest import prompt
from instance import Instance
from kv import Memory, assert_copied
from legs import address, both, of, router_id

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
