"""A connector that moves no byte: what handing a request over costs in vLLM itself. The decode waits for its
"KV" as for any other, and hears by a datagram that the last layer is computed (with `read_mode`: that the
prefill has its token). What it then computes with is whatever lies in its blocks."""

import contextlib
import select
import socket
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

# Longest wait for a datagram at the end of a step that computes nothing.
IDLE_S = 0.002


@dataclass
class Computed(KVConnectorMetadata):
    """Hand-overs whose prompts a step computes to their end."""

    keys: list[str] = field(default_factory=list)


class FloorConnector(KVConnectorBase_V1, SupportsHMA):
    """Takes requests whose `kv_transfer_params` have a name in `floor`. `floor` of its configuration is the path of
    the decode's socket."""

    def __init__(self, vllm_config, role, kv_cache_config):
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        self.produces, self.path = transfer.is_kv_producer, transfer.get_from_extra_config("floor", "")
        self.reads = transfer.get_from_extra_config("read_mode", False)
        self.last = [name for group in kv_cache_config.kv_cache_groups for name in group.layer_names][-1]
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        if role == KVConnectorRole.SCHEDULER and not self.produces:
            self.socket.bind(self.path)
        # Requests by the name of their hand-over, those of them with blocks, and what was heard of.
        self.requests: dict[str, str] = {}
        self.awaited: set[str] = set()
        self.heard: set[str] = set()
        self.idle = False

    def _key(self, request) -> str | None:
        return (request.kv_transfer_params or {}).get("floor")

    def _tell(self, keys: list[str]) -> None:
        for key in keys:
            with contextlib.suppress(OSError):
                self.socket.sendto(key.encode(), self.path)

    def start_load_kv(self, forward_context, **kwargs) -> None: ...

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, layer_name: str, kv_layer, attn_metadata, **kwargs) -> None:
        if self.produces and not self.reads and layer_name == self.last:
            self._tell(self._connector_metadata.keys)

    def wait_for_save(self) -> None: ...

    def get_num_new_matched_tokens(self, request, num_computed_tokens: int):
        key = self._key(request)
        if self.produces or key is None or key in self.requests:
            return 0, False
        return request.num_prompt_tokens - num_computed_tokens, True

    def update_state_after_alloc(self, request, blocks, num_external_tokens: int) -> None:
        if (key := self._key(request)) is not None:
            self.requests.setdefault(key, request.request_id)
            self.awaited |= {request.request_id} if num_external_tokens else set()

    def build_connector_meta(self, scheduler_output) -> Computed:
        self.idle = not scheduler_output.total_num_scheduled_tokens
        scheduled = scheduler_output.num_scheduled_tokens
        keys = [key for key, id in self.requests.items() if id in scheduled] if self.produces else []
        return Computed(keys)

    def update_connector_output(self, connector_output) -> None:
        if self.produces:
            return
        wait = IDLE_S if self.idle and self.awaited - self.heard else 0
        if select.select([self.socket], [], [], wait)[0]:
            with contextlib.suppress(BlockingIOError):
                while True:
                    self.heard.add(self.requests.get(self.socket.recv(4096).decode(), ""))
        if ended := self.heard & self.awaited:
            connector_output.finished_recving = (connector_output.finished_recving or set()) | ended
            self.awaited -= ended

    def request_finished(self, request, block_ids):
        if (key := self._key(request)) is not None:
            self.requests.pop(key, None)
            if self.produces and self.reads:
                self._tell([key])
        return False, None

    def request_finished_all_groups(self, request, block_ids):
        return self.request_finished(request, block_ids)
