"""The class that vLLM loads: hands each hook to the half that the process is."""

import functools
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)

from kvferry.vllm.memory import Files
from kvferry.vllm.pause import Pause
from kvferry.vllm.roles import by_role
from kvferry.vllm.scheduler import Scheduler
from kvferry.vllm.specs import keep_windows
from kvferry.vllm.stats import KvferryPromMetrics, KvferryStats
from kvferry.vllm.worker import Worker


@dataclass
class Told:
    """What the scheduler of a role tells its workers in a step."""

    # Names the step to the host if it computes prompts that are handed over.
    step: int | None = None
    # Of those prompts, what the step computes.
    tokens: int = 0
    # Requests whose blocks may be reused only when the host says so.
    preempted: list[str] = field(default_factory=list)
    # Requests whose KV did not arrive.
    failed: list[str] = field(default_factory=list)
    # Requests that vLLM has ended, whose loads are over.
    over: list[str] = field(default_factory=list)
    # Requests whose blocks nobody reads any more. Workers say so, because MultiConnector counts there who
    # else does.
    freed: list[str] = field(default_factory=list)
    # Names the last host that was lost.
    lost: int = 0


@dataclass
class Metadata(KVConnectorMetadata):
    """The same of all roles of the server."""

    told: list[Told]


class KvferryConnector(KVConnectorBase_V1, SupportsHMA):
    """Moves KV between vLLM servers through a host process beside each, or two where a server is prefill and
    decode."""

    def __init__(self, vllm_config, role, kv_cache_config):
        super().__init__(vllm_config, role, kv_cache_config)
        self.schedulers: list[Scheduler] = []
        self.workers: list[Worker] = []
        halves = by_role(vllm_config)
        if role == KVConnectorRole.SCHEDULER:
            self.schedulers = [Scheduler(half, kv_cache_config) for half in halves]
            self.pause = Pause(vllm_config)
            keep_windows(vllm_config, kv_cache_config)
        else:
            files = Files()
            self.workers = [Worker(half, kv_cache_config, files) for half in halves]

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config) -> bool:
        return False

    def get_mem_pool_context(self):
        return self.workers[0].pool()

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        for worker in self.workers:
            worker.register(kv_caches)

    def unregister_kv_caches(self) -> None:
        raise RuntimeError(
            "KvferryConnector does not support sleep mode: the KV cache stays where it is, because peers and"
            " hosts have its memory mapped or registered"
        )

    def handle_preemptions(self, kv_connector_metadata: Metadata) -> None:
        for worker, told in zip(self.workers, kv_connector_metadata.told, strict=True):
            worker.wait_for_preempted(told.preempted)

    def start_load_kv(self, forward_context, **kwargs) -> None:
        """Loads are the host's business."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Requests are scheduled after their KV is there."""

    def save_kv_layer(self, layer_name: str, kv_layer, attn_metadata, **kwargs) -> None:
        for worker, told in self._told():
            if told.step is not None:
                worker.computed(told.step, told.tokens, layer_name)

    def wait_for_save(self) -> None:
        for worker, told in self._told():
            worker.step_over(told.step)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = KVConnectorTransferResults()
        for worker, told in self._told():
            worker.host_lost(told.lost)
            results.failed_recving.update(told.failed)
            results.finished_recving.update(told.failed, told.over)
            results.finished_sending.update(told.freed)
        return results

    def _told(self) -> list[tuple[Worker, Told]]:
        meta = self._connector_metadata
        told = meta.told if meta is not None else [Told() for _ in self.workers]
        return list(zip(self.workers, told, strict=True))

    def _half(self, request) -> Scheduler:
        """Whose a request is that says it: a prefill comes first where there are both."""
        is_prefill = (request.kv_transfer_params or {}).get("do_remote_decode")
        return self.schedulers[0 if is_prefill else -1]

    def bind_gpu_block_pool(self, gpu_block_pool) -> None:
        for scheduler in self.schedulers:
            scheduler.blocks = gpu_block_pool

    def on_new_request(self, request) -> None:
        self._half(request).arrived(request)

    def get_num_new_matched_tokens(
        self, request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self._half(request).matched(request, num_computed_tokens)

    def get_loaded_kv_cache_group_ids(self, request) -> tuple[int, ...]:
        return self._kv_cache_config.transfer_group_ids

    def update_state_after_alloc(self, request, blocks, num_external_tokens: int) -> None:
        self._half(request).allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output) -> Metadata:
        held_back = self.pause.hold(scheduler_output, self.schedulers)
        return Metadata([Told(*half.step(scheduler_output, held_back)) for half in self.schedulers])

    def request_finished(self, request, block_ids: list[int]):
        return self._half(request).finished(request, (block_ids,))

    def request_finished_all_groups(self, request, block_ids: tuple[list[int], ...]):
        return self._half(request).finished(request, block_ids)

    def update_connector_output(self, connector_output) -> None:
        for half in self.schedulers:
            half.deliver(connector_output)

    def get_kv_connector_stats(self) -> KvferryStats | None:
        told = [stats for half in self.schedulers if (stats := half.stats()) is not None]
        if not told:
            return None
        stats = functools.reduce(KvferryStats.aggregate, told)
        stats.keep([half.kept for half in self.schedulers])
        return stats

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KvferryStats:
        return KvferryStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config, metric_types, labelnames, per_engine_labelvalues
    ) -> KvferryPromMetrics:
        return KvferryPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        return not extra_config.get("read_mode", False)
