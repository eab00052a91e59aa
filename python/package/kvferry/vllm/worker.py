"""The half in a worker process: says where its KV lies and which layers are computed."""

import json
import os
import time

from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends

from kvferry._native import Link, Transfers
from kvferry.line import Line, guarded, nothing
from kvferry.start import unbound
from kvferry.vllm.drafts import draft_layers
from kvferry.vllm.engine import STILL_S, connect, line, place, reads_on
from kvferry.vllm.kernels import Kernels
from kvferry.vllm.layers import StepLayers, microbatch
from kvferry.vllm.memory import Files

# Layers of fewer bytes than this are told of together. A link of 400 Gbit/s moves that much in 20 us, about
# what it takes to tell a host on another core, and less than on the core that computes.
TOLD_BYTES = 1 << 20


class Worker:
    def __init__(self, vllm_config, kv_cache_config, files: Files):
        """`files` are those of this process."""
        self.vllm_config = vllm_config
        self.place = place(vllm_config)
        self.files = files
        self.rank = vllm_config.parallel_config.rank % (
            vllm_config.parallel_config.tensor_parallel_size
        )
        groups = kv_cache_config.kv_cache_groups
        names = [name for group in groups for name in group.layer_names]
        drafts = draft_layers(vllm_config, names)
        if not self.place.drafts:
            names = [name for name in names if name not in drafts]
        self.layers = StepLayers(names, drafts)
        # Most bytes that a token has in a layer.
        self.token_bytes = max(
            group.kv_cache_spec.page_size_bytes / group.kv_cache_spec.block_size for group in groups
        )
        # What the GPU is at, if the KV is in its memory.
        self.kernels: Kernels | None = None
        self.line: Line | None = None
        # The transfer actor, if it is here.
        self.transfers: Transfers | None = None
        # The host that was lost last.
        self.lost = 0

    def pool(self):
        """Where vLLM is to allocate the KV cache; none for where it does."""
        return self.files.pool() if self.place.in_file else None

    def register(self, kv_caches: dict) -> None:
        """Tells the host where the KV of each layer lies."""
        kinds = {tensor.device.type for tensor in kv_caches.values()}
        if wrong := kinds - {"cpu", "cuda"}:
            raise ValueError(f"KvferryConnector does not move KV of {', '.join(sorted(wrong))}")
        if "cuda" in kinds:
            self.kernels = Kernels()
        storages = {tensor.untyped_storage().data_ptr(): tensor for tensor in kv_caches.values()}
        regions = [
            {
                "base": base,
                "len": tensor.untyped_storage().nbytes(),
                "file": self.files.by_base.get(base),
                "device": None if tensor.is_cpu else tensor.device.index,
            }
            for base, tensor in storages.items()
        ]
        tensors = [
            {
                "layer": name,
                "start": tensor.data_ptr(),
                "shape": list(tensor.shape),
                "stride": list(tensor.stride()),
                "element": tensor.element_size(),
            }
            for name, tensor in kv_caches.items()
        ]
        backends = get_current_attn_backends(self.vllm_config)
        worker = {
            "rank": self.rank,
            "pid": os.getpid(),
            "regions": regions,
            "tensors": tensors,
            "attention": backends[0].get_name() if backends else None,
        }
        described = json.dumps(worker)

        def make() -> Link:
            return connect(self.place, lambda path: Link.worker(path, described))

        with unbound():
            self.line = line(make)
            if self.place.in_worker:
                self.transfers = Transfers(self.place.socket, self.rank)

    @guarded(nothing)
    def computed(self, step: int, tokens: int, layer: str) -> None:
        """A layer of the step is computed, maybe for a part of these tokens of prompts. The host is told
        when that makes enough bytes, and when there are no more."""
        if not self.layers.computed(layer, *microbatch(self.vllm_config.parallel_config)):
            return
        untold = (self.layers.done - self.layers.told) * tokens * self.token_bytes
        if untold >= TOLD_BYTES or self.layers.all_done:
            self._tell(step)

    @guarded(nothing)
    def step_over(self, step: int | None) -> None:
        self.layers.finish()
        if step is not None and self.layers.done > self.layers.told:
            self._tell(step)
        self.layers.reset()

    def host_lost(self, incarnation: int) -> None:
        """Blocks of loads that a lost host began are free after this."""
        if incarnation != self.lost and self.transfers is not None:
            self.transfers.end(incarnation)
        self.lost = incarnation

    def _tell(self, step: int) -> None:
        self.layers.told = self.layers.done
        if self.transfers is not None:
            event = self.kernels.mark(self.transfers.seen) if self.kernels is not None else None
            self.transfers.layers(step, self.layers.done, event)
            return
        if (link := self.line.current()) is None:
            return
        try:
            link.layers(step, self.layers.done)
        except ConnectionError as error:
            self.line.lost(error)

    @guarded(nothing)
    def wait_for_preempted(self, requests: list[str]) -> None:
        """Returns when nothing reads the blocks of these requests any more. That is also so when the host
        has ended: what others still read of a push they throw away, because nobody tells them that it is
        whole."""
        waited, deadline = set(requests), time.monotonic() + STILL_S
        while waited and (link := self.line.current()) is not None:
            try:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise reads_on(waited)
                events = link.wait(left)
            except ConnectionError as error:
                self.line.lost(error)
                return
            waited -= {request for kind, request, _ in events if kind == "preemption_safe"}
