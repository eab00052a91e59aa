"""vLLM-Omni's own adapters of chunks, on both sides, over the connector."""

import os
import subprocess
import sys
from importlib.metadata import entry_points
from typing import Any

import adapters
import kvferry.omni
import pytest
import torch
from adapters import audio, begin, begin_to_receive, finish, receive, send, used
from kvferry.omni import hooks
from stages import health, wait_for
from vllm_omni.distributed.omni_connectors.factory import OmniConnectorFactory
from vllm_omni.distributed.omni_connectors.transfer_adapter.chunk_transfer_adapter import OmniChunkTransferAdapter
from vllm_omni.distributed.omni_connectors.utils.config import ConnectorSpec

NOTHING = {"wants": 0, "failing": 0, "open": 0, "given up": 0, "link": 0}


@pytest.fixture
def pair(pipeline):
    """An adapter of stage 0 and one of stage 1."""
    made = []
    for stage in (0, 1):
        made.append(pipeline.bare())
        made[-1](begin, stage, pipeline.extra(stage, put_wait_s=0))
    return made


def test_a_stream_arrives_chunk_by_chunk(pair):
    sender, receiver = pair
    for name in ("one", "other/€@0_1"):
        for chunk in range(5):
            assert sender(send, name, audio(chunk), chunk == 4) == {}
            got, is_last = receiver(receive, name)
            assert torch.equal(got, audio(chunk)) and is_last == (chunk == 4)
    assert sender(used) == receiver(used) == NOTHING
    assert receiver(health)["gets"] == 10


def test_a_receiver_may_be_there_first(pair):
    sender, receiver = pair
    receiver.begin(receive, "r")
    sender(send, "r", audio(0), True)
    assert torch.equal(receiver.result()[0], audio(0))


def test_an_id_may_be_used_again(pair):
    """By a client that chooses its own; each time the receiver asks first, and the host remembers the request before."""
    sender, receiver = pair
    for again in range(4):
        receiver.begin(receive, "r")
        for chunk in range(2):
            sender(send, "r", audio(again + chunk), chunk == 1)
            assert torch.equal(receiver.result()[0], audio(again + chunk))
            if chunk == 0:
                receiver.begin(receive, "r")
    assert sender(used) == receiver(used) == NOTHING


def test_a_chunk_that_is_not_put_fails_the_request_at_once(pair):
    """And not after 600 s, with what followed in its place."""
    sender, receiver = pair
    sender(send, "r", audio(0))
    assert receiver(receive, "r")[1] is False
    assert sender(send, "r", torch.zeros(2, 4 << 20)) == {"internal-r": "connector.put reported failure"}
    sender(send, "r", audio(2), True)
    assert receiver(receive, "r") == "error"
    assert receiver(health)["failures"] == {"given-up": 1}
    sender(finish, "r")
    # Whoever sends it again succeeds.
    receiver.begin(receive, "r")
    sender(send, "r", audio(3), True)
    assert torch.equal(receiver.result()[0], audio(3))
    assert receiver(used) == NOTHING


def test_a_producer_that_dies_fails_the_request_at_once(pair):
    sender, receiver = pair
    sender(send, "r", audio(0))
    receiver(receive, "r")
    receiver.begin(receive, "r")
    sender.kill()
    assert receiver.result() == "error"
    assert receiver(health)["failures"] == {"producer-gone": 1}
    assert receiver(used) == NOTHING


def test_a_lost_host_fails_the_requests_that_wait(pair, pipeline):
    sender, receiver = pair
    sender(send, "r", audio(0))
    receiver(receive, "r")
    receiver(begin_to_receive, "r")
    pipeline.lose_host()
    assert receiver(receive, "r") == "error"
    wait_for(lambda: sender(health)["status"] == receiver(health)["status"] == "healthy")
    sender(send, "next", audio(1), True)
    assert torch.equal(receiver(receive, "next")[0], audio(1))


def test_an_abort_at_the_producer_is_told(pair):
    sender, receiver = pair
    sender(send, "r", audio(0))
    receiver(receive, "r")
    sender(send, "r", audio(1))
    sender(finish, "r")
    # What was not taken is gone, and nobody waits.
    assert receiver(receive, "r") == "error"
    assert sender(used) == receiver(used) == NOTHING


def test_an_abort_at_the_receiver_leaves_nothing(pair):
    sender, receiver = pair
    sender(send, "r", audio(0))
    receiver(receive, "r")
    sender(send, "r", torch.zeros(2, 1 << 19))
    receiver(finish, "r")
    sender(finish, "r")
    receiver(begin_to_receive, "absent")
    receiver(finish, "absent")
    assert receiver(used) == NOTHING
    # Five such chunks have room in half of the pool if the one that was not taken has none.
    for _ in range(5):
        assert sender(send, "s", torch.zeros(1, 3 << 17)) == {}


def test_another_connector_is_left_alone(pipeline):
    stage = pipeline.bare()
    stage(begin, 1, {}, "SharedMemoryConnector")
    stage(begin_to_poll, "r")
    stage(finish, "r")


def begin_to_poll(here: Any, name: str) -> None:
    made = here.requests.setdefault(name, adapters.request(name))
    here.adapter.load_async(made)
    wait_for(lambda: made.request_id in here.adapter.request_ids_mapping)


def registered(here: Any, name: str) -> tuple[str, list[bool]]:
    for _ in range(3):
        kvferry.omni.register()
    names = OmniConnectorFactory.list_registered_connectors()
    wrapped = [
        hasattr(getattr(OmniChunkTransferAdapter, name), "of_kvferry") for name in (hooks.POLL, hooks.SEND, hooks.SENT, hooks.RECEIVED)
    ]
    assert hooks.unwrapped is None and names.count(hooks.NAME) == 1
    # Once.
    assert not hasattr(getattr(OmniChunkTransferAdapter, hooks.POLL).__wrapped__, "of_kvferry")
    return OmniConnectorFactory._registry[name].__module__, wrapped


def test_o33_the_name_is_registered_and_the_adapter_wrapped(pipeline):
    assert pipeline.bare()(registered, hooks.NAME) == ("kvferry.omni.hooks", [True] * 4)
    assert pipeline.bare()(registered, hooks.MORI)[0] == "vllm_omni.distributed.omni_connectors.factory"


def test_o33_moris_place_is_taken_only_if_that_is_said(pipeline, monkeypatch):
    monkeypatch.setenv(hooks.TAKE, "true")
    assert pipeline.bare()(registered, hooks.MORI)[0] == "kvferry.omni.hooks"
    monkeypatch.setenv(hooks.TAKE, "yes")
    with pytest.raises(ValueError, match='"yes": it has to be true or false'):
        pipeline.bare()(registered, hooks.MORI)


def test_o33_in_moris_place_with_moris_configuration(pipeline, monkeypatch):
    monkeypatch.setenv(hooks.TAKE, "true")
    of_mori = {"host": "auto", "zmq_port": 50_051, "backend_type": "xgmi", "memory_pool_size": 16 << 20, "pool_bytes": None}
    pair = []
    for stage in (0, 1):
        pair.append(pipeline.bare())
        pair[-1](begin, stage, pipeline.extra(stage, **of_mori), hooks.MORI)
    pair[0](send, "r", audio(0), True)
    assert torch.equal(pair[1](receive, "r")[0], audio(0))


def without(here: Any, name: str) -> str | None:
    delattr(OmniChunkTransferAdapter, name)
    kvferry.omni.register()
    return hooks.unwrapped


def test_what_is_missing_of_the_adapter_is_said(pipeline):
    assert hooks.SENT in pipeline.bare()(without, hooks.SENT)


def of_factory(here: Any, extra: dict[str, Any]) -> None:
    kvferry.omni.register()
    OmniConnectorFactory.create_connector(ConnectorSpec(hooks.NAME, extra))


def test_o22_the_factory_says_what_is_wrong(pipeline):
    with pytest.raises(ValueError, match='Failed to create connector KvferryOmniConnector: .*did you mean "pool_bytes"'):
        pipeline.bare()(of_factory, {"pool_byte": 3})


def without_native(here: Any, extra: dict[str, Any]) -> None:
    # As a library that does not load.
    sys.modules["kvferry.omni.connector"] = None
    of_factory(here, extra)


def test_o23_what_does_not_load_is_named(pipeline):
    with pytest.raises(ValueError, match=r"Failed to create connector .*: .*kvferry\.omni\.connector"):
        pipeline.bare()(without_native, pipeline.extra(0))


def test_the_plugin_is_in_both_groups():
    for group in ("vllm.general_plugins", "vllm_omni.general_plugins"):
        (ours,) = [plugin for plugin in entry_points(group=group) if plugin.name == "kvferry"]
        assert ours.load() is kvferry.omni.register


def test_without_vllm_omni_nothing_is_imported():
    """A server of vLLM alone calls the plugin, too."""
    script = "import sys, kvferry.omni; kvferry.omni.register(); print('vllm_omni' in sys.modules, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=os.environ)
    assert done.stdout.split() == ["False", "False"]
