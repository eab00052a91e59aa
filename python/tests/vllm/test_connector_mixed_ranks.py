"""KvferryConnector on one side and vLLM's own MoRIIOConnector on the other, with several ranks: TP of one
size on both sides or of two, where vLLM 0.32.0 moves KV between them, and DP."""

from contextlib import contextmanager

import pytest
from conftest import at_once, prompt
from pair import KVFERRY, MORIIO, ROLES, request, served, tokens
from test_connector_ranks import DP2, TP2

LENGTHS = [1, 33, 257, 2500]

pytestmark = pytest.mark.wide

BOTH_TP2 = dict.fromkeys(ROLES, TP2)
# Who has KvferryConnector, the mode, and flags of each side. A MoRIIOConnector writes between equal TP
# sizes only, and reads between others where every rank has the same heads; ours writes and reads slices.
# Several DP ranks of a MoRIIOConnector take one port on a machine, unless the model has experts.
PAIRS = {
    "own-decode-write-tp2-to-tp2": ("decode", "WRITE", BOTH_TP2),
    "own-prefill-write-tp2-to-tp2": ("prefill", "WRITE", BOTH_TP2),
    "own-decode-read-tp2-to-tp2": ("decode", "READ", BOTH_TP2),
    "own-prefill-read-tp2-to-tp2": ("prefill", "READ", BOTH_TP2),
    "own-prefill-write-tp1-to-tp2": ("prefill", "WRITE", {"decode": TP2}),
    "own-prefill-write-tp2-to-tp1": ("prefill", "WRITE", {"prefill": TP2}),
    "own-decode-read-tp1-to-tp2": ("decode", "READ", {"decode": TP2}),
    "own-decode-read-tp2-to-tp1": ("decode", "READ", {"prefill": TP2}),
    "own-decode-write-dp1-to-dp2": ("decode", "WRITE", {"decode": DP2}),
    "own-prefill-read-dp2-to-dp1": ("prefill", "READ", {"prefill": DP2}),
}


@contextmanager
def servers(param: str, place):
    role, mode, flags = PAIRS[param]
    connectors = {other: KVFERRY if other == role else MORIIO for other in ROLES}
    with served(f"mixed-{param}", place, mode, connectors, place.secret, flags=flags) as pair:
        pair.name = param
        yield pair


@pytest.fixture(scope="module", params=PAIRS)
def mixed(request, ahead):
    with ahead.servers(servers, request.param) as pair:
        yield pair


@pytest.mark.parametrize("length", LENGTHS)
def test_same_tokens_as_a_single_server(mixed, reference, length):
    ids = prompt(length, mixed.name)
    assert tokens(mixed.router.complete(request(ids))) == reference(ids)


def test_eight_at_a_time_in_chunks(mixed, reference):
    # A decode that has a part of a prompt cannot tell a MoRIIOConnector to write only the rest.
    shared = not mixed.name.startswith("own-decode-write")
    answers, expected = at_once(mixed, reference, f"{mixed.name} at once", shared)
    assert answers == expected


def test_every_leg_found_its_rank(mixed):
    """The router would have tried again elsewhere."""
    assert "leg failed" not in mixed.router.log.read_text()


def test_afterwards_every_block_is_free(mixed):
    mixed.prefill.wait_idle(90)
    mixed.decode.wait_idle(90)
