"""Which layers of a step are computed, as vLLM's own hooks tell it: the host moves none before."""

import threading
from types import SimpleNamespace

import pytest
import torch
from halves import LAYERS, TAKEN, TOKENS, Engine, Pair, attention, compute
from kvferry.vllm.worker import TOLD_BYTES
from pair import PLACES
from vllm.forward_context import override_forward_context
from vllm.v1.worker import ubatching

# In which a decode would hear of what it waits for: a host takes less than a millisecond for it.
IDLE_STEPS = 100


@pytest.fixture(params=PLACES)
def pair(request, model, tmp_path):
    made = Pair(model, tmp_path, {"transfer": request.param})
    yield made
    made.close()


def in_microbatches(engine: Engine, run, number: int, monkeypatch) -> None:
    """Has vLLM's ubatching run `run(microbatch)` in its threads, which yield where they say so."""
    monkeypatch.setattr(torch, "Event", lambda: SimpleNamespace(record=lambda stream: None))
    monkeypatch.setattr(ubatching, "current_stream", lambda: None)
    ready = threading.Barrier(number + 1)
    contexts = ubatching.make_ubatch_contexts(
        number, None, None, [engine.context() for _ in range(number)], ready
    )

    failures = []

    def of(microbatch: int) -> None:
        with contexts[microbatch]:
            try:
                run(microbatch)
            except BaseException as failure:
                failures.append(failure)

    threads = [threading.Thread(target=of, args=(microbatch,)) for microbatch in range(number)]
    with engine.hooks(), override_forward_context(None):
        for thread in threads:
            thread.start()
        ready.wait()
        contexts[0].cpu_wait_event.set()
        for thread in threads:
            thread.join()
    if failures:
        raise failures[0]


def assert_not_yet(pair, name: str = "r") -> None:
    """The host was not told of what is not computed: then decode would hear that all is there."""
    for _ in range(IDLE_STEPS):
        pair.decode.idle()
        assert name not in pair.decode.loaded | pair.decode.failed


def has(engine: Engine, name: str) -> bool:
    return all(any(block) for block in engine.blocks(name, TAKEN))


def test_a_layer_is_handed_over_when_all_microbatches_have_computed_it(pair, monkeypatch):
    monkeypatch.setattr(pair.prefill.config.parallel_config, "enable_dbo", True)
    pair.arrive("r")
    pair.begin("r")
    order = []

    def run(microbatch: int) -> None:
        for name in LAYERS:
            if order == [(name, of) for name in LAYERS[:2] for of in range(2)]:
                assert_not_yet(pair)
                # Those two are, and in both.
                pair.decode.until(lambda: has(pair.decode, LAYERS[1]))
            block = TAKEN[microbatch]
            attention(lambda name, at=block: pair.prefill.write(name, [at]), name)
            order.append((name, microbatch))
            ubatching.dbo_yield()

    in_microbatches(pair.prefill, run, 2, monkeypatch)
    pair.prefill.end()
    assert order == [(name, of) for name in LAYERS for of in range(2)]
    pair.assert_handed_over()


SHARING = "model.layers.9.self_attn.attn"

# Layers as they are computed first, layers that follow, and those that nothing is told of.
ORDERS = {
    "another order": ([LAYERS[1]], [LAYERS[0], LAYERS[3], LAYERS[2]], []),
    "layers that share KV": ([SHARING, LAYERS[0], SHARING, SHARING], [SHARING, *LAYERS[1:]], []),
    "layers without a hook": ([LAYERS[0], LAYERS[2]], [], [LAYERS[1], LAYERS[3]]),
    "a captured graph": ([], [], LAYERS),
    "an early exit": (LAYERS[:1], [], LAYERS[1:]),
    "a layer twice before those in front of it": ([LAYERS[1]], [LAYERS[1], *LAYERS], []),
}


@pytest.mark.parametrize("name", ORDERS)
def test_layers_are_known_by_name(pair, name):
    first, then, silent = ORDERS[name]
    pair.arrive("r")
    pair.begin("r")
    compute(pair.prefill, first)
    assert_not_yet(pair)
    compute(pair.prefill, then)
    if silent:
        assert_not_yet(pair)
    for layer in silent:
        pair.prefill.write(layer, TAKEN)
    pair.prefill.end()
    pair.assert_handed_over()


@pytest.mark.parametrize("share", [1, 2, 100])
def test_small_layers_are_told_of_together(pair, share, monkeypatch):
    """Layers of a step that are together worth the telling, and the last ones at once."""
    worker = pair.prefill.worker.workers[0]
    monkeypatch.setattr(worker, "token_bytes", TOLD_BYTES / TOKENS / share)
    told, tell = [], worker._tell
    monkeypatch.setattr(worker, "_tell", lambda step: (told.append(worker.layers.done), tell(step)))
    pair.arrive("r")
    pair.begin("r")
    compute(pair.prefill, LAYERS)
    assert told == sorted({*range(share, len(LAYERS), share), len(LAYERS)})
    pair.prefill.end()
    pair.assert_handed_over()


def test_a_small_layer_that_is_computed_again_costs_no_hand_over(pair, monkeypatch):
    """The host was not told of it."""
    monkeypatch.setattr(pair.prefill.worker.workers[0], "token_bytes", 1)
    pair.arrive("r")
    pair.begin("r")
    compute(pair.prefill, LAYERS[:2])
    compute(pair.prefill, LAYERS, of=2)
    assert_not_yet(pair)
    pair.prefill.end()
    pair.assert_handed_over()


def test_a_layer_that_is_computed_again_costs_the_hand_over_once(pair):
    pair.arrive("r")
    pair.begin("r")
    compute(pair.prefill, LAYERS[:2])
    pair.decode.until(lambda: has(pair.decode, LAYERS[0]))
    compute(pair.prefill, LAYERS, of=2)
    pair.prefill.end()
    assert not pair.decode.outcome("r")
    pair.prefill.until(pair.prefill.is_served)
    pair.arrive("s")
    pair.begin("s")
    compute(pair.prefill, LAYERS)
    assert_not_yet(pair, "s")
    compute(pair.prefill, LAYERS, of=2)
    pair.prefill.end()
    pair.assert_handed_over("s")
