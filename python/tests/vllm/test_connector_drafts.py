"""Servers that draft tokens: by a model on both sides, and by n-grams at the decode alone."""

import json
from contextlib import contextmanager

import pytest
from client import metric
from conftest import at_once, prompt
from pair import KVFERRY, ROLES, request, served, tokens
from test_pd import LENGTHS

pytestmark = pytest.mark.wide

DRAFTED = 3


def by_model(model) -> list[str]:
    """The model drafts for itself: all is accepted where its KV is there twice."""
    return drafts(method="draft_model", model=str(model))


def by_ngram(model) -> list[str]:
    return drafts(method="ngram", prompt_lookup_max=4, prompt_lookup_min=1)


def drafts(**how) -> list[str]:
    return ["--speculative-config", json.dumps({"num_speculative_tokens": DRAFTED} | how)]


# Mode, how each side drafts, and whether what drafts has the prompt handed over.
PAIRS = {
    "write-model": ("WRITE", dict.fromkeys(ROLES, by_model), True),
    "read-model": ("READ", dict.fromkeys(ROLES, by_model), True),
    "write-model-alone": ("WRITE", {"decode": by_model}, False),
    "read-ngram": ("READ", {"decode": by_ngram}, None),
}
# Of what is drafted, the most and the least that is accepted then. The first drafts of a request stand for
# none.
WITHOUT, WITH = 0.4, 0.7


@contextmanager
def servers(param: str, place):
    mode, sides, has_prompt = PAIRS[param]
    flags = {role: how(place.model) for role, how in sides.items()}
    keys = {"draft_kv": False} if has_prompt is False else {}
    connectors = dict.fromkeys(ROLES, KVFERRY | {"kv_connector_extra_config": keys})
    with served(f"drafts-{param}", place, mode, connectors, flags=flags) as pair:
        pair.name, pair.has_prompt = param, has_prompt
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


def test_what_drafts_has_the_prompt_too(own):
    series = ("vllm:spec_decode_num_accepted_tokens_total", "vllm:spec_decode_num_draft_tokens_total")
    accepted, drafted = (metric(own.decode.port, name) for name in series)
    if own.has_prompt is not None:
        share = accepted / drafted
        assert share > WITH if own.has_prompt else share < WITHOUT


def test_afterwards_every_block_is_free(own):
    own.prefill.wait_idle(90)
    own.decode.wait_idle(90)
