"""KV cache groups in the words of the host, by what their specs are."""

from dataclasses import replace

from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheSpec,
    MLAAttentionSpec,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

# A request has blocks for all of its tokens. Sinks are blocks that each engine has for itself. A window
# that such a spec names limits what is computed: blocks, and maybe layers without a window, hold all.
ALL_TOKENS = (FullAttentionSpec, MLAAttentionSpec, SinkFullAttentionSpec)

# A request keeps the blocks of its last tokens.
LAST_TOKENS = (SlidingWindowSpec, SlidingWindowMLASpec)

# Why others are refused, by name, because not every vLLM has them.
REASONS = {
    "ChunkedLocalAttentionSpec": "a prefill drops the chunks before the last one; serve with"
    " --disable-hybrid-kv-cache-manager, which keeps all blocks",
    "CircularBufferSpec": "tokens that are not compressed yet are in a ring, which is not handed over",
    "RSWASpec": "nobody has tried it",
    "CrossAttentionSpec": "the KV of an encoder is not handed over",
    "EncoderOnlyAttentionSpec": "the KV of an encoder is not handed over",
    "HiddenStateCacheSpec": "hidden states are not handed over",
    "HiSparseHotSpec": "KV that HiSparse keeps in host memory is not handed over",
    "HiSparseResidentSpec": "KV that HiSparse keeps in host memory is not handed over",
}


def describe_groups(kv_cache_config, without: set[str] = frozenset()) -> list[dict]:
    """The groups, without these layers; raises ValueError that names all that are refused, and why."""
    wrong, groups = set(), []
    for group in kv_cache_config.kv_cache_groups:
        try:
            groups.append(_group(group, without))
        except ValueError as why:
            wrong.add(str(why))
    if wrong:
        raise ValueError(f"KvferryConnector does not support {', '.join(sorted(wrong))}")
    return groups


def _group(group, without: set[str]) -> dict:
    spec = group.kv_cache_spec
    layers = [name for name in group.layer_names if name not in without]
    if not layers:
        raise _refused(spec, "all its layers draft tokens; leave draft_kv out")
    if not group.enable_kv_transfer or group.host_resident:
        raise _refused(spec, REASONS["HiSparseHotSpec"])
    is_uniform = type(spec) is UniformTypeKVCacheSpecs
    windows = {_window(each) for each in (spec.kv_cache_specs.values() if is_uniform else (spec,))}
    if len(windows) > 1:
        raise _refused(spec, "its layers have different windows")
    return {
        "window": windows.pop(),
        "block_tokens": spec.block_size,
        "layers": layers,
    }


def _window(spec: KVCacheSpec) -> int | None:
    """The last tokens whose KV is needed; none for all."""
    kind = type(spec)
    if kind not in ALL_TOKENS + LAST_TOKENS:
        raise _refused(spec, REASONS.get(kind.__name__))
    if spec.tokens_per_state != 1:
        raise _refused(spec, f"a state stands for {spec.tokens_per_state} tokens")
    return spec.sliding_window + max(spec.extra_retained_tokens - 1, 0) if kind in LAST_TOKENS else None


def keep_windows(vllm_config, kv_cache_config) -> None:
    """Has vLLM's block managers keep one token more of each sliding window, before they are made. A decode
    computes the last token of a prompt again, and the window of that token begins one before the window of the
    next token, which is all that vLLM keeps. Where this token is the last of a block, both sides would have
    freed the block. Raises ValueError if that takes the room that the longest request has."""
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    kept = [
        replace(spec, extra_retained_tokens=max(spec.extra_retained_tokens, 1)) if type(spec) in LAST_TOKENS else spec
        for spec in specs
    ]
    # One block is vLLM's null block.
    room = kv_cache_config.num_blocks - 1
    before, most = (sum(_most_blocks(vllm_config, spec) for spec in each) for each in (specs, kept))
    if before <= room < most:
        raise ValueError(
            f"KvferryConnector needs {most} KV cache blocks for a request of max_model_len tokens, because each"
            f" sliding window keeps one token more for a hand-over; vLLM has {room}: raise"
            " --gpu-memory-utilization or --kv-cache-memory-bytes, or lower --max-model-len"
        )
    for group, spec in zip(kv_cache_config.kv_cache_groups, kept, strict=True):
        group.kv_cache_spec = spec


def _most_blocks(vllm_config, spec: KVCacheSpec) -> int:
    """Blocks that vLLM asks for before it admits a request of the greatest length."""
    tokens = vllm_config.model_config.max_model_len
    blocks = -(-tokens // spec.block_size)
    if type(spec) not in LAST_TOKENS:
        return blocks
    limits = {"max_in_flight_tokens": vllm_config.max_in_flight_tokens, "max_model_len": tokens}
    return min(blocks, spec.max_admission_blocks_per_request(**limits))


def _refused(spec: KVCacheSpec, why: str | None) -> ValueError:
    name = f"KV cache groups of {type(spec).__name__}"
    return ValueError(f"{name} ({why})" if why else name)
