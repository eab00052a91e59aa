"""KvferryConnector with `backend` `rdma`, in the workers, over the stand-in for MoRI."""

import os
from contextlib import contextmanager

import pytest
from conftest import MODES, at_once, prompt, wide
from pair import ROLES, kvferry_at, request, served, tokens

# Around a block's end, and longer than what is computed in a step.
LENGTHS = [1, 32, 33, 257, 2500]


@contextmanager
def servers(mode: str, place):
    connector = kvferry_at("worker")
    connector["kv_connector_extra_config"] |= {"backend": "rdma", "qp_per_transfer": 2}
    env = {"KVFERRY_MORI_WITHOUT_DEVICES": "1", "KVFERRY_MORI_SHIM": os.environ["KVFERRY_MORI_SHIM"]}
    connectors = dict.fromkeys(ROLES, connector)
    with served(f"mori-{mode.lower()}", place, mode, connectors, env) as pair:
        yield pair


@pytest.fixture(scope="module", params=wide(MODES))
def own(request, ahead):
    with ahead.servers(servers, request.param) as pair:
        yield pair


@pytest.mark.parametrize("length", LENGTHS)
def test_same_tokens_as_a_single_server(own, reference, length):
    ids = prompt(length, f"mori {own.mode}")
    assert tokens(own.router.complete(request(ids))) == reference(ids)


def test_eight_at_a_time_in_chunks(own, reference):
    answers, expected = at_once(own, reference, f"mori {own.mode} at once")
    assert answers == expected


def test_the_backend_is_told_and_takes_the_bytes(own):
    logs = {server.name: server.log.read_text() for server in (own.prefill, own.decode)}
    assert all("backend=mori-rdma" in log for log in logs.values()), logs.keys()
    assert all("this worker moves its KV rank=0" in log for log in logs.values()), logs.keys()
    initiator = own.prefill if own.mode == "WRITE" else own.decode
    assert "KV takes this path path=mori-rdma" in logs[initiator.name]


def test_afterwards_every_block_is_free(own):
    own.prefill.wait_idle(90)
    own.decode.wait_idle(90)
