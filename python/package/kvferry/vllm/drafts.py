"""Speculative decoding: which layers are of the model that drafts tokens, and which drafts are known."""

import re

# Methods without layers of their own, or whose layers write the KV of a prompt as they compute it.
KNOWN = ("ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator", "draft_model", "eagle", "eagle3", "mtp")

# Parts of the names of their layers; those of others have higher numbers than all of the model itself.
PARTS = {"draft_model", "mtp", "mtp_block"}


def refused(vllm_config) -> str | None:
    """What is not supported of the drafts."""
    config = vllm_config.speculative_config
    if config is None:
        return None
    if config.method not in KNOWN:
        return f"speculative decoding with {config.method}"
    # The prefill would leave drafts of its own in the KV of the last tokens.
    if getattr(vllm_config, "num_prefill_lookahead_tokens", 0) > 1:
        return "speculative decoding with several MTP modules"
    return None


def draft_layers(vllm_config, names) -> set[str]:
    """Those of the layers that are of the model that drafts."""
    if vllm_config.speculative_config is None:
        return set()
    layers = vllm_config.model_config.get_total_num_hidden_layers()
    return {name for name in names if _number(name) >= layers or PARTS & set(name.split("."))}


def _number(name: str) -> int:
    """Of a layer."""
    found = re.search(r"\.(\d+)\.", name)
    return int(found[1]) if found else 0

