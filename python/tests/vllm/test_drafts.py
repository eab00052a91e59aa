"""Speculative decoding: the KV of the model, and of what drafts tokens where both sides have it."""

import pytest
from halves import LAYERS, TAKEN, TOKENS, Engine, Pair, compute, config, drafts, full_attention, step
from kvferry.vllm.drafts import draft_layers
from kvferry.vllm.layers import StepLayers
from vllm.v1.kv_cache_interface import KVCacheGroupSpec

DRAFT = "model.layers.4.mtp_block.self_attn.attn"
PLAIN = [KVCacheGroupSpec(list(LAYERS), full_attention())]
DRAFTING = [KVCacheGroupSpec([*LAYERS, DRAFT], full_attention())]


def engine(model, folder, role: str, is_drafting: bool, extra: dict) -> Engine:
    made = config(model, role, dict(extra))
    if is_drafting:
        made.speculative_config = drafts(made)
    return Engine(made, folder, DRAFTING if is_drafting else PLAIN)


def drafting(model, folder, mode: str, prefill: bool = True, decode: bool = True, **extra) -> Pair:
    """Sides that draft, or do not."""
    extra |= {"read_mode": mode == "READ"}
    sides = {"prefill": prefill, "decode": decode}
    engines = [engine(model, folder, role, is_drafting, extra) for role, is_drafting in sides.items()]
    return Pair(model, folder, mode=mode, engines=engines)


def run(pair: Pair, times: int) -> None:
    """A step of a prompt, whose last block is one for the tokens that are drafted."""
    pair.arrive("r")
    pair.prefill.begin(step({"r": TOKENS}, [("r", 0, ([*TAKEN, 9],))]))
    if pair.mode == "WRITE":
        pair.decode.allocate("r", pair.taken)
    compute(pair.prefill, LAYERS)
    for number in range(times):
        # The first time all tokens, then the next one.
        compute(pair.prefill, [DRAFT], TAKEN if number == 0 else [9], of=2 + number)
    pair.prefill.end()
    pair.prefill.finish("r", ([*TAKEN],))
    if pair.mode == "READ":
        pair.prefill.idle()
        pair.decode.allocate("r", pair.taken)


@pytest.mark.parametrize("mode", ["WRITE", "READ"])
def test_what_is_drafted_with_is_handed_over_where_both_have_it(mode, model, tmp_path):
    pair = drafting(model, tmp_path, mode)
    run(pair, times=3)
    pair.assert_handed_over(layers=[*LAYERS, DRAFT])
    assert not any(any(block) for block in pair.decode.blocks(DRAFT, [9]))
    pair.close()


@pytest.mark.parametrize("mode", ["WRITE", "READ"])
@pytest.mark.parametrize("prefill", [False, True])
def test_the_model_alone_is_handed_over_where_it_is_asked_for(mode, prefill, model, tmp_path):
    pair = drafting(model, tmp_path, mode, prefill, draft_kv=False)
    run(pair, times=3 if prefill else 0)
    pair.assert_handed_over()
    assert not any(any(block) for block in pair.decode.blocks(DRAFT, TAKEN))
    pair.close()


def test_sides_that_do_not_draft_alike_do_not_fit(model, tmp_path):
    pair = drafting(model, tmp_path, "WRITE", prefill=False)
    pair.arrive("r")
    pair.decode.until(lambda: pair.decode.scheduler.schedulers[0].legs["r"].over)
    _, told = pair.decode.finish("r", ())
    assert "drafts mtp LlamaForCausalLM config" in told["kvferry"]["failed"]["why"]
    pair.close()


def test_a_group_that_drafts_only_cannot_be_left_out(model, tmp_path):
    groups = [*PLAIN, KVCacheGroupSpec([DRAFT], full_attention())]
    made = config(model, "prefill", {"draft_kv": False})
    made.speculative_config = drafts(made)
    with pytest.raises(ValueError, match="all its layers draft tokens; leave draft_kv out"):
        Engine(made, tmp_path, groups)


def test_layers_that_draft_are_known_by_name(model):
    made = config(model, "decode", {})
    others = [DRAFT, "model.layers.4.self_attn.attn", "mtp.layers.0.self_attn.attn"]
    others += ["draft_model.model.layers.0.self_attn.attn"]
    assert draft_layers(made, [*LAYERS, *others]) == set()
    made.speculative_config = drafts(made)
    assert draft_layers(made, [*LAYERS, *others]) == set(others)


def test_layers_of_the_model_are_handed_over_before_it_drafts():
    layers = StepLayers([*LAYERS, DRAFT], {DRAFT})
    assert [layers.computed(name, 0, 1) for name in (*LAYERS, DRAFT, DRAFT)] == [True] * 4 + [False] * 2
    assert (layers.done, layers.finish(), layers.done) == (4, None, 5)
