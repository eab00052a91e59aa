"""What vLLM's configuration says of an engine, in the words of the host."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from vllm.platforms import current_platform

from kvferry import start
from kvferry._native import Link, settings
from kvferry.line import Line, nothing
from kvferry.vllm.check import check, given
from kvferry.vllm.drafts import draft_layers
from kvferry.vllm.roles import dp_ranks
from kvferry.vllm.specs import describe_groups

# How long a host may stand still, and with it the engine, that is told more than its socket holds or is to
# say that it reads blocks no more: longer than a peer that goes on may be silent (`channel.silent_ms`). A
# host cannot say so while a peer stands still that it pushes to, since that may read as soon as it goes on.
STILL_S = 10.0


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
    # The start of the host and of the engine may take so long.
    start_s: float
    # The KV of what drafts tokens is handed over, too.
    drafts: bool


def place(vllm_config) -> Place:
    """Reads `kv_connector_extra_config`; raises for what is wrong in it, and if the folder of the socket is not this
    user's alone."""
    check(vllm_config)
    transfer, keys = vllm_config.kv_transfer_config, given(vllm_config)
    socket, *how = settings(keys)
    if socket:
        return Place(Path(socket), keys, *how)
    return Place(start.socket_at(transfer.engine_id), keys, *how)


def describe(vllm_config, kv_cache_config, with_drafts: bool = True) -> str:
    """The engine in JSON, without the layers that draft tokens unless it is `with_drafts`."""
    transfer, model = vllm_config.kv_transfer_config, vllm_config.model_config
    parallel = vllm_config.parallel_config
    names = [name for group in kv_cache_config.kv_cache_groups for name in group.layer_names]
    drafts = draft_layers(vllm_config, names)
    name = identity(model, vllm_config.cache_config.cache_dtype)
    if drafts and with_drafts:
        name += f" drafts {drafted(vllm_config.speculative_config)}"
    return json.dumps(
        {
            "role": "Prefill" if transfer.is_kv_producer else "Decode",
            "model": name,
            "tp": parallel.tensor_parallel_size,
            "dp": _dp(parallel, transfer.engine_id),
            "kv_heads": 1 if model.use_mla else model.get_total_num_kv_heads(),
            "latent": model.use_mla,
            # CPU_ATTN arranges the keys of a block for its own instructions.
            "packed": current_platform.is_cpu(),
            "groups": describe_groups(kv_cache_config, set() if with_drafts else drafts),
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
    parts = [named[:100] if named and named != model.model else "", *_what(model, kind)]
    return " ".join(part for part in parts if part)


def drafted(speculative) -> str:
    """The same of what drafts tokens."""
    return " ".join(filter(None, [speculative.method, *_what(speculative.draft_model_config, "")]))


def _what(model, kind: str) -> list[str]:
    config = json.dumps(_plain(model.hf_config.to_dict()), sort_keys=True, default=str)
    return [
        (getattr(model.hf_config, "architectures", None) or [model.hf_config.model_type])[0],
        kind,
        f"config {hashlib.sha256(config.encode()).hexdigest()[:16]}",
        f"revision {model.revision[:40]}" if model.revision else "",
    ]


def _plain(config):
    if not isinstance(config, dict):
        return config
    kept = {key: value for key, value in config.items() if not str(key).startswith("_")}
    return {key: _plain(value) for key, value in kept.items() if key not in ORIGIN}


def _dp(parallel, engine_id: str) -> tuple[int, int]:
    """DP rank and number of ranks. Those of a dense model are told by vLLM that each is the only one;
    but their names differ, so that there are at least two, and requests have to say which they are for.
    """
    rank, size = dp_ranks(parallel)
    is_one_of_several = engine_id.endswith(f"_dp{parallel.data_parallel_index}")
    least = max(rank + 1, 2) if is_one_of_several and not parallel.data_parallel_external_lb else 1
    return rank, max(size, least)


def connect(at: Place, make: Callable[[Path], Link]) -> Link:
    """`make(path)`, with a host that is started unless there is one."""
    return start.connect(at.socket, make, at.spawn, seconds=at.start_s)


def reads_on(requests: set[str]) -> ConnectionError:
    """Why a host is given up that may read blocks of these requests."""
    return ConnectionError(
        f"the kvferry host did not say within {STILL_S:g} s that it reads no block of {sorted(requests)}:"
        " it is given up"
    )


def line(make: Callable[[], Link], on_lost: Callable[[Link], None] = nothing) -> Line:
    """A line with a link of `make`. A host that is given up has ended before `on_lost` is called: it reads
    and writes no block any more, and tells nobody that what it moved is whole."""
    processes: dict[int, start.HostProcess] = {}

    def made() -> Link:
        link = make()
        link.limit_writes(STILL_S)
        processes[link.fileno()] = start.HostProcess(link.fileno())
        return link

    def lost(link: Link) -> None:
        processes.pop(link.fileno()).end()
        on_lost(link)

    return Line(made(), made, lost)
