"""The half in a worker process: says where its KV lies and which layers are computed."""

import json
import os
import time

from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends

from kvferry._native import Link, Transfers
from kvferry.line import Line, guarded, nothing
from kvferry.log import logger_of
from kvferry.start import unbound
from kvferry.vllm.engine import connect, place
from kvferry.vllm.kernels import Kernels
from kvferry.vllm.memory import Files

logger = logger_of(__name__)

# Longest wait of a step for blocks that the host may still read.
PREEMPTION_S = 2.0


class Worker:
    def __init__(self, vllm_config, kv_cache_config):
        self.vllm_config = vllm_config
        self.place = place(vllm_config)
        self.files = Files()
        self.rank = vllm_config.parallel_config.rank % (
            vllm_config.parallel_config.tensor_parallel_size
        )
        groups = kv_cache_config.kv_cache_groups
        self.layers = sum(len(group.layer_names) for group in groups)
        # What the GPU is at, if the KV is in its memory.
        self.kernels: Kernels | None = None
        self.line: Line | None = None
        # The transfer actor, if it is here.
        self.transfers: Transfers | None = None
        # The host that was lost last.
        self.lost = 0
        # Layers of the step that are computed.
        self.done = 0

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
            self.line = Line(make(), make)
            if self.place.in_worker:
                self.transfers = Transfers(self.place.socket, self.rank)

    @guarded(nothing)
    def computed(self, step: int | None) -> None:
        """A layer of the step is computed; vLLM computes them one after the other."""
        if step is not None and self.done < self.layers:
            self.done += 1
            self._tell(step)

    @guarded(nothing)
    def step_over(self, step: int | None) -> None:
        if step is not None and self.done < self.layers:
            self.done = self.layers
            self._tell(step)
        self.done = 0

    def host_lost(self, incarnation: int) -> None:
        """Blocks of loads that a lost host began are free after this."""
        if incarnation != self.lost and self.transfers is not None:
            self.transfers.end(incarnation)
        self.lost = incarnation

    def _tell(self, step: int) -> None:
        if self.transfers is not None:
            event = self.kernels.mark(self.transfers.seen) if self.kernels is not None else None
            self.transfers.layers(step, self.done, event)
            return
        if (link := self.line.current()) is None:
            return
        try:
            link.layers(step, self.done)
        except ConnectionError as error:
            self.line.lost(error)

    @guarded(nothing)
    def wait_for_preempted(self, requests: list[str]) -> None:
        """Returns when nothing reads the blocks of these requests any more."""
        waited, deadline = set(requests), time.monotonic() + PREEMPTION_S
        while waited and (link := self.line.current()) is not None:
            left = deadline - time.monotonic()
            if left <= 0:
                logger.error("blocks of %s are reused while they may be read", sorted(waited))
                return
            try:
                events = link.wait(left)
            except ConnectionError as error:
                # What others still read of a push they throw away.
                self.line.lost(error)
                return
            waited -= {request for kind, request, _ in events if kind == "preemption_safe"}
