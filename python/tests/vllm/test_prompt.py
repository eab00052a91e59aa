"""Tests of the prompt's hash, and of requests whose two legs have different prompts."""

from array import array
from types import SimpleNamespace

import native
import pytest
import torch
from halves import LAYERS, PLAIN, TAKEN, TOKENS, Pair, compute
from kvferry._native import prompt_hash as hash_of_parts
from kvferry.vllm import scheduler
from kvferry.vllm.prompt import names_media, prompt_hash
from prompts import hash_of
from test_verify import handed_over

IDS = list(range(100))


def image(name: str, offset: int = 3, data=None, is_embed=None) -> SimpleNamespace:
    where = SimpleNamespace(offset=offset, length=8, is_embed=is_embed)
    return SimpleNamespace(modality="image", identifier=name, mm_position=where, data=data)


def item(pixel: float) -> SimpleNamespace:
    return SimpleNamespace(get_data=lambda: {"pixel_values": torch.full((2, 2), pixel)})


def of(ids=IDS, has_names: bool = True, **more) -> str:
    return prompt_hash(SimpleNamespace(**PLAIN | {"prompt_token_ids": ids} | more), has_names).hex()


def adapter(name: str, number: int, path: str) -> SimpleNamespace:
    return SimpleNamespace(lora_name=name, lora_int_id=number, lora_path=path)


DIFFERENT = {
    "plain": of(),
    "shorter": of(IDS[:-1]),
    "other token": of([*IDS[:50], 7, *IDS[51:]]),
    "negative": of([-1, *IDS[1:]]),
    "too large": of([1 << 70, *IDS[1:]]),
    "salt": of(cache_salt="tenant"),
    "other salt": of(cache_salt="tenant 2"),
    "adapter": of(lora_request=adapter("sql", 1, "/a")),
    "other adapter": of(lora_request=adapter("prose", 1, "/a")),
    "image": of(mm_features=[image("cat")]),
    "other image": of(mm_features=[image("dog")]),
    "elsewhere": of(mm_features=[image("cat", 4)]),
    "other places": of(mm_features=[image("cat", is_embed=torch.tensor([True, False]))]),
    "images": of(mm_features=[image("cat"), image("dog", 20)]),
    "images the other way": of(mm_features=[image("dog"), image("cat", 20)]),
    "embeds": of(None, prompt_embeds=torch.zeros(4, 2)),
    "other embeds": of(None, prompt_embeds=torch.ones(4, 2)),
    "other shape": of(None, prompt_embeds=torch.zeros(2, 4)),
    "mixed": of(IDS[:4], prompt_embeds=torch.zeros(4, 2), prompt_is_token_ids=[True, False, True, True]),
    "mixed elsewhere": of(IDS[:4], prompt_embeds=torch.zeros(4, 2), prompt_is_token_ids=[True, True, False, True]),
}


# Differences of a decode's prompt; the prefill has `range(TOKENS)` and no salt.
OTHERS = {
    "token": {"prompt_token_ids": [*range(50), 7, *range(51, TOKENS)]},
    "salt": {"cache_salt": "tenant"},
}


def test_all_that_kv_depends_on_changes_the_hash():
    assert len(set(DIFFERENT.values())) == len(DIFFERENT)


def test_what_is_an_engines_own_changes_nothing():
    assert of(lora_request=adapter("sql", 2, "/b")) == DIFFERENT["adapter"]
    assert of(list(IDS), cache_salt=None) == DIFFERENT["plain"] == hash_of(IDS)


def test_token_ids_are_hashed_as_the_engine_crate_does():
    """The doc test of `engine/src/core/prompt_hash.rs` has the same."""
    assert hash_of_parts([("tokens", array("I", [1, 2, 3]).tobytes())]).hex() == "8d532176f6f8da3862cb7b473d8d2df3"


def test_media_that_vllm_counts_are_named_by_their_content():
    """Engines that do not hash media number them, and two engines may give different images one number."""
    same, other = (of(has_names=False, mm_features=[image("0", data=item(pixel))]) for pixel in (1.0, 2.0))
    assert same != other
    assert same == of(has_names=False, mm_features=[image("7", data=item(1.0))])


@pytest.mark.parametrize(
    ("cache_gb", "prefixes", "expected"), [(0, False, False), (0, True, True), (4, False, True)]
)
def test_vllm_counts_media_without_its_caches(cache_gb, prefixes, expected):
    media = SimpleNamespace(mm_processor_cache_gb=cache_gb)
    config = SimpleNamespace(
        model_config=SimpleNamespace(multimodal_config=media),
        cache_config=SimpleNamespace(enable_prefix_caching=prefixes),
    )
    assert names_media(config) == expected
    config.model_config.multimodal_config = None
    assert names_media(config)


@pytest.mark.parametrize("mode", ["WRITE", "READ"])
@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_a_pair_of_different_prompts_is_a_failed_load_with_both_hashes(mode, other, model, tmp_path, monkeypatch):
    told = []
    # The first engine of a process changes where its log goes.
    monkeypatch.setattr(scheduler.logger, "warning", lambda text, *args: told.append(text % args))
    pair = Pair(model, tmp_path, {}, mode)
    try:
        key = native.key()
        pair.decode.arrive("r", native.to_decode(pair, key), TOKENS, **other)
        pair.prefill.arrive("r", native.to_prefill(pair, key), TOKENS)
        pair.prefill.begin(pair.step("r"))
        compute(pair.prefill, LAYERS)
        pair.prefill.end()
        pair.prefill.finish("r", pair.taken)
        leg = pair.decode.scheduler.schedulers[0].legs["r"]
        pair.decode.until(lambda: leg.over)
        ids = other.get("prompt_token_ids", list(range(TOKENS)))
        hashes = [of(ids, cache_salt=other.get("cache_salt")), of(list(range(TOKENS)))]
        both = f"the decode's has hash {hashes[0]}, the prefill's {hashes[1]}"
        assert any(both in text for text in told), told
        # Nothing was moved, and the next request is handed over.
        assert all(pair.prefill.blocks(name, TAKEN) != pair.decode.blocks(name, TAKEN) for name in LAYERS)
        pair.prefill.until(lambda: "r" in pair.prefill.freed)
        assert handed_over(pair, "s")
    finally:
        pair.close()
