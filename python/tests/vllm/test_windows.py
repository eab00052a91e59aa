"""Sliding windows at every length of a prompt, with the blocks that vLLM's own managers give and free."""

import itertools
from types import SimpleNamespace

import native
import pytest
from halves import Pair, compute, full_attention, step
from kvferry.vllm import engine, worker
from kvferry.vllm.specs import keep_windows
from server import BLOCK_TOKENS
from test_specs import HALVES, group, of
from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import Request

LENGTHS = range(1, 601)
WINDOWS = [64, 128, 256, 257]
SIZES = [16, 32, 64, 128]
MODEL_LEN = 1024
NAMES = itertools.count()


class Managed:
    """The blocks of an engine, as vLLM's scheduler has its KVCacheManager handle them."""

    def __init__(self, kv_cache_config: KVCacheConfig, size: int):
        init_none_hash(sha256)
        self.manager = KVCacheManager(kv_cache_config, MODEL_LEN, size, size)
        self.hasher = get_request_block_hasher(size, sha256)

    def request(self, tokens: int) -> Request:
        """All prompts begin alike."""
        name, sampling = f"r{next(NAMES)}", SamplingParams(max_tokens=1)
        return Request(name, list(range(tokens)), sampling, None, block_hasher=self.hasher)

    def lists(self, request: Request) -> list[list[int]]:
        return [list(ids) for ids in self.manager.get_block_ids(request.request_id)]

    def compute(self, request: Request, tokens: int) -> None:
        """The next tokens, with what is cached before them if they are the first."""
        hits, known = None, 0
        if not request.num_computed_tokens:
            hits, known, *_ = self.manager.get_computed_blocks(request)
        new = tokens - request.num_computed_tokens - known
        assert new > 0 and self.manager.allocate_slots(request, new, known, hits) is not None
        request.num_computed_tokens = tokens

    def prefill(self, request: Request) -> list[list[int]]:
        """A prompt in two steps; the blocks that are there at its end."""
        for tokens in {-(-request.num_tokens // 2), request.num_tokens}:
            if tokens > self.hits(request):
                self.compute(request, tokens)
        self.manager.remove_skipped_blocks(request.request_id, request.num_tokens)
        return self.lists(request)

    def hits(self, request: Request) -> int:
        return request.num_computed_tokens or self.manager.get_computed_blocks(request)[1]

    def load(self, request: Request) -> tuple[int, list[list[int]]]:
        """Tokens that are cached, and the blocks for those and for all that a prefill has."""
        hits, known, *_ = self.manager.get_computed_blocks(request)
        external = request.num_tokens - known
        more = {"num_external_computed_tokens": external, "delay_cache_blocks": True}
        assert self.manager.allocate_slots(request, 0, known, hits, **more) is not None
        return known, self.lists(request)

    def loaded(self, request: Request) -> None:
        """vLLM's `_update_waiting_for_remote_kv`, and the step that computes the last token again."""
        self.manager.cache_blocks(request, request.num_tokens)
        request.num_computed_tokens = request.num_tokens - 1
        assert self.manager.allocate_slots(request, 1) is not None

    def end(self, request: Request, forget: bool) -> None:
        self.manager.free(request)
        if forget:
            self.manager.reset_prefix_cache()


def windows(window: int, size: int, keeps: bool = True, blocks: int = 400) -> KVCacheConfig:
    """Two groups, of which one has a window, as the connector's constructor leaves them."""
    specs = [of("SlidingWindowSpec", sliding_window=window), full_attention()]
    groups = [group(spec.copy_with_new_block_size(size), half) for spec, half in zip(specs, HALVES, strict=True)]
    made = KVCacheConfig(blocks, [], groups)
    if keeps:
        keep_windows(limits(), made)
    return made


def limits(tokens: int = MODEL_LEN, in_flight: int = MODEL_LEN):
    """What vLLM's configuration says of requests."""
    return SimpleNamespace(model_config=SimpleNamespace(max_model_len=tokens), max_in_flight_tokens=in_flight)


def gaps(window: int, size: int, keeps: bool, cached: bool) -> list[int]:
    """Lengths at which a block is missing of those that the last token of a prompt reads."""
    missing = []
    sides = [Managed(windows(window, size, keeps), size) for _ in range(2)]
    for length in LENGTHS:
        prefill, decode = sides
        requests = [side.request(length) for side in sides]
        if cached:
            # A shorter prompt was there before.
            for side in sides:
                before = side.request(max(length * 2 // 3, 1))
                side.prefill(before)
                side.end(before, False)
        source = prefill.prefill(requests[0])
        known, sink = decode.load(requests[1])
        assert not cached or length < 2 * size or known > 0
        decode.loaded(requests[1])
        read = range(max(length - window, 0), length)
        needed = {token // size for token in read}
        of_window = [(ids, at) for ids in (source[0], sink[0], decode.lists(requests[1])[0]) for at in needed]
        if any(ids[at] == 0 for ids, at in of_window):
            missing.append(length)
        elif keeps:
            # Both sides have the same blocks, none before those that are read.
            assert {at for at, id in enumerate(source[0]) if id} == needed
            assert {at for at, id in enumerate(sink[0]) if id} == needed
        assert all(source[1]) and all(sink[1])
        for side, request in zip(sides, requests, strict=True):
            side.end(request, True)
    return missing


@pytest.mark.parametrize("cached", [False, True], ids=["new", "cached"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("window", WINDOWS)
def test_vllm_keeps_the_blocks_that_the_last_token_reads(window, size, cached):
    assert gaps(window, size, True, cached) == []


def test_without_the_connector_vllm_frees_a_block_that_the_last_token_reads():
    # Else there is nothing for which the connector has to ask.
    assert gaps(64, 32, False, False) == [it for it in LENGTHS if it > 64 and (it - 64) % 32 == 31]


def test_a_pool_without_room_for_the_longest_request_is_refused():
    # 32 tokens of the window before the next token, and as many in flight.
    most = -(-63 // 16) + 1 + 1024 // 16
    for blocks, keeps in [(most, True), (most + 1, False), (most + 2, True)]:
        made = windows(32, 16, False, blocks)
        if keeps:
            keep_windows(limits(in_flight=34 - 1), made)
        else:
            with pytest.raises(ValueError, match=rf"needs {most + 1} KV cache blocks .* vLLM has {most}: raise"):
                keep_windows(limits(in_flight=34 - 1), made)


@pytest.mark.parametrize("mode", ["WRITE", "READ"])
@pytest.mark.parametrize("arrangement", ["packed", "plain"])
def test_every_length_of_a_block_is_handed_over(arrangement, mode, model, tmp_path, monkeypatch):
    """By a host, into whole blocks: vLLM takes those for prefix hits of later prompts."""
    monkeypatch.setattr(worker, "get_current_attn_backends", lambda config: [])
    platform = SimpleNamespace(is_cpu=lambda: arrangement == "packed")
    monkeypatch.setattr(engine, "current_platform", platform)
    window = 2 * BLOCK_TOKENS
    groups = [
        group(of("SlidingWindowSpec", sliding_window=window), HALVES[0]),
        group(full_attention(), HALVES[1]),
    ]
    pair = Pair(model, tmp_path, {}, mode, groups)
    try:
        sides = [Managed(it.kv_cache_config, BLOCK_TOKENS) for it in pair.engines]
        for length in range(window + BLOCK_TOKENS + 1, window + 2 * BLOCK_TOKENS + 1):
            hand_over(pair, sides, length)
    finally:
        pair.close()


def hand_over(pair: Pair, sides: list[Managed], length: int) -> None:
    """A prompt from its arrival to its end on both sides."""
    name, key = f"r{length}", native.key()
    pair.decode.arrive(name, native.to_decode(pair, key), length)
    pair.prefill.arrive(name, native.to_prefill(pair, key), length)
    source, sink = [side.request(length) for side in sides]
    sides[0].compute(source, length)
    begun, (_, taken) = sides[0].lists(source), sides[1].load(sink)
    pair.prefill.begin(step({name: length}, [(name, 0, begun)]))
    if pair.mode == "WRITE":
        pair.decode.allocate(name, taken)
    for half, ids in zip(HALVES, begun, strict=True):
        for layer in half:
            compute(pair.prefill, [layer], [id for id in ids if id], of=length)
    pair.prefill.end()
    sides[0].manager.remove_skipped_blocks(source.request_id, length)
    kept = sides[0].lists(source)
    pair.prefill.finish(name, tuple(kept))
    if pair.mode == "READ":
        pair.decode.allocate(name, tuple(taken))
    assert pair.decode.outcome(name), f"{length} tokens"
    for half, there, here in zip(HALVES, kept, taken, strict=True):
        sources, sinks = zip(*((a, b) for a, b in zip(there, here, strict=True) if b), strict=True)
        assert all(sources)
        for layer in half:
            expected, got = pair.prefill.blocks(layer, sources), pair.decode.blocks(layer, sinks)
            assert expected == got, f"{length} tokens, {layer}"
    pair.decode.finish(name, tuple(taken))
    pair.prefill.until(lambda: name in pair.prefill.freed)
    for side, request in zip(sides, (source, sink), strict=True):
        side.end(request, True)
