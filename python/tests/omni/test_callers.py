"""What in vLLM-Omni calls a connector beside the adapter of chunks: its manager of KV caches and its synchronous payloads."""

import dataclasses
import time
from typing import Any

import kvferry.omni
import torch
from kvferry.omni import KvferryOmniConnector, hooks
from stages import health, poll, wait_for, want
from vllm_omni.distributed.omni_connectors.kv_transfer_manager import (
    KVCacheTransferData,
    OmniKVCacheConfig,
    OmniKVTransferManager,
)
from vllm_omni.distributed.omni_connectors.model_runner.omni_connector_payload_transport import (
    _OmniConnectorPayloadTransportMixin,
)

# Longer than anything here takes.
NEVER_S = 600.0


def manage(here: Any, stage: int, extra: dict[str, Any], rank: int = 0, ranks: int = 1) -> None:
    kvferry.omni.register()
    # It passes the configuration on as it is: a stage_id it has for names that it knows.
    config = {"type": hooks.NAME, **extra}
    here.manager = OmniKVTransferManager(
        OmniKVCacheConfig(
            connector_config=config,
            from_stage="0",
            to_stage="1",
            stage_id=stage,
            engine_input_source=[0] if stage else [],
            need_send_cache=stage == 0,
            need_recv_cache=stage == 1,
            recv_timeout=NEVER_S,
            from_tp=ranks,
            to_tp=ranks,
        )
    )
    # As a process of that rank has it.
    here.manager._tp_topo = dataclasses.replace(here.manager._tp_topo, local_rank=rank)
    here.connector = here.manager.connector
    assert isinstance(here.connector, KvferryOmniConnector)


def keys_of(request: str) -> torch.Tensor:
    return torch.arange(240_000.0).view(4, 2, 30_000) + len(request)


def transfer(here: Any, request: str) -> None:
    keys = keys_of(request)
    data = KVCacheTransferData(request, {"key_cache": [keys, None], "value_cache": [keys + 1, None]}, [7], {"seq_len": 4})
    here.manager._transfer_kv_cache(data, request)


def receive(here: Any, request: str) -> torch.Tensor | None:
    data, size = here.manager.receive_kv_cache_for_request(request)
    if data is None:
        return None
    blocks = data["layer_blocks"]
    assert size > 24 * 8 and blocks["key_cache"][1] is None and data["metadata"]["seq_len"] == 4
    assert torch.equal(blocks["value_cache"][0], blocks["key_cache"][0] + 1)
    return blocks["key_cache"][0]


def test_a_kv_cache_arrives_and_its_slot_is_free(pipeline):
    sender, receiver = pipeline.bare(), pipeline.bare()
    for number, stage in enumerate((sender, receiver)):
        stage(manage, number, pipeline.extra(number, stage_id=None, put_wait_s=0))
    for request in ("r", "r/2"):
        receiver.begin(receive, request)
        sender(transfer, request)
        assert torch.equal(receiver.result(), keys_of(request))
    assert receiver(health)["stage"] == "1" and receiver(health)["gets"] == 2
    # Nothing is read any more.
    receiver(poll, "another")
    wait_for(lambda: sender(put_most))


def put_most(here: Any) -> bool:
    """Half of the pool, which is the share of one of two stages."""
    done = here.connector.put("0", "1", "most", torch.empty((8 << 20) - (256 << 10), dtype=torch.uint8))[0]
    here.connector.cleanup("most", "0", "1")
    return done


def test_a_kv_cache_that_does_not_come_is_given_up_at_once(pipeline):
    """And not after the 30 s that the manager waits by itself."""
    sender, receiver = pipeline.bare(), pipeline.bare()
    for number, stage in enumerate((sender, receiver)):
        stage(manage, number, pipeline.extra(number))
    receiver(want, "omni_0_to_1_kv_cache_r")
    receiver.begin(receive, "r")
    sender.kill()
    assert receiver.result() is None
    assert receiver(health)["failures"] == {"producer-gone": 1}


class Transport(_OmniConnectorPayloadTransportMixin):
    """Of a stage without ranks."""

    def __init__(self, connector: Any):
        self._omni_connector = connector

    def is_data_transfer_rank(self) -> bool:
        return True

    @staticmethod
    def _get_local_tp_group() -> None:
        return None


def synchronous(here: Any, request: str, seconds: float) -> tuple[Any, float]:
    begun = time.monotonic()
    payload = Transport(here.connector).recv_stage_payload(request, "0", "1", retry_seconds=seconds)
    return payload, time.monotonic() - begun


def put_stage_payload(here: Any, request: str) -> None:
    here.connector.put("0", "1", f"{request}_0_0", {"latents": torch.arange(6.0)})


def test_o8_a_synchronous_payload_arrives(pipeline):
    sender, receiver = pipeline.stage(0), pipeline.stage(1)
    receiver.begin(synchronous, "r", NEVER_S)
    sender(put_stage_payload, "r")
    payload, _ = receiver.result()
    assert torch.equal(payload["latents"], torch.arange(6.0))
    # Absent, it is waited for as long as was said, and then wanted no more.
    payload, seconds = receiver(synchronous, "absent", 0.1)
    assert payload is None and seconds >= 0.1
    assert receiver(health)["host"]["wants"] == 0


def test_a_synchronous_payload_that_does_not_come_is_not_waited_for(pipeline):
    sender, receiver = pipeline.stage(0), pipeline.stage(1)
    receiver(want, "r_0_0")
    receiver.begin(synchronous, "r", NEVER_S)
    sender.kill()
    payload, seconds = receiver.result()
    assert payload is None and seconds < NEVER_S / 2
