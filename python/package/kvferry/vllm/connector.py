"""The class that vLLM loads: hands each hook to the half that the process is."""

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)

from kvferry.vllm.scheduler import Scheduler
from kvferry.vllm.stats import KvferryPromMetrics, KvferryStats
from kvferry.vllm.worker import Worker


@dataclass
class Metadata(KVConnectorMetadata):
    """What the scheduler tells the workers in a step."""

    # Names the step to the host if it computes prompts that are handed over.
    step: int | None = None
    # Requests whose blocks may be reused only when the host says so.
    preempted: list[str] = field(default_factory=list)
    # Requests whose KV did not arrive.
    failed: list[str] = field(default_factory=list)
    # Requests that vLLM has ended, whose loads are over.
    over: list[str] = field(default_factory=list)
    # Names the last host that was lost.
    lost: int = 0


class KvferryConnector(KVConnectorBase_V1, SupportsHMA):
    """Moves KV between vLLM servers through a host process beside each."""

    def __init__(self, vllm_config, role, kv_cache_config):
        super().__init__(vllm_config, role, kv_cache_config)
        self.scheduler = self.worker = None
        if role == KVConnectorRole.SCHEDULER:
            self.scheduler = Scheduler(vllm_config, kv_cache_config)
        else:
            self.worker = Worker(vllm_config, kv_cache_config)

    def get_mem_pool_context(self):
        return self.worker.pool()

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self.worker.register(kv_caches)

    def handle_preemptions(self, kv_connector_metadata: Metadata) -> None:
        self.worker.wait_for_preempted(kv_connector_metadata.preempted)

    def start_load_kv(self, forward_context, **kwargs) -> None:
        """Loads are the host's business."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Requests are scheduled after their KV is there."""

    def save_kv_layer(self, layer_name: str, kv_layer, attn_metadata, **kwargs) -> None:
        self.worker.computed(self._step())

    def wait_for_save(self) -> None:
        self.worker.step_over(self._step())

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        meta = self._connector_metadata
        if meta is None:
            meta = Metadata()
        self.worker.host_lost(meta.lost)
        failed = set(meta.failed)
        return KVConnectorTransferResults(
            finished_recving=failed.union(meta.over), failed_recving=failed
        )

    def _step(self) -> int | None:
        meta = self._connector_metadata
        return meta.step if meta is not None else None

    def on_new_request(self, request) -> None:
        self.scheduler.arrived(request)

    def get_num_new_matched_tokens(
        self, request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self.scheduler.matched(request, num_computed_tokens)

    def get_loaded_kv_cache_group_ids(self, request) -> tuple[int, ...]:
        return tuple(range(len(self._kv_cache_config.kv_cache_groups)))

    def update_state_after_alloc(self, request, blocks, num_external_tokens: int) -> None:
        self.scheduler.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output) -> Metadata:
        return Metadata(*self.scheduler.step(scheduler_output))

    def request_finished(self, request, block_ids: list[int]):
        return self.scheduler.finished(request, (block_ids,))

    def request_finished_all_groups(self, request, block_ids: tuple[list[int], ...]):
        return self.scheduler.finished(request, block_ids)

    def update_connector_output(self, connector_output) -> None:
        self.scheduler.deliver(connector_output)

    def get_kv_connector_stats(self) -> KvferryStats | None:
        return self.scheduler.stats() if self.scheduler is not None else None

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
