"""KvferryConnector on one side and vLLM's own MoRIIOConnector on the other, behind `kvferry router`."""

import pytest
from conftest import MODES, prompt
from pair import ROLES, Pair, request, tokens
from router import served
from test_connector import CONNECTOR
from test_pd import LENGTHS

MORIIO = {"kv_connector": "MoRIIOConnector"}
KINDS = [(role, mode) for role in ROLES for mode in MODES]


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: f"own-{kind[0]}-{kind[1]}")
def mixed(request, model, logs, reference):
    role, mode = request.param
    connectors = {other: CONNECTOR if other == role else MORIIO for other in ROLES}

    def make(discovery: int) -> Pair:
        return Pair(mode, model, logs, discovery, {}, connectors)

    with served(f"mixed-{role}-{mode.lower()}", logs, reference, make) as pair:
        yield pair


@pytest.mark.parametrize("length", LENGTHS)
def test_same_tokens_as_a_single_server(mixed, reference, length):
    ids = prompt(length, f"mixed {mixed.mode}")
    assert tokens(mixed.router.complete(request(ids))) == reference(ids)


def test_afterwards_every_block_is_free(mixed):
    mixed.prefill.wait_idle(90)
    mixed.decode.wait_idle(90)
