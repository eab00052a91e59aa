"""KvferryConnector with a model whose layers are in two KV cache groups: with and without a sliding
window."""

import model as tiny
import pytest
from conftest import MODES, Place, Reference, at_once, prompt
from pair import ROLES, kvferry_at, request, served, tokens
from ports import free_ports
from server import Server

WINDOW = 128
pytestmark = pytest.mark.wide

LENGTHS = [1, 33, 127, 128, 129, 257, 1500, 2500]


@pytest.fixture(scope="module")
def windowed(tmp_path_factory):
    kinds = ["sliding_attention", "full_attention"] * (tiny.LAYERS // 2)
    folder = tmp_path_factory.mktemp("windowed")
    return tiny.write(folder, layer_types=kinds, sliding_window=WINDOW)


@pytest.fixture(scope="module")
def single(windowed, logs):
    server = Server("windowed", windowed, free_ports(1)[0], logs / "windowed.log", None, {})
    yield Reference(server)
    server.stop()


@pytest.fixture(scope="module", params=MODES)
def own(request, windowed, logs, single):
    connectors = dict.fromkeys(ROLES, kvferry_at("sidecar"))
    name, place = f"groups-{request.param.lower()}", Place(windowed, logs, single, None)
    with served(name, place, request.param, connectors, asynchronous=True) as pair:
        yield pair


@pytest.mark.parametrize("length", LENGTHS)
def test_same_tokens_as_a_single_server(own, single, reference, length):
    ids = prompt(length, f"groups {own.mode}")
    got = tokens(own.router.complete(request(ids)))
    assert got == single(ids)
    # Else the window would not matter.
    assert length <= WINDOW or got != reference(ids)


def test_eight_at_a_time_in_chunks(own, single):
    answers, expected = at_once(own, single, f"groups {own.mode}")
    assert answers == expected


def test_there_are_two_groups(own):
    for server in (own.prefill, own.decode):
        assert " groups=2 " in server.log.read_text()


def test_afterwards_every_block_is_free(own):
    own.prefill.wait_idle(90)
    own.decode.wait_idle(90)
