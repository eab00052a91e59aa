"""MultiConnector with KvferryConnector and vLLM's CPU offloading on both sides."""

import os
from contextlib import contextmanager
from pathlib import Path

import pytest
from client import metric, post
from conftest import MODES, at_once, prompt
from pair import KVFERRY, ROLES, request, served, tokens

pytestmark = pytest.mark.wide

OFFLOADING = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {
        "cpu_bytes_to_use": 64 << 20,
        "spec_name": "HostOffloading",
        "spec_module_path": "offloading",
    },
}


@contextmanager
def servers(mode: str, place):
    paths = f"{os.environ['PYTHONPATH']}:{Path(__file__).parent}"
    env = {"PYTHONPATH": paths, "VLLM_SERVER_DEV_MODE": "1"}
    connectors = dict.fromkeys(ROLES, KVFERRY | {"beside": [OFFLOADING]})
    with served(f"multi-{mode.lower()}", place, mode, connectors, env) as pair:
        yield pair


@pytest.fixture(scope="module", params=MODES)
def own(request, ahead):
    with ahead.servers(servers, request.param) as pair:
        yield pair


def external_hits(server) -> float:
    return metric(server.port, "vllm:external_prefix_cache_hits_total")


def test_what_was_offloaded_is_handed_over(own, reference):
    ids = prompt(700, f"multi {own.mode}")
    assert tokens(own.router.complete(request(ids))) == reference(ids)
    # What is offloaded goes with the steps after it.
    other = prompt(100, f"multi {own.mode} other")
    assert tokens(own.router.complete(request(other))) == reference(other)
    for server in (own.prefill, own.decode):
        server.wait_idle()
        post(server.port, "/reset_prefix_cache", {}, 10)
    before = external_hits(own.prefill)
    assert tokens(own.router.complete(request(ids))) == reference(ids)
    assert external_hits(own.prefill) > before
    for server in (own.prefill, own.decode):
        assert metric(server.port, "vllm:kvferry_transfers_total", 'outcome="done"') >= 3


def test_eight_at_a_time_in_chunks(own, reference):
    answers, expected = at_once(own, reference, f"multi {own.mode} at once")
    assert answers == expected


def test_afterwards_every_block_is_free(own):
    own.prefill.wait_idle(90)
    own.decode.wait_idle(90)
