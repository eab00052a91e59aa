"""vLLM's own MoRIIOConnector, both modes, against a single server: equal token ids in float32.

The tests of a mode share a pair of servers and run in the order of this file: idle pools come after
all requests, and the last test kills the prefill.
"""

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import count

import pytest
from client import Refused
from conftest import at_once, prompt
from model import KV_HEADS, HEAD_DIM, LAYERS
from pair import TOKENS, request, tokens
from router import CLEAR_S
from server import BLOCK_TOKENS

LENGTHS = [1, 5, 31, 32, 33, 64, 100, 257, 700, 1500, 2500]
# K and V of a block in one layer, float32.
BLOCK_BYTES = BLOCK_TOKENS * KV_HEADS * HEAD_DIM * 2 * 4
# Clients that ask when it dies.
CLIENTS = 4


def test_without_copies_the_answer_is_another(pair, reference):
    """Otherwise equal answers would prove nothing."""
    assert pair.drills.suppressed != reference(prompt(100, "suppressed"))


def test_a_full_queue_costs_only_time(pair, reference):
    if pair.mode == "READ":
        assert pair.drills.queue_full == reference(prompt(100, "queue full"))


def test_a_failed_read_fails_its_own_request(pair):
    if pair.mode == "READ":
        assert pair.drills.failed.startswith("500")


@pytest.mark.parametrize("length", LENGTHS)
def test_same_tokens_as_a_single_server(pair, reference, length):
    ids = prompt(length, pair.mode)
    assert tokens(pair.router.complete(request(ids))) == reference(ids)


@pytest.mark.parametrize("length", LENGTHS)
def test_decode_answers_prefills_prompt(pair, reference, length):
    """Decode is told another prompt of the same length and last token: it computes nothing of it,
    so the answer is still that of the prompt that prefill computed."""
    ids = prompt(length, f"{pair.mode} swapped")
    other = prompt(length, f"{pair.mode} told")[:-1] + ids[-1:]
    assert pair.complete(ids, decode_prompt=other) == reference(ids)


def test_eight_at_a_time_in_chunks(pair, reference):
    answers, expected = at_once(pair, reference, f"{pair.mode} at once")
    assert answers == expected


def test_a_transfer_moves_its_blocks_and_no_more(pair, reference):
    """READ leaves the last token of the prompt to decode, in the same number of blocks."""
    before = len(_audit(pair))
    ids = prompt(4 * BLOCK_TOKENS, f"{pair.mode} audit")
    assert tokens(pair.router.complete(request(ids))) == reference(ids)
    lines = _audit(pair)[before:]
    reader, writer = ("consumer:", "producer:") if pair.mode == "READ" else ("producer:", "consumer:")
    assert len(lines) == LAYERS
    for line in lines:
        assert line["direction"] == pair.mode.lower() and line["error"] is None
        assert line["engine"].startswith(reader) and line["peer"].startswith(writer)
        assert line["bytes"] == 4 * BLOCK_BYTES
    assert len({line["sha256"] for line in lines}) == LAYERS, "no two layers are alike"


def _audit(pair) -> list[dict]:
    return [json.loads(line) for line in pair.audit.read_text().splitlines()]


def test_afterwards_every_block_is_free(pair):
    pair.prefill.wait_idle()
    pair.decode.wait_idle()


@pytest.mark.last
def test_a_killed_prefill_is_a_clear_answer(pair):
    """Clients that ask on and on, so that requests in all phases are in flight when it is killed."""
    first, last = threading.Event(), threading.Event()
    with ThreadPoolExecutor(CLIENTS) as pool:
        clients = [pool.submit(_ask_on, pair, n, first, last) for n in range(CLIENTS)]
        try:
            if not first.wait(30):
                said = [pair.router.tail(), pair.decode.tail(), pair.prefill.stacks()]
                pytest.fail("\n".join(["no answer ahead of the kill", *said]))
        finally:
            killed = time.monotonic()
            last.set()
            pair.prefill.kill()
        ends = [client.result() for client in clients]
    assert max(ends) - killed < CLEAR_S


def _ask_on(pair, client: int, first: threading.Event, last: threading.Event) -> float:
    """When the request ended that was in flight at the time of `last`."""
    for n in count():
        ids = prompt(1500, f"{pair.mode} killed {client} {n}")
        try:
            assert len(tokens(pair.router.complete(request(ids)))) == TOKENS
        except Refused as refused:
            error = json.loads(refused.body)["error"]
            assert refused.status in (502, 503, 504) and error["message"] and error["type"]
            assert last.is_set(), f"refused ahead of the kill: {refused}"
        first.set()
        if last.is_set():
            return time.monotonic()
