"""Beside other connectors in vLLM's MultiConnector, through its objects."""

from types import SimpleNamespace

import pytest
from halves import LAYERS, TAKEN, Pair, compute, config
from kvferry.vllm.roles import ours
from pair import KVFERRY
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.v1.outputs import KVConnectorOutput

OTHER = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
OWN = KVFERRY | {"kv_role": "kv_producer", "kv_connector_extra_config": {"read_mode": True}}


def multi(model, children: list[dict]):
    made = config(model, "kv_both", {"connectors": children})
    made.kv_transfer_config.kv_connector = "MultiConnector"
    return made


def test_its_configuration_is_found_and_checked(model):
    [own] = ours(multi(model, [OTHER, OWN]))
    transfer = own.kv_transfer_config
    assert (transfer.kv_role, transfer.kv_connector_extra_config) == ("kv_producer", {"read_mode": True})
    assert ours(multi(model, [OTHER])) == []
    with pytest.raises(ValueError, match="MultiConnector with 2 KvferryConnectors: give it one"):
        ours(multi(model, [OWN, OWN]))


def test_what_it_counts_is_read_again_by_name(model):
    """As the API server does, which has read the configuration and gets the figures in JSON."""
    KVConnectorFactory.get_connector_class(config(model, "prefill", {}).kv_transfer_config)
    own = KVConnectorFactory.get_connector_class_by_name("KvferryConnector")
    counted = own.build_kv_connector_stats()
    counted.data["outcomes"] = {"done": 3}
    stats = MultiConnector.build_kv_connector_stats({"KvferryConnector": counted.data})
    assert stats.reduce()["KvferryConnector"]["Transfers"] == 3


def test_loads_of_others_are_told_of(model, tmp_path):
    pair = Pair(model, tmp_path)
    pair.hand_over()
    for engine in pair.engines:
        output = KVConnectorOutput(finished_recving={"another"})
        engine.scheduler.update_connector_output(output)
        assert output.finished_recving == {"another"}
    pair.close()


def test_blocks_are_free_when_all_have_said_so(model, tmp_path):
    """MultiConnector counts in the workers who keeps the blocks of a request."""
    pair = Pair(model, tmp_path)
    pair.arrive("r")
    pair.begin("r")
    compute(pair.prefill, LAYERS)
    pair.prefill.end()
    assert pair.prefill.finish("r", (TAKEN,))[0]
    pair.assert_handed_over()
    said: set[str] = set()
    other = SimpleNamespace(get_transfer_results=lambda _: KVConnectorTransferResults(set(said)))
    counting = MultiConnector.__new__(MultiConnector)
    own = SimpleNamespace(get_transfer_results=pair.prefill.worker.get_transfer_results)
    counting._connectors, counting._extra_async_saves = [own, other], {"r": 1}
    pair.prefill.worker.get_transfer_results = counting.get_transfer_results
    half = pair.prefill.scheduler.schedulers[0]
    pair.prefill.until(lambda: not half.held and not half.free)
    pair.prefill.idle()
    assert "r" not in pair.prefill.freed
    said.add("r")
    pair.prefill.idle()
    assert "r" in pair.prefill.freed
    pair.close()
