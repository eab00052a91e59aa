"""Full-graph capture: what vLLM makes of it with KvferryConnector, and a push without its hooks. CPU
servers capture nothing."""

import os
from pathlib import Path

import pytest
from conftest import MODES, Place, at_once, prompt
from pair import KVFERRY, request, served, tokens
from test_pd import LENGTHS
from vllm.config import (
    CompilationConfig,
    CUDAGraphMode,
    DeviceConfig,
    KVTransferConfig,
    VllmConfig,
)
from vllm.platforms import current_platform

HERE = Path(__file__).resolve().parent
CAPTURED = {"kv_connector": "Captured", "kv_connector_module_path": "captured"}


@pytest.mark.parametrize("mode", MODES)
def test_vllm_leaves_the_layers_of_a_push_out_of_its_graphs(mode, monkeypatch):
    """Of a pull nothing happens between layers, so that graphs stay as they were configured."""
    # As on a GPU; a CPU server would take all graphs away.
    platform = type(current_platform)
    monkeypatch.setattr(platform, "support_static_graph_mode", lambda self: True)
    monkeypatch.setattr(platform, "check_and_update_config", lambda *_: None)
    kv = KVTransferConfig(
        **KVFERRY,
        kv_role="kv_producer",
        kv_connector_extra_config={"read_mode": mode == "READ"},
    )
    config = VllmConfig(
        compilation_config=CompilationConfig(cudagraph_mode=CUDAGraphMode.FULL),
        device_config=DeviceConfig("cpu"),
        kv_transfer_config=kv,
    )
    expected = {"WRITE": CUDAGraphMode.PIECEWISE, "READ": CUDAGraphMode.FULL}
    assert config.compilation_config.cudagraph_mode == expected[mode]


@pytest.fixture(scope="module")
def own(model, logs, reference):
    connectors = {"prefill": CAPTURED, "decode": KVFERRY}
    # Where vLLM looks for the module.
    path = os.pathsep.join([str(HERE), os.environ["PYTHONPATH"]])
    place = Place(model, logs, reference, None, {})
    with served("graphs", place, "WRITE", connectors, {"PYTHONPATH": path}, asynchronous=True) as pair:
        yield pair


@pytest.mark.wide
@pytest.mark.parametrize("length", LENGTHS)
def test_same_tokens_as_a_single_server(own, reference, length):
    ids = prompt(length, "graphs")
    assert tokens(own.router.complete(request(ids))) == reference(ids)


@pytest.mark.wide
def test_eight_at_a_time_in_chunks(own, reference):
    answers, expected = at_once(own, reference, "graphs")
    assert answers == expected


@pytest.mark.wide
def test_afterwards_every_block_is_free(own):
    own.prefill.wait_idle(90)
    own.decode.wait_idle(90)
