"""What vLLM's configuration says of an engine, in the words of the host."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec

from kvferry import start
from kvferry._native import Link, settings
from kvferry.vllm.check import check, given


@dataclass(frozen=True)
class Place:
    """Where the host of an engine listens; the same in all its processes."""

    socket: Path
    # What the user set, in JSON.
    settings: str
    # Start one if there is none.
    spawn: bool
    # The KV cache is to lie in a memory file.
    in_file: bool
    # The transfer actors are in the workers.
    in_worker: bool


def place(vllm_config) -> Place:
    """Reads `kv_connector_extra_config`; raises for what is wrong in it, and if the folder of the socket is not this
    user's alone."""
    check(vllm_config)
    transfer, keys = vllm_config.kv_transfer_config, given(vllm_config)
    socket, *how = settings(keys)
    if socket:
        return Place(Path(socket), keys, *how)
    return Place(start.socket_at(transfer.engine_id), keys, *how)


def describe(vllm_config, kv_cache_config) -> str:
    """The engine in JSON."""
    transfer, model = vllm_config.kv_transfer_config, vllm_config.model_config
    parallel = vllm_config.parallel_config
    kinds = (type(group.kv_cache_spec) for group in kv_cache_config.kv_cache_groups)
    known = (FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec)
    if wrong := {f"KV cache groups of {kind.__name__}" for kind in kinds if kind not in known}:
        raise ValueError(f"KvferryConnector does not support {', '.join(sorted(wrong))}")
    return json.dumps(
        {
            "role": "Prefill" if transfer.is_kv_producer else "Decode",
            "model": identity(model, vllm_config.cache_config.cache_dtype),
            "tp": parallel.tensor_parallel_size,
            "dp": _dp(parallel, transfer.engine_id),
            "kv_heads": 1 if model.use_mla else model.get_total_num_kv_heads(),
            "latent": model.use_mla,
            # CPU_ATTN arranges the keys of a block for its own instructions.
            "packed": current_platform.is_cpu(),
            "groups": [_group(group) for group in kv_cache_config.kv_cache_groups],
        }
    )


# Keys of a model's configuration that say where it came from, and not what it is.
ORIGIN = {"transformers_version", "torch_dtype", "dtype"}


def identity(model, cache_dtype: str) -> str:
    """The model by what it is, which is equal on both sides of a transfer: the name that it is served
    by, if it has one, its architecture, the type of its KV, and a digest of its configuration. The
    folder that it lies in is none of that. Weights are not looked at, but for a revision that is named.
    """
    named = model.served_model_name
    named = named[0] if isinstance(named, (list, tuple)) else named
    kind = str(model.dtype).removeprefix("torch.") if cache_dtype == "auto" else str(cache_dtype)
    config = json.dumps(_plain(model.hf_config.to_dict()), sort_keys=True, default=str)
    parts = [
        named[:100] if named and named != model.model else "",
        (getattr(model.hf_config, "architectures", None) or [model.hf_config.model_type])[0],
        kind,
        f"config {hashlib.sha256(config.encode()).hexdigest()[:16]}",
        f"revision {model.revision[:40]}" if model.revision else "",
    ]
    return " ".join(part for part in parts if part)


def _plain(config):
    if not isinstance(config, dict):
        return config
    kept = {key: value for key, value in config.items() if not str(key).startswith("_")}
    return {key: _plain(value) for key, value in kept.items() if key not in ORIGIN}


def _dp(parallel, engine_id: str) -> tuple[int, int]:
    """DP rank and number of ranks. Those of a dense model are told by vLLM that each is the only one;
    but their names differ, so that there are at least two, and requests have to say which they are for.
    """
    rank = parallel.data_parallel_index
    least = max(rank + 1, 2) if engine_id.endswith(f"_dp{rank}") else 1
    return rank, max(parallel.data_parallel_size, least)


def _group(group) -> dict:
    spec = group.kv_cache_spec
    return {
        "window": getattr(spec, "sliding_window", None),
        "block_tokens": spec.block_size,
        "layers": list(group.layer_names),
    }


def connect(at: Place, make: Callable[[Path], Link]) -> Link:
    """`make(path)`, with a host that is started unless there is one."""
    return start.connect(at.socket, make, at.spawn)
