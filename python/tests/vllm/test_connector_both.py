"""Two servers with `kv_both`: each prefills for the other."""

import copy
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import native
import pytest
from client import metric
from conftest import MODES, at_once, prompt
from pair import KVFERRY, ROLES, request, served, tokens
from prompts import sources, wait_for_transfer

pytestmark = pytest.mark.wide


@contextmanager
def servers(mode: str, place):
    connectors = dict.fromkeys(ROLES, KVFERRY | {"kv_role": "kv_both"})
    with served(f"both-{mode.lower()}", place, mode, connectors, asynchronous=True) as pair:
        yield pair


@pytest.fixture(scope="module", params=MODES)
def own(request, ahead):
    with ahead.servers(servers, request.param) as pair:
        yield pair


def done(server) -> float:
    return metric(server.port, "vllm:kvferry_transfers_total", 'outcome="done"')


@pytest.mark.parametrize("turned", [False, True])
def test_either_prefills_for_the_other(own, reference, turned):
    way = copy.copy(own)
    if turned:
        way.prefill, way.decode = own.decode, own.prefill
    ids = prompt(700, f"both {own.mode} {turned}")
    key, before, counted = native.key(), done(way.decode), sources(way.decode)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(way.prefill.complete, native.to_prefill(way, key) | request(ids, max_tokens=1))
        answer = tokens(way.decode.complete(native.to_decode(way, key) | request(ids)))
        first.result()
    assert answer == reference(ids)
    assert done(way.decode) > before
    wait_for_transfer(way.decode, counted, len(ids))


def test_eight_at_a_time_behind_the_router(own, reference):
    before = [done(server) for server in (own.prefill, own.decode)]
    answers, expected = at_once(own, reference, f"both {own.mode} at once")
    assert answers == expected
    assert all(done(server) > was for server, was in zip((own.prefill, own.decode), before, strict=True))
    assert "leg failed" not in own.router.log.read_text()


def test_afterwards_every_block_is_free(own):
    own.prefill.wait_idle(90)
    own.decode.wait_idle(90)
