"""An engine without vLLM's servers: both halves of the connector in this process, with a real host beside
them and KV in real memory. The test is vLLM: it calls the hooks, and computes what it likes."""

import copy
import functools
import itertools
import time
import zlib
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace

import model as tiny
import native
import numpy
import torch
from kvferry.vllm.connector import KvferryConnector
from kvferry.vllm.worker import TOLD_BYTES
from pair import ROLES
from server import BLOCK_TOKENS
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.forward_context import ForwardContext, override_forward_context
from vllm.model_executor.layers.attention.kv_transfer_utils import maybe_transfer_kv_layer
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    create_kv_cache_views,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

try:
    from vllm.v1.core.kv_cache_planning import get_kv_cache_config_from_groups
except ImportError:
    # vLLM 0.32.
    from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups

BLOCKS = 16
# Of a prompt, and its blocks on both sides.
TOKENS = 64
TAKEN = [3, 5]
# Fields of a request whose prompt has token ids only.
PLAIN = {
    "prompt_embeds": None,
    "prompt_is_token_ids": None,
    "mm_features": [],
    "lora_request": None,
    "cache_salt": None,
}
# Of engines.
NUMBERS = itertools.count()
# For what a host does of itself.
PATIENCE_S = 60.0


def layer(number: int) -> str:
    return f"model.layers.{number}.self_attn.attn"


LAYERS = [layer(number) for number in range(tiny.LAYERS)]


def full_attention(**more) -> FullAttentionSpec:
    about = {"num_kv_heads": tiny.KV_HEADS, "head_size": tiny.HEAD_DIM, "dtype": torch.float32}
    return FullAttentionSpec(block_size=BLOCK_TOKENS, **about | more)


@functools.cache
def configured(model: Path):
    """vLLM's configuration of a model; the dearest thing here."""
    more = {"enforce_eager": True, "dtype": "float32", "block_size": BLOCK_TOKENS}
    return EngineArgs(model=str(model), kv_cache_memory_bytes=1 << 24, **more).create_engine_config()


def config(model: Path, role: str, extra: dict, **changed):
    """The same for a role, with other parts in some places."""
    made = copy.copy(configured(model))
    made.kv_transfer_config = KVTransferConfig(
        kv_connector="KvferryConnector",
        kv_connector_module_path="kvferry.vllm",
        kv_role=ROLES.get(role, role),
        engine_id=f"halves-{next(NUMBERS)}",
        kv_connector_extra_config=extra,
    )
    for name, part in changed.items():
        setattr(made, name, part)
    return made


def drafts(made, method: str = "mtp", modules: int = 1) -> SimpleNamespace:
    """What vLLM is told of speculative decoding."""
    return SimpleNamespace(
        method=method,
        draft_model_config=made.model_config,
        num_speculative_tokens=3,
        enable_adaptive_verification=False,
        use_eagle=lambda: True,
        use_multi_module_mtp=lambda: modules > 1,
    )


def step(tokens: dict[str, int] | None = None, new=(), preempted=()) -> SimpleNamespace:
    """What vLLM's scheduler says of a step. `new` are requests with the tokens that are there, and
    their blocks."""
    tokens = tokens or {}
    starts = [SimpleNamespace(req_id=id, num_computed_tokens=at, block_ids=ids) for id, at, ids in new]
    cached = {name: [] for name in ("req_ids", "num_computed_tokens", "new_block_ids")}
    return SimpleNamespace(
        preempted_req_ids=set(preempted),
        finished_req_ids=set(),
        scheduled_new_reqs=starts,
        scheduled_cached_reqs=SimpleNamespace(resumed_req_ids=set(), **cached),
        num_scheduled_tokens=tokens,
        total_num_scheduled_tokens=sum(tokens.values()),
    )


class Blocks:
    """Of a request, by group."""

    def __init__(self, ids: tuple[list[int], ...]):
        self.ids = ids

    def get_block_ids(self):
        return self.ids


def placed(made, groups: list[KVCacheGroupSpec], layout: str = "LBHNC") -> KVCacheConfig:
    """Where vLLM has the layers of groups."""
    made.cache_config = copy.copy(made.cache_config)
    made.cache_config.num_gpu_blocks_override = BLOCKS
    made.cache_config.kv_cache_layout = layout
    return get_kv_cache_config_from_groups(made, groups, 1 << 24)


def views(memory: torch.Tensor, kv_cache_config: KVCacheConfig, layout: str) -> dict[str, torch.Tensor]:
    """The KV of each layer in a buffer, as vLLM's workers have it."""
    kv = {}
    for tensor in kv_cache_config.kv_cache_tensors:
        for group in kv_cache_config.kv_cache_groups:
            if tensor.layers[0] in group.layer_names:
                spec = group.kv_cache_spec
                spec = getattr(spec, "kv_cache_specs", {tensor.layers[0]: spec})[tensor.layers[0]]
                made = create_kv_cache_views(memory, spec, BLOCKS, KVCacheLayout[layout], tensor)
                kv |= dict(zip(tensor.layers, made, strict=True))
    return kv


class Engine:
    """With the groups of the tiny model unless there are others."""

    def __init__(
        self, made, folder: Path, groups: list[KVCacheGroupSpec] | None = None, layout: str = "LBHNC"
    ):
        transfer = made.kv_transfer_config
        transfer.kv_connector_extra_config.setdefault("socket", str(folder / f"{transfer.engine_id}.sock"))
        groups = groups or [KVCacheGroupSpec(list(LAYERS), full_attention())]
        self.kv_cache_config = placed(made, groups, layout)
        self.config = made
        self.worker = KvferryConnector(made, KVConnectorRole.WORKER, self.kv_cache_config)
        # As if the model was a large one, whose layers are told of one by one.
        for worker in self.worker.workers:
            worker.token_bytes = TOLD_BYTES
        size = max(tensor.size for tensor in self.kv_cache_config.kv_cache_tensors)
        with self.worker.get_mem_pool_context() or nullcontext():
            memory = torch.zeros(size, dtype=torch.int8, device="cpu")
        self.kv = views(memory, self.kv_cache_config, layout)
        self.worker.register_kv_caches(self.kv)
        try:
            self.scheduler = KvferryConnector(made, KVConnectorRole.SCHEDULER, self.kv_cache_config)
        except ValueError:
            for worker in self.worker.workers:
                worker.line.end()
            raise
        self.requests: dict[str, SimpleNamespace] = {}
        self.failed: set[str] = set()
        self.loaded: set[str] = set()
        # Requests that have ended and whose blocks came back.
        self.freed: set[str] = set()

    @property
    def link(self):
        """To the host, of the scheduler; to that of the prefill, where there are two."""
        return self.scheduler.schedulers[0].line.link

    def peer_ports(self) -> tuple[int]:
        return (self.link.ports["handshake_port"],)

    def lines(self):
        """Of all halves."""
        return [half.line for half in self.scheduler.schedulers + self.worker.workers]

    def is_served(self) -> bool:
        return all([line.current() is not None for line in self.lines()])

    def close(self) -> None:
        for line in self.lines():
            link = line.link
            line.end()
            if link is not None:
                link.close()

    def arrive(self, name: str, params: dict, tokens: int, **prompt) -> SimpleNamespace:
        """A request. All requests of one length have the same prompt, unless `prompt` changes it."""
        about = {"sampling_params": None, "status": RequestStatus.FINISHED_LENGTH_CAPPED}
        params = params["kv_transfer_params"]
        request = SimpleNamespace(
            request_id=name,
            kv_transfer_params=params,
            num_prompt_tokens=tokens,
            **PLAIN | {"prompt_token_ids": list(range(tokens))} | prompt,
            **about,
        )
        self.requests[name] = request
        self.scheduler.on_new_request(request)
        return request

    def allocate(self, name: str, ids: tuple[list[int], ...]) -> None:
        """Of a decode: takes blocks when the host says that there is something to load."""
        tokens = self.matched(name)
        self.scheduler.update_state_after_alloc(self.requests[name], Blocks(ids), tokens)

    def matched(self, name: str) -> int:
        """Of a decode: tokens to load, when the host says that there are some."""
        request = self.requests[name]
        self.until(lambda: self.scheduler.get_num_new_matched_tokens(request, 0)[0])
        return self.scheduler.get_num_new_matched_tokens(request, 0)[0]

    def finish(self, name: str, ids: tuple[list[int], ...], status=None) -> tuple[bool, dict | None]:
        """Ends a request, as it was to end unless another status is given."""
        request = self.requests.pop(name)
        request.status = status or request.status
        return self.scheduler.request_finished_all_groups(request, ids)

    def begin(self, output: SimpleNamespace) -> None:
        """Has the workers begin a step."""
        meta = self.scheduler.build_connector_meta(output)
        self.worker.handle_preemptions(meta)
        self.worker.bind_connector_metadata(meta)

    def end(self) -> None:
        """Has them end it."""
        self.worker.wait_for_save()
        results = self.worker.get_transfer_results(set())
        self.worker.clear_connector_metadata()
        output = KVConnectorOutput(
            finished_sending=results.finished_sending, finished_recving=results.finished_recving
        )
        self.scheduler.update_connector_output(output)
        self.failed |= results.failed_recving & (output.finished_recving or set())
        self.loaded |= (output.finished_recving or set()) - self.failed
        self.freed |= output.finished_sending or set()

    def idle(self) -> None:
        """A step without tokens."""
        self.begin(step())
        self.end()

    def until(self, holds: Callable) -> None:
        """Takes steps until something holds."""
        deadline = time.monotonic() + PATIENCE_S
        while not holds():
            assert time.monotonic() < deadline, "it does not come to it"
            self.idle()

    def outcome(self, name: str) -> bool:
        """Whether the KV of a request came."""
        self.until(lambda: name in self.loaded | self.failed)
        return name in self.loaded

    def blocks(self, name: str, ids: list[int]) -> list[bytes]:
        """What is in blocks of a layer."""
        return [self.kv[name][id].contiguous().view(torch.uint8).numpy().tobytes() for id in ids]

    def write(self, name: str, ids: list[int], of: int = 1) -> None:
        """Random bytes into blocks of a layer, others for every `of`."""
        for block in ids:
            at = self.kv[name][block]
            drawn = numpy.random.default_rng([zlib.crc32(name.encode()), block, of])
            drawn = drawn.integers(1, 120, at.numel() * at.element_size(), numpy.uint8)
            at.copy_(torch.from_numpy(drawn).view(at.dtype).view(at.shape))

    @contextmanager
    def hooks(self):
        """In it vLLM's hooks call this engine's worker."""
        before = kv_transfer_state._KV_CONNECTOR_AGENT
        kv_transfer_state._KV_CONNECTOR_AGENT = self.worker
        try:
            yield
        finally:
            kv_transfer_state._KV_CONNECTOR_AGENT = before

    def context(self, kv: dict[str, torch.Tensor] | None = None) -> ForwardContext:
        """Of a forward pass."""
        kv = kv or self.kv
        layers = {name: SimpleNamespace(kv_cache=cache) for name, cache in kv.items()}
        return ForwardContext(layers, dict.fromkeys(kv, "metadata"), {})


@maybe_transfer_kv_layer
def attention(write: Callable, layer_name: str) -> None:
    """Computes a layer, as the op does that vLLM has the hooks around."""
    write(layer_name)


def compute(engine: Engine, names, ids=TAKEN, of: int = 1) -> None:
    """Computes layers in one part, in this order. Those that have no KV of their own write nothing."""

    def write(name: str) -> None:
        if name in engine.kv:
            engine.write(name, ids, of)

    shared = {name: engine.kv[LAYERS[0]] for name in names if name not in engine.kv}
    with engine.hooks(), override_forward_context(engine.context(engine.kv | shared)):
        for name in names:
            attention(write, name)


class Pair:
    """A prefill and a decode, as `native` needs to know of them."""

    def __init__(
        self,
        model: Path,
        folder: Path,
        extra: dict | None = None,
        mode: str = "WRITE",
        groups: list[KVCacheGroupSpec] | None = None,
        layout: str = "LBHNC",
        roles=tuple(ROLES),
        engines: list[Engine] | None = None,
        **changed,
    ):
        self.mode = mode
        extra = {"read_mode": mode == "READ"} | (extra or {})
        # Groups share the memory, and have blocks of their own in it.
        self.taken = tuple([block + 5 * at for block in TAKEN] for at in range(len(groups or [None])))
        self.engines = engines or [
            Engine(config(model, role, dict(extra), **changed), folder, groups, layout) for role in roles
        ]
        self.prefill, self.decode = self.engines

    def close(self) -> None:
        for engine in self.engines:
            engine.close()

    def arrive(self, name: str) -> None:
        key = native.key()
        self.decode.arrive(name, native.to_decode(self, key), TOKENS)
        self.prefill.arrive(name, native.to_prefill(self, key), TOKENS)

    def step(self, name: str, tokens: int = TOKENS) -> SimpleNamespace:
        """The first step of a prompt."""
        return step({name: tokens}, [(name, 0, self.taken)])

    def begin(self, name: str, tokens: int = TOKENS) -> None:
        """The prefill begins a step that computes tokens of a prompt, and the decode waits for it."""
        self.prefill.begin(self.step(name, tokens))
        self.decode.allocate(name, self.taken)

    def hand_over(self, name: str = "r") -> None:
        """A prompt in one step, from its arrival to the blocks of the decode."""
        self.arrive(name)
        self.begin(name)
        compute(self.prefill, LAYERS)
        self.prefill.end()
        self.assert_handed_over(name)

    def assert_handed_over(self, name: str = "r", taken=TAKEN, layers=LAYERS) -> None:
        """Blocks of the prefill are in those of the decode."""
        assert self.decode.outcome(name)
        for layer in layers:
            source, sink = self.prefill.blocks(layer, taken), self.decode.blocks(layer, TAKEN)
            assert source == sink, layer
            assert all(any(block) for block in source), f"{layer} was computed"
