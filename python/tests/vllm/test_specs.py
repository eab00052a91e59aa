"""KV caches of every kind that vLLM has: their bytes are handed over where vLLM's own code places them, or
they are refused at the start."""

import json
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch
from halves import BLOCK_TOKENS, LAYERS, Engine, Pair, compute, config, full_attention, placed
from kvferry.vllm import engine, worker
from vllm.v1 import kv_cache_interface as specs
from vllm.v1.kv_cache_interface import KVCacheGroupSpec, UniformTypeKVCacheSpecs

WINDOW = BLOCK_TOKENS
HALVES = LAYERS[::2], LAYERS[1::2]


def of(kind: str, **more):
    """A spec of a kind of attention that is not latent."""
    about = {"num_kv_heads": 4, "head_size": 64, "dtype": torch.float32}
    return getattr(specs, kind)(block_size=BLOCK_TOKENS, **about | more)


def latent(kind: str, **more):
    """A spec of latent attention."""
    return of(kind, **{"num_kv_heads": 1, "head_size": 576, "dtype": torch.bfloat16} | more)


def group(spec, layers=LAYERS, **more) -> KVCacheGroupSpec:
    return KVCacheGroupSpec(list(layers), spec, **more)


def uniform(made: dict) -> KVCacheGroupSpec:
    return group(UniformTypeKVCacheSpecs(BLOCK_TOKENS, made), made)


@dataclass
class Case:
    """Groups, and of which layers only the last blocks are handed over."""

    groups: list[KVCacheGroupSpec]
    windowed: list[str] = field(default_factory=list)
    is_latent: bool = False
    layout: str = "LBHNC"


def indexed(name: str) -> str:
    return name.replace(".attn", ".indexer.k_cache")


CASES = {
    "full attention": Case([group(full_attention())]),
    "full attention with a window, without the hybrid manager": Case(
        [group(full_attention(sliding_window=WINDOW))]
    ),
    "full attention with chunks, without the hybrid manager": Case(
        [group(full_attention(attention_chunk_size=WINDOW))]
    ),
    "sinks": Case([group(of("SinkFullAttentionSpec", sink_len=BLOCK_TOKENS))]),
    "windows": Case(
        [
            group(of("SlidingWindowSpec", sliding_window=WINDOW), HALVES[0]),
            group(full_attention(), HALVES[1]),
        ],
        windowed=HALVES[0],
    ),
    "latent attention": Case([group(latent("MLAAttentionSpec"))], is_latent=True),
    "latent attention with padded pages": Case(
        [group(latent("MLAAttentionSpec", head_size=120, alignment=512))], is_latent=True
    ),
    "latent attention with windows": Case(
        [
            group(latent("SlidingWindowMLASpec", sliding_window=WINDOW), HALVES[0]),
            group(latent("MLAAttentionSpec"), HALVES[1]),
        ],
        windowed=HALVES[0],
        is_latent=True,
    ),
    "latent attention with an indexer": Case(
        [
            uniform(
                {name: latent("MLAAttentionSpec") for name in LAYERS}
                | {
                    indexed(name): latent("MLAAttentionSpec", head_size=132, dtype=torch.uint8)
                    for name in LAYERS
                }
            )
        ],
        is_latent=True,
    ),
    "layers with heads of two sizes": Case(
        [uniform({name: full_attention(head_size=64 << place % 2) for place, name in enumerate(LAYERS)})]
    ),
    "windows and heads of two sizes, blocks outermost": Case(
        [
            uniform(
                {
                    name: of("SlidingWindowSpec", sliding_window=WINDOW, head_size=64 << place)
                    for place, name in enumerate(HALVES[0])
                }
            ),
            group(full_attention(), HALVES[1]),
        ],
        windowed=HALVES[0],
        layout="BLHNC",
    ),
}


@pytest.fixture(params=CASES)
def case(request, monkeypatch) -> Case:
    # Which attention computes matters to MoRIIO peers, and vLLM's CPU backend has none for all.
    monkeypatch.setattr(worker, "get_current_attn_backends", lambda config: [])
    return CASES[request.param]


def changed(model, is_latent: bool) -> dict:
    """Parts of vLLM's configuration for a model with latent attention."""
    of_model = config(model, "prefill", {}).model_config
    if not is_latent:
        return {}
    names = ("served_model_name", "model", "dtype", "hf_config", "revision", "enable_sleep_mode", "max_model_len")
    about = {name: getattr(of_model, name) for name in names}
    return {"model_config": SimpleNamespace(use_mla=True, original_max_model_len=64, multimodal_config=None, **about)}


@pytest.fixture(params=["packed", "plain"])
def arrangement(request, monkeypatch) -> str:
    """Whether the blocks are as vLLM's attention for CPUs has them, or as that of GPUs: moved whole, or in
    parts as heads and tokens are needed."""
    platform = SimpleNamespace(is_cpu=lambda: request.param == "packed")
    monkeypatch.setattr(engine, "current_platform", platform)
    return request.param


@pytest.mark.parametrize("mode", ["WRITE", "READ"])
def test_its_bytes_are_handed_over(case, arrangement, mode, model, tmp_path):
    more = changed(model, case.is_latent)
    pair = Pair(model, tmp_path, {}, mode, case.groups, case.layout, **more)
    try:
        taken = {
            layer: ids for ids, it in zip(pair.taken, case.groups, strict=True) for layer in it.layer_names
        }
        assert set(taken) == set(pair.prefill.kv)
        pair.arrive("r")
        if mode == "WRITE":
            pair.begin("r")
        else:
            pair.prefill.begin(pair.step("r"))
        for layer in sorted(taken):
            compute(pair.prefill, [layer], taken[layer])
        pair.prefill.end()
        if mode == "READ":
            pair.prefill.finish("r", pair.taken)
            pair.decode.allocate("r", pair.taken)
        assert pair.decode.outcome("r")
        for layer, ids in taken.items():
            source, sink = (side.blocks(layer, ids) for side in pair.engines)
            assert all(any(block) for block in source), f"{layer} was computed"
            begin = layer in case.windowed
            assert source[begin:] == sink[begin:], layer
            assert not begin or not any(sink[0]), f"{layer}: outside of its window"
    finally:
        pair.close()


def test_what_the_host_is_told(case, model):
    made = config(model, "prefill", {}, **changed(model, case.is_latent))
    told = json.loads(engine.describe(made, placed(made, case.groups, case.layout)))
    assert told["latent"] == case.is_latent
    assert [sorted(it["layers"]) for it in told["groups"]] == [sorted(it.layer_names) for it in case.groups]
    for it in told["groups"]:
        assert it["block_tokens"] == BLOCK_TOKENS
        assert it["window"] == (WINDOW if it["layers"][0] in case.windowed else None)


MIXED = {name: of("SlidingWindowSpec", sliding_window=32 << place) for place, name in enumerate(LAYERS)}


class Custom(specs.FullAttentionSpec):
    """One that somebody registered with vLLM."""


REFUSED = {
    "chunks": (of("ChunkedLocalAttentionSpec", attention_chunk_size=64), "serve with --disable-hybrid-kv"),
    "rings": (of("CircularBufferSpec"), "CircularBufferSpec (tokens that are not compressed yet"),
    "reference windows": (of("RSWASpec", rswa_window=64), "RSWASpec (nobody has tried it)"),
    "encoders": (of("CrossAttentionSpec"), "CrossAttentionSpec (the KV of an encoder"),
    "encoders only": (of("EncoderOnlyAttentionSpec"), "EncoderOnlyAttentionSpec (the KV of an encoder"),
    "hidden states": (latent("HiddenStateCacheSpec"), "HiddenStateCacheSpec (hidden states"),
    "states": (specs.MambaSpec(BLOCK_TOKENS, ((1,),), (torch.float32,)), "KV cache groups of MambaSpec"),
    "compressed tokens": (
        latent("MLAAttentionSpec", tokens_per_state=4),
        "MLAAttentionSpec (a state stands for 4 tokens)",
    ),
    "compressed windows": (
        latent("SlidingWindowMLASpec", sliding_window=64, tokens_per_state=4),
        "SlidingWindowMLASpec (a state stands for 4 tokens)",
    ),
    "windows of several sizes in a group": (
        UniformTypeKVCacheSpecs(BLOCK_TOKENS, MIXED),
        "UniformTypeKVCacheSpecs (its layers have different windows)",
    ),
    "rings in a uniform group": (
        UniformTypeKVCacheSpecs(BLOCK_TOKENS, {LAYERS[0]: of("CircularBufferSpec")}),
        "CircularBufferSpec (tokens that",
    ),
    "others": (Custom(**vars(full_attention())), "groups of Custom"),
    "pages in use": (
        specs.HiSparseHotSpec(block_size=BLOCK_TOKENS, page_size=64, blocks_per_request=1),
        "HiSparseHotSpec (KV that HiSparse",
    ),
    "resident pages": (
        specs.HiSparseResidentSpec(block_size=BLOCK_TOKENS, page_size=64),
        "HiSparseResidentSpec (KV that HiSparse",
    ),
}


def refusal(model, groups: list[KVCacheGroupSpec]) -> str:
    with pytest.raises(ValueError) as refused:
        engine.describe(config(model, "prefill", {}), specs.KVCacheConfig(1, [], groups))
    assert str(refused.value).startswith("KvferryConnector does not support KV cache groups of ")
    return str(refused.value)


@pytest.mark.parametrize("name", REFUSED)
def test_others_are_refused_with_a_reason(name, model):
    spec, says = REFUSED[name]
    assert says in refusal(model, [group(spec)])


def test_groups_that_vllm_does_not_have_transferred_are_refused(model):
    for more in ({"enable_kv_transfer": False}, {"host_resident": True}):
        assert "FullAttentionSpec (KV that HiSparse" in refusal(model, [group(full_attention(), **more)])


def test_layers_with_another_number_of_heads_are_refused_by_the_host(model, tmp_path):
    made = {name: full_attention(num_kv_heads=4 >> place % 2) for place, name in enumerate(LAYERS)}
    with pytest.raises(ValueError, match=r"KV of .*layers\.1\..*: 2 head slots for 4 heads of the rank"):
        Engine(config(model, "prefill", {}), tmp_path, [uniform(made)])


def test_all_that_is_wrong_is_said_at_once(model):
    wrong = [group(REFUSED[name][0], [name]) for name in ("states", "rings")]
    told = refusal(model, [*wrong, group(full_attention(), LAYERS)])
    assert "CircularBufferSpec (" in told and "MambaSpec" in told and "FullAttention" not in told


def test_every_kind_that_vllm_has_is_in_one_of_the_lists():
    kinds = {
        name
        for name, kind in vars(specs).items()
        if isinstance(kind, type) and issubclass(kind, specs.KVCacheSpec)
    }
    supported = {type(it.kv_cache_spec).__name__ for case in CASES.values() for it in case.groups}
    refused = {type(spec).__name__ for spec, _ in REFUSED.values()}
    assert kinds - {"KVCacheSpec", "AttentionSpec"} == supported | refused - {"Custom"}
