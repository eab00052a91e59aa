"""Calls that are wrong, and what is said then."""

import socket
import subprocess
import sys
import types

import pytest
from conftest import Buffer, engine
from kvferry.cuda import Event, Stream, stand_in, unpinned
from mori.io import BackendType, EngineDesc, IOEngine, IOEngineConfig, MemoryDesc
from mori.io import MemoryLocationType, PollCqMode, RdmaBackendConfig, XgmiBackendConfig


def test_vllms_call_of_both_backends():
    rdma = RdmaBackendConfig(2, -1, 3, PollCqMode.POLLING, enable_notification=False)
    for kind, config in [(BackendType.RDMA, rdma), (BackendType.XGMI, XgmiBackendConfig())]:
        mine = IOEngine("me", IOEngineConfig("127.0.0.1", 0))
        mine.create_backend(kind, config)
        desc = mine.get_engine_desc()
        assert desc.key == "me" and desc.port > 0
        assert EngineDesc.unpack(desc.pack()) == desc
        assert mine.allocate_transfer_uid() != mine.allocate_transfer_uid()


def test_a_descriptor_tells_the_address():
    mine, buffer = engine("me"), Buffer(1)
    desc = MemoryDesc.unpack(buffer.register(mine).pack())
    assert (desc.data, desc.size, desc.engine_key) == (buffer.address, buffer.size, "me")


def test_nothing_works_before_the_backend():
    mine = IOEngine("me", IOEngineConfig("127.0.0.1", 0))
    with pytest.raises(RuntimeError, match="call create_backend first"):
        mine.get_engine_desc()
    with pytest.raises(ValueError, match="use BackendType.RDMA or BackendType.XGMI"):
        mine.create_backend(4)
    mine.create_backend(BackendType.XGMI)
    with pytest.raises(RuntimeError, match="has its backend already"):
        mine.create_backend(BackendType.XGMI)


def test_a_port_in_use_is_named():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(RuntimeError, match=f"127.0.0.1.*{port}"):
            engine("me", port)


def test_a_stranger_is_not_reached():
    mine, other, buffer = engine("me"), engine("other"), Buffer(1)
    local, remote = buffer.register(mine), buffer.register(other)
    with pytest.raises(ValueError, match="register_remote_engine"):
        mine.create_session(local, remote)
    with pytest.raises(ValueError, match="not registered here"):
        mine.register_remote_engine(other.get_engine_desc())
        mine.create_session(remote, remote)
    for kind in (EngineDesc, MemoryDesc):
        with pytest.raises(ValueError, match=kind.__name__):
            kind.unpack(b"\xc1 no descriptor")


def test_only_host_memory():
    mine = engine("me")
    with pytest.raises(ValueError, match="host memory only"):
        mine.register_memory(4096, 4096, 0, MemoryLocationType.GPU)
    device = types.SimpleNamespace(type="cuda")
    with pytest.raises(ValueError, match="install MoRI"):
        mine.register_torch_tensor(types.SimpleNamespace(device=device))


def torch(cuda: bool, at: int = 0):
    """With or without a device; what it allocates lies `at` bytes behind a page."""
    tensor = types.SimpleNamespace(data_ptr=lambda: (1 << 40) + at)
    available = types.SimpleNamespace(is_available=lambda: cuda)
    made = types.SimpleNamespace(cuda=available, int8=None, empty=lambda *_, **__: tensor)
    made.Tensor = type("Tensor", (), {})
    return made


def test_cuda_has_placeholders_only_without_a_device():
    without, with_device = torch(False), torch(True)
    stand_in(without)
    stand_in(with_device)
    event = without.cuda.Event()
    event.record(without.cuda.current_stream())
    event.synchronize()
    assert isinstance(event, Event) and isinstance(without.cuda.current_stream(), Stream)
    assert not hasattr(with_device.cuda, "Event")


def test_memory_is_pinned_only_for_a_device():
    without, with_device = torch(False), torch(True)
    unpinned(without)
    unpinned(with_device)
    tensor = without.Tensor()
    assert tensor.pin_memory() is tensor
    assert not hasattr(with_device.Tensor, "pin_memory")


def test_vllm_is_told_what_to_set_where_memory_is_not_aligned(monkeypatch):
    connector = "vllm.distributed.kv_transfer.kv_connector.v1.moriio.moriio_engine"
    monkeypatch.setitem(sys.modules, connector, types.ModuleType(connector))
    monkeypatch.delenv("THP_MEM_ALLOC_ENABLE", raising=False)
    monkeypatch.setitem(sys.modules, "torch", torch(False, at=64))
    with pytest.raises(RuntimeError, match="64 bytes behind a page: set THP_MEM_ALLOC_ENABLE=1"):
        engine("me")
    monkeypatch.setitem(sys.modules, "torch", torch(True, at=64))
    engine("me")
    monkeypatch.setitem(sys.modules, "torch", torch(False))
    engine("me")


def test_no_mori_is_hidden_by_accident():
    found = "import importlib.util as u; print(u.find_spec('mori'))"
    isolated = subprocess.run([sys.executable, "-I", "-c", found], capture_output=True, text=True)
    assert isolated.stdout.strip() == "None", isolated
