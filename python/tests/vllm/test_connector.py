"""KvferryConnector with a host beside each server, both modes, against a single server."""

from concurrent.futures import ThreadPoolExecutor

import native
import pytest
from conftest import MODES, at_once, prompt
from pair import KVFERRY, ROLES, request, served, tokens
from test_pd import LENGTHS


@pytest.fixture(scope="module", params=MODES)
def own(request, model, logs, reference):
    """With vLLM's default, asynchronous scheduling; `test_connector_mixed` has each side without."""
    mode, connectors = request.param, dict.fromkeys(ROLES, KVFERRY)
    with served(f"own-{mode.lower()}", reference, mode, model, logs, connectors, asynchronous=True) as pair:
        yield pair


@pytest.mark.parametrize("length", LENGTHS)
def test_same_tokens_as_a_single_server(own, reference, length):
    ids = prompt(length, f"own {own.mode}")
    assert tokens(own.router.complete(request(ids))) == reference(ids)


@pytest.mark.parametrize("length", [33, 700])
def test_decode_answers_the_prompt_that_prefill_computed(own, reference, length):
    """Decode is told another one, and computes none of it but the last token."""
    ids, other = prompt(length, f"swap {own.mode}"), prompt(length, "another")
    other[-1] = ids[-1]
    key = native.key()
    to_prefill = native.to_prefill(own, key) | request(ids, max_tokens=1)
    to_decode = native.to_decode(own, key) | request(other)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(own.prefill.complete, to_prefill)
        assert tokens(own.decode.complete(to_decode)) == reference(ids)
        first.result()
    assert reference(other) != reference(ids)


def test_eight_at_a_time_in_chunks(own, reference):
    answers, expected = at_once(own, reference, f"own {own.mode} at once")
    assert answers == expected


def test_afterwards_every_block_is_free(own):
    own.prefill.wait_idle()
    own.decode.wait_idle()
