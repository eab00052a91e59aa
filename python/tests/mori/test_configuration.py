"""What the connector makes of vLLM's configuration, with the few parts of vLLM that it asks played here."""

import importlib
import json
import logging
import socket
import sys
from types import ModuleType, SimpleNamespace

import pytest

PARALLEL = {
    "tensor_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "decode_context_parallel_size": 1,
    "prefill_context_parallel_size": 1,
    "data_parallel_size": 1,
    "data_parallel_size_local": 1,
    "data_parallel_backend": "mp",
    "data_parallel_index": 0,
    "data_parallel_rank": 0,
    "data_parallel_rank_local": None,
    "local_engines_only": False,
    "nnodes_within_dp": 1,
}


class Config:
    """Asks for the connector's class while it is made, as vLLM's does."""

    def __init__(self, keys=None, role="kv_producer", speculative=None, sleeps=False, **parallel):
        self.kv_transfer_config = SimpleNamespace(
            kv_connector="KvferryConnector", engine_id="e", kv_role=role, kv_connector_extra_config=keys
        )
        self.parallel_config = SimpleNamespace(**(PARALLEL | parallel))
        self.model_config = SimpleNamespace(enable_sleep_mode=sleeps)
        self.speculative_config = speculative

    def __post_init__(self):
        return self._connector_class()

    def _connector_class(self):
        return getattr(importlib.import_module("kvferry.vllm"), "KvferryConnector")


@pytest.fixture
def vllm(monkeypatch):
    """The modules of vLLM that are asked, and a connector's class that is not looked at."""

    def module(name: str, **parts) -> None:
        made = ModuleType(name)
        vars(made).update(parts)
        monkeypatch.setitem(sys.modules, name, made)

    platform = SimpleNamespace(is_rocm=lambda: False, is_cpu=lambda: True)
    factory = SimpleNamespace(get_connector_class_by_name=lambda name: "the class")
    module("vllm", __version__="0.32.0")
    module("vllm.platforms", current_platform=platform)
    module("vllm.distributed.kv_transfer.kv_connector.factory", KVConnectorFactory=factory)
    module("kvferry.vllm.connector", KvferryConnector="the class")
    for name in [name for name in sys.modules if name.startswith("kvferry.vllm")]:
        if name != "kvferry.vllm.connector":
            monkeypatch.delitem(sys.modules, name)
    return platform


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (Config({"red_mode": True}), 'did you mean "read_mode"'),
        (Config({"host_ip": "0.0.0.0"}), "peers are told it and cannot connect"),
        (Config({"handshake_port": 7, "notify_port": 7}), "it is handshake_port, too"),
        (Config({"protocol": {"lease_ms": -1}}), "protocol.lease_ms = -1: it has to be a time"),
        (Config({"handshake_port": 7000, "notify_port": 7001}, role="kv_both"), "put them 2 apart"),
        (Config(pipeline_parallel_size=2), "pipeline parallelism"),
        (Config(data_parallel_size=4, data_parallel_backend="ray"), "DP ranks on several nodes by Ray"),
        (Config(nnodes_within_dp=2), "TP ranks on several nodes"),
        (Config(sleeps=True), "sleep mode"),
        (Config(speculative=SimpleNamespace(method="dflash")), "speculative decoding with dflash"),
    ],
)
def test_mistakes_are_told_while_vllm_reads_its_configuration(vllm, made, said):
    with pytest.raises(ValueError, match=said):
        made.__post_init__()


def test_a_configuration_that_can_be_is_taken(vllm):
    assert Config({"http_port": "8100", "channel": {"silent_ms": 9000}}).__post_init__() == "the class"
    assert Config().__post_init__() == "the class"
    assert Config(role="kv_both").__post_init__() == "the class"
    assert Config(speculative=SimpleNamespace(method="ngram")).__post_init__() == "the class"
    # Later, whoever asks has no configuration at hand, or one that was checked.
    assert Config({"red_mode": True})._connector_class() == "the class"


def test_a_port_that_another_process_has_is_told_with_its_key(vllm):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for key in ("handshake_port", "notify_port"):
            with pytest.raises(ValueError, match=f"{key} = {port}: cannot listen .* another port"):
                Config({key: port}).__post_init__()
        # The host has it; or the rank that this configuration is for does not.
        Config({"handshake_port": port, "host": "connect", "socket": "/s"}).__post_init__()
        several = {"data_parallel_size": 2, "data_parallel_size_local": 2}
        Config({"handshake_port": port}, **several).__post_init__()


def test_an_address_that_others_reach_needs_a_secret_or_a_word(vllm, monkeypatch, tmp_path):
    # Whatever the ports: several DP ranks have none that are known here.
    far = {"host_ip": "192.0.2.1"}
    several = {"data_parallel_size": 2, "data_parallel_size_local": 2}
    said = "host_ip = 192.0.2.1: others reach this address.* secret_file .*insecure_network"
    for parallel in ({}, several):
        with pytest.raises(ValueError, match=said):
            Config(far, **parallel).__post_init__()
    assert Config(far | {"insecure_network": True}, **several).__post_init__() == "the class"
    assert Config(far | {"secret_file": "/s"}, **several).__post_init__() == "the class"
    # What the host will be told counts as well: by the environment and its file.
    for name in ("KVFERRY_INSECURE_NETWORK", "KVFERRY_HOST_INSECURE_NETWORK"):
        with monkeypatch.context() as patch:
            patch.setenv(name, "true")
            assert Config(far, **several).__post_init__() == "the class"
    file = tmp_path / "host.toml"
    file.write_text("insecure_network = true")
    with monkeypatch.context() as patch:
        patch.setenv("KVFERRY_HOST_CONFIG", str(file))
        assert Config(far, **several).__post_init__() == "the class"
    with monkeypatch.context() as patch:
        patch.setenv("KVFERRY_INSECURE_NETWORK", "perhaps")
        with pytest.raises(ValueError, match='"perhaps": it has to be true or false'):
            Config(far).__post_init__()
    # What a host that is there was told is not known.
    Config(far | {"host": "connect", "socket": "/s"}).__post_init__()


def test_gpus_of_amd_are_served_by_mori(vllm):
    check = importlib.import_module("kvferry.vllm.check")
    assert json.loads(check.given(Config({"http_port": 1}))) == {"http_port": 1}
    vllm.is_rocm = lambda: True
    assert json.loads(check.given(Config({}))) == {"backend": "mori-rdma"}
    assert json.loads(check.given(Config({"backend": "host"}))) == {"backend": "host"}


def test_lines_are_among_those_of_vllm(vllm):
    line = importlib.import_module("kvferry.line")
    heard = []
    handler = logging.Handler()
    handler.emit = heard.append
    vllms = logging.getLogger("vllm")
    vllms.addHandler(handler)
    try:
        line.logger.warning("a line")
    finally:
        vllms.removeHandler(handler)
    assert [record.getMessage() for record in heard] == ["a line"]
