"""vLLM-Omni's adapters of chunks over a connector, and what its scheduler does with one."""

import time
from collections import deque
from types import SimpleNamespace
from typing import Any

import kvferry.omni
import torch
from kvferry.omni import hooks
from stages import settle, wait_for
from vllm_omni.data_entry_keys import CodesStruct, OmniPayloadStruct
from vllm_omni.distributed.omni_connectors.transfer_adapter.chunk_transfer_adapter import OmniChunkTransferAdapter

NAME = hooks.NAME

# As VLLM_OMNI_INPUT_WAIT_TIMEOUT_S has it by default.
INPUT_WAIT_S = 600.0


class Request(SimpleNamespace):
    """What the adapter looks at."""

    def is_finished(self) -> bool:
        return self.done


def request(name: str) -> Request:
    return Request(
        request_id=f"internal-{name}",
        external_req_id=name,
        resumable=False,
        done=False,
        num_computed_tokens=0,
        num_output_placeholders=0,
        prompt_token_ids=[1],
        additional_information=None,
        prefill_stats=None,
        _all_token_ids=[1],
        _output_token_ids=[],
    )


def to_codes(transfer_manager: Any, multimodal_output: Any, request: Any, is_finished: bool) -> OmniPayloadStruct:
    """What the next stage gets of the outputs of this one."""
    return OmniPayloadStruct(codes=CodesStruct(audio=multimodal_output["audio"]))


class Chunks(deque):
    """Those that are to be sent, with the number of those that its thread has taken."""

    taken = 0

    def popleft(self) -> Any:
        self.taken += 1
        return super().popleft()


class Adapter(OmniChunkTransferAdapter):
    """Says when what was to be sent was sent, or failed."""

    sent = 0

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._pending_save_reqs = Chunks(self._pending_save_reqs)

    def _send_single_request(self, task: Any) -> None:
        try:
            super()._send_single_request(task)
        finally:
            self.sent += 1

    def is_idle(self) -> bool:
        return not self._pending_save_reqs and self._pending_save_reqs.taken == self.sent


def audio(chunk: int) -> torch.Tensor:
    return torch.arange(8).view(2, 4) + chunk


def begin(here: Any, stage: int, extra: dict[str, Any], name: str = NAME) -> None:
    kvferry.omni.register()
    model = SimpleNamespace(
        stage_connector_config={"name": name, "extra": {**extra, "stage_id": stage}},
        stage_id=stage,
        worker_type="generation",
        async_chunk=True,
        custom_process_next_stage_input_func="adapters.to_codes",
        hf_config=SimpleNamespace(),
        max_model_len=4096,
    )
    config = SimpleNamespace(model_config=model, scheduler_config=SimpleNamespace(max_num_seqs=8))
    here.adapter = Adapter(config)
    here.connector = here.adapter.connector
    here.requests = {}


def send(here: Any, name: str, audio: torch.Tensor, is_last: bool = False) -> dict[str, str]:
    """One chunk; what the adapter says of those that it could not send."""
    made = here.requests.setdefault(name, request(name))
    made.done, made.num_computed_tokens = is_last, made.num_computed_tokens + 1
    here.adapter.save_async({"audio": audio}, made)
    wait_for(here.adapter.is_idle)
    if is_last:
        del here.requests[name]
        wait_for(lambda: name not in here.adapter._sender_tokens or here.adapter._send_failures)
    return here.adapter.collect_failed_send_request_ids()


def wait_in_scheduler(adapter: OmniChunkTransferAdapter, made: Request) -> None:
    """As _process_chunk_queue has it."""
    adapter.load_async(made)
    adapter._waiting_since.setdefault(made.request_id, time.monotonic())


def receive(here: Any, name: str) -> tuple[Any, bool] | str:
    """The next chunk, and whether it is the last one; or how the scheduler ends the request."""
    adapter = here.adapter
    made = here.requests.setdefault(name, request(name))
    adapter._finished_load_reqs.discard(made.request_id)
    wait_in_scheduler(adapter, made)

    def outcome() -> Any:
        if made.request_id in adapter._finished_load_reqs:
            return "chunk"
        return made.request_id in adapter.collect_timed_out_request_ids(INPUT_WAIT_S) and "error"

    if wait_for(outcome) == "error":
        finish(here, name)
        return "error"
    adapter._waiting_since.pop(made.request_id, None)
    audio = made.additional_information["codes"]["audio"].clone()
    is_last = made.request_id in adapter.upstream_exhausted_requests
    if is_last:
        finish(here, name)
    return audio, is_last


def begin_to_receive(here: Any, name: str) -> None:
    """Until it has polled once."""
    made = here.requests.setdefault(name, request(name))
    wait_in_scheduler(here.adapter, made)
    wait_for(lambda: here.connector._wants)


def finish(here: Any, name: str) -> None:
    """The request is over here: it has ended, or it was aborted."""
    here.requests.pop(name, None)
    here.adapter.cleanup(f"internal-{name}", name)
    if hasattr(here.connector, "of_kvferry"):
        settle(here)


def used(here: Any) -> dict[str, Any]:
    """What there is of requests in the connector and at its host's link."""
    connector = here.connector
    return {
        "wants": len(connector._wants),
        "failing": len(connector.failing),
        "open": len(connector._sender._open),
        "given up": len(connector._sender._given_up),
        "link": connector.health()["host"]["wants"],
    }
