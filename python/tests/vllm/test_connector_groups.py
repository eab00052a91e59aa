"""KvferryConnector with models that have sliding windows: in every second layer, which is two KV cache groups,
and in all layers."""

from concurrent.futures import ThreadPoolExecutor

import model as tiny
import pytest
from conftest import MODES, Place, Reference, at_once, prompt
from pair import ROLES, kvferry_at, request, served, tokens
from ports import free_ports
from server import BLOCK_TOKENS, Server

WINDOW = 128
pytestmark = pytest.mark.wide

LENGTHS = [1, 33, 127, 128, 129, 257, 1500, 2500]
# Attention of the layers, and how many groups they are in.
MODELS = {
    "mixed": (["sliding_attention", "full_attention"] * (tiny.LAYERS // 2), 2),
    "windows": (["sliding_attention"] * tiny.LAYERS, 1),
}


@pytest.fixture(scope="module", params=MODELS)
def windowed(request, tmp_path_factory):
    kinds, groups = MODELS[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    return request.param, tiny.write(folder, layer_types=kinds, sliding_window=WINDOW), groups


@pytest.fixture(scope="module")
def single(windowed, logs):
    name, model, _ = windowed
    server = Server(name, model, free_ports(1)[0], logs / f"{name}.log", None, {})
    yield Reference(server)
    server.stop()


@pytest.fixture(scope="module", params=MODES)
def own(request, windowed, logs, single):
    connectors = dict.fromkeys(ROLES, kvferry_at("sidecar"))
    name, model, _ = windowed
    place = Place(model, logs, single, None, {})
    with served(f"{name}-{request.param.lower()}", place, request.param, connectors, asynchronous=True) as pair:
        yield pair


@pytest.mark.parametrize("length", LENGTHS)
def test_same_tokens_as_a_single_server(own, single, reference, length):
    ids = prompt(length, f"groups {own.mode}")
    got = tokens(own.router.complete(request(ids)))
    assert got == single(ids)
    # Else the window would not matter.
    assert length <= WINDOW or got != reference(ids)


def test_every_length_of_a_block_is_handed_over(own, single):
    """Then prompts that begin with these, which are prefix hits on both sides."""
    text = prompt(2 * WINDOW + 2 * BLOCK_TOKENS, f"lengths {own.mode}")
    first = WINDOW + BLOCK_TOKENS + 1
    # Each begins with a token of its own, so that none is a prefix hit of another one.
    prompts = [[at, *text[1 : first + at]] for at in range(BLOCK_TOKENS)]
    longer = [ids + text[: BLOCK_TOKENS + 1] for ids in prompts]
    with ThreadPoolExecutor(8) as pool:
        for each in (prompts, longer):
            got = list(pool.map(lambda ids: tokens(own.router.complete(request(ids))), each))
            for ids, answer in zip(each, got, strict=True):
                assert answer == single(ids), f"{len(ids)} tokens"


def test_eight_at_a_time_in_chunks(own, single):
    answers, expected = at_once(own, single, f"groups {own.mode}")
    assert answers == expected


def test_there_are_as_many_groups_as_kinds_of_layers(own, windowed):
    for server in (own.prefill, own.decode):
        assert f" groups={windowed[2]} " in server.log.read_text()


def test_afterwards_every_block_is_free(own):
    own.prefill.wait_idle(90)
    own.decode.wait_idle(90)
