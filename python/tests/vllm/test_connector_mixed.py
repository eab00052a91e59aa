"""KvferryConnector on one side and vLLM's own MoRIIOConnector on the other, behind `kvferry router`."""

from contextlib import contextmanager

import pytest
from conftest import prompt, wide
from pair import KVFERRY, MORIIO, ROLES, request, served, tokens
from test_pd import LENGTHS

# Who has KvferryConnector, and the mode.
KINDS = [("prefill", "WRITE"), ("decode", "READ"), ("prefill", "READ"), ("decode", "WRITE")]


@contextmanager
def servers(param: tuple[str, str], place):
    role, mode = param
    connectors = {other: KVFERRY if other == role else MORIIO for other in ROLES}
    # A secret of the fleet is proven by data planes; MoRIIO's own messages know of none.
    with served(f"mixed-{role}-{mode.lower()}", place, mode, connectors, place.secret) as pair:
        yield pair


@pytest.fixture(scope="module", params=wide(KINDS), ids=lambda kind: f"own-{kind[0]}-{kind[1]}")
def mixed(request, ahead):
    with ahead.servers(servers, request.param) as pair:
        yield pair


@pytest.mark.parametrize("length", LENGTHS)
def test_same_tokens_as_a_single_server(mixed, reference, length):
    ids = prompt(length, f"mixed {mixed.mode}")
    assert tokens(mixed.router.complete(request(ids))) == reference(ids)


def test_afterwards_every_block_is_free(mixed):
    mixed.prefill.wait_idle(90)
    mixed.decode.wait_idle(90)
