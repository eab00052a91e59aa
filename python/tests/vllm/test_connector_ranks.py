"""KvferryConnector between engines of several ranks: TP on either side, and DP."""

from contextlib import contextmanager

import pytest
from conftest import at_once, prompt
from pair import ROLES, kvferry_at, request, served, tokens

TP2 = ["--tensor-parallel-size=2"]
DP2 = ["--data-parallel-size=2", "--data-parallel-address=127.0.0.1"]
LENGTHS = [1, 33, 257, 2500]

pytestmark = pytest.mark.wide

# Mode, where the transfer actors are, and flags of each side.
PAIRS = {
    "write-tp2-to-tp1": ("WRITE", "worker", {"prefill": TP2}),
    "read-tp1-to-tp2": ("READ", "sidecar", {"decode": TP2}),
    "write-dp2-to-dp2": ("WRITE", "sidecar", {"prefill": DP2, "decode": DP2}),
}


@contextmanager
def servers(param: str, place):
    mode, actors, flags = PAIRS[param]
    connectors = dict.fromkeys(ROLES, kvferry_at(actors))
    with served(param, place, mode, connectors, flags=flags) as pair:
        pair.name = param
        yield pair


@pytest.fixture(scope="module", params=PAIRS)
def own(request, ahead):
    with ahead.servers(servers, request.param) as pair:
        yield pair


@pytest.mark.parametrize("length", LENGTHS)
def test_same_tokens_as_a_single_server(own, reference, length):
    ids = prompt(length, own.name)
    assert tokens(own.router.complete(request(ids))) == reference(ids)


def test_eight_at_a_time_in_chunks(own, reference):
    answers, expected = at_once(own, reference, own.name)
    assert answers == expected


def test_every_leg_found_its_rank(own):
    """The router would have tried again elsewhere."""
    assert "leg failed" not in own.router.log.read_text()


def test_afterwards_every_block_is_free(own):
    own.prefill.wait_idle(90)
    own.decode.wait_idle(90)
