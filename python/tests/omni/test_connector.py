"""The connector between processes: what vLLM-Omni asks of one, and what of the payloads comes back."""

import inspect
import random
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kvferry.omni import KvferryOmniConnector, PayloadLost, settings
from kvferry.omni.keys import parsed
from kvferry.omni.outcomes import OUTCOMES
from objects import DTYPES, anything, same, stored, tensor
from stages import clean_up, close, drop, get, health, keep, kept, lost, plain, poll, put, put_chunk, settle, wait_for, want
from vllm_omni.distributed.omni_connectors.connectors.base import OmniConnectorBase
from vllm_omni.distributed.omni_connectors.connectors.mori_transfer_engine_connector import (
    MoriTransferEngineConnector,
)
from vllm_omni.distributed.omni_connectors.utils.memory_pool import BufferAllocator, ManagedBuffer
from vllm_omni.distributed.omni_connectors.utils.serialization import OmniSerializer

pytestmark = pytest.mark.filterwarnings("ignore")


def serialized(obj: Any) -> Any:
    return OmniSerializer.deserialize(OmniSerializer.serialize(obj))


def test_r1_it_has_what_the_contract_and_moris_connector_have():
    assert issubclass(KvferryOmniConnector, OmniConnectorBase)
    assert not KvferryOmniConnector.__abstractmethods__ and KvferryOmniConnector.supports_raw_data
    for theirs in (OmniConnectorBase, MoriTransferEngineConnector):
        for name, method in inspect.getmembers(theirs, callable):
            if name.startswith("_"):
                continue
            wanted = inspect.signature(method).parameters
            ours = inspect.signature(getattr(KvferryOmniConnector, name)).parameters
            assert list(ours)[: len(wanted)] == list(wanted), name
            assert all(ours[name].kind == wanted[name].kind for name in wanted), name


def parts(here: Any) -> Any:
    connector = here.connector
    connector.update_sender_info("10.0.0.1", 50_052, sender_rank=1)
    info = connector.get_connection_info()
    with connector as same_one:
        assert same_one is connector
    connector.close()
    return connector.stage_id, info


def test_r1_it_says_who_it_is(pipeline):
    stage_id, info = pipeline.stage(3, zmq_port=50_053, host="auto")(parts)
    assert stage_id == 3
    assert {"host", "zmq_port", "engine_key", "can_put"} <= set(info)
    # Whoever has none of them asks nobody.
    assert info["host"] and info["zmq_port"] == 50_053 and info["can_put"]


def closed_calls(here: Any) -> list[str]:
    here.connector.close()
    said = []
    for call in (
        lambda: here.connector.put("0", "1", "k", b""),
        lambda: here.connector.get("0", "1", "k"),
        lambda: here.connector.get_with_deadline("0", "1", "k", deadline=time.monotonic() + 60),
        lambda: here.connector.cleanup("k", "0", "1"),
    ):
        with pytest.raises(RuntimeError) as raised:
            call()
        said.append(str(raised.value))
    health = here.connector.health()
    here.connector.abandon_get("k")
    here.connector.reap_consumed()
    assert health["status"] == "unhealthy" and health["outcomes"]["closed"] == 4
    return said


def test_r1_a_closed_one_says_so(pipeline):
    assert set(pipeline.stage(0)(closed_calls)) == {"this KvferryOmniConnector is closed"}


def changed_after_put(here: Any) -> None:
    data = torch.zeros(1 << 16, dtype=torch.int32)
    array = np.zeros(1 << 16)
    assert here.connector.put("0", "1", "t", data)[0]
    assert here.connector.put("0", "1", "o", {"a": data, "b": [array]})[0]
    data.fill_(7)
    array.fill(7)


def test_r1_o36_what_is_changed_after_put_is_not_sent(pipeline):
    sender, receiver = pipeline.stage(0), pipeline.stage(1)
    sender(changed_after_put)
    assert not receiver(get, "t")[1].any()
    back = receiver(get, "o")
    assert not back["a"].any() and not back["b"][0].any()


@pytest.mark.parametrize("form", ["complete", "partial", "none", "foreign"])
def test_r2_o7_o19_all_forms_of_metadata_lead_to_the_payload(pipeline, form):
    sender, receiver = pipeline.stage(0), pipeline.stage(1)
    done, size, metadata = sender(put, "r_0_0", {"a": torch.arange(5)})
    assert done and size == metadata["data_size"] > 40
    assert set(metadata) == {"source_host", "source_port", "data_size", "is_fast_path", "kvferry"}
    assert metadata["is_fast_path"] is False
    given = {
        "complete": metadata,
        "partial": {"source_host": "10.0.0.1", "source_port": 50_051},
        "none": None,
        # What somebody else says of its size counts for nothing.
        "foreign": {"source_host": "10.0.0.1", "source_port": 1, "data_size": 3, "is_fast_path": True},
    }[form]
    assert torch.equal(receiver(get, "r_0_0", ("0", "1"), given)["a"], torch.arange(5))


@pytest.mark.parametrize(
    "metadata", [{}, {"kvferry": None}, {"kvferry": {}}, {"data_size": "many"}, {"kvferry": {"client": None}}], ids=repr
)
def test_o20_metadata_that_makes_no_sense_is_none(pipeline, metadata):
    sender, receiver = pipeline.stage(0), pipeline.stage(1)
    sender(put, "k", b"bytes")
    assert receiver(get, "k", ("0", "1"), metadata) == (bytes, b"bytes")


def test_r3_o9_a_middle_stage_gets_and_puts_with_one_object(pipeline):
    first, middle, last = (pipeline.stage(stage, role="receiver") for stage in (0, 1, 2))
    for chunk in range(5):
        assert first(put, f"r_0_{chunk}", [chunk])[0]
        got = middle(get, f"r_0_{chunk}")
        assert middle(put, f"r_1_{chunk}", [*got, "talker"], ("1", "2"))[0]
        assert last(get, f"r_1_{chunk}", ("1", "2")) == [chunk, "talker"]


def timed_polls(here: Any, metadata: Any) -> list[float]:
    times = []
    key = f"absent {bool(metadata)}_0_0"
    for _ in range(200):
        begun = time.monotonic()
        assert here.connector.get("0", "1", key, metadata) is None
        times.append(time.monotonic() - begun)
    return times


def test_r4_an_absent_payload_is_not_waited_for(pipeline):
    """Each call of a receive loop keeps all other requests waiting."""
    pipeline.stage(0)
    receiver = pipeline.stage(1)
    complete = {"source_host": "h", "source_port": 1, "data_size": 1}
    times = receiver(timed_polls, complete)
    # The first one waits its bound, which a busy machine makes longer.
    assert times[0] >= 0.009
    assert sorted(times)[len(times) // 2] < 0.009
    assert receiver(health)["outcomes"]["not_ready"] == 200
    # Nor does the first one where nobody says that it is there.
    patient = pipeline.stage(1, get_wait_ms=1000)
    for metadata in (None, {"source_host": "h", "source_port": 1}):
        assert max(patient(timed_polls, metadata)) < 0.9


def with_deadline(here: Any, key: str, seconds: float) -> tuple[float, Any]:
    begun = time.monotonic()
    got = here.connector.get_with_deadline("0", "1", key, deadline=begun + seconds)
    return time.monotonic() - begun, got and plain(got[0])


def test_r5_o8_a_deadline_is_kept(pipeline):
    sender, receiver = pipeline.stage(0), pipeline.stage(1)
    # The shortest of some, on a machine with other work.
    waited = min(receiver(with_deadline, "absent", 0.05)[0] for _ in range(20))
    assert 0.05 <= waited < 0.06
    assert receiver(with_deadline, "gone", -1.0)[1] is None
    receiver.begin(with_deadline, "there", 60)
    sender(put, "there", {"a": 1})
    waited, got = receiver.result()
    assert got == {"a": 1} and waited < 60


def arrived_and_abandoned(here: Any) -> None:
    connector = here.connector
    assert connector.get("0", "1", "k") is None
    wait_for(lambda: connector._channels.current().link.stats()["wants"] == 1)
    connector.abandon_get("k")
    assert connector._channels.current().link.stats()["wants"] == 0 and not connector._wants
    connector.abandon_get("never asked for")


def test_r5_what_is_abandoned_is_for_another_one(pipeline):
    sender, first, second = pipeline.stage(0), pipeline.stage(1), pipeline.stage(1)
    first(arrived_and_abandoned)
    sender(put, "k", b"x")
    assert second(get, "k") == (bytes, b"x")


def test_r6_r8_o2_o3_a_payload_that_is_read_outlives_its_key(pipeline):
    """Cleaned up, put again, closed at its sender: who reads it does not notice."""
    sender, receiver = pipeline.stage(0), pipeline.stage(1)
    for key, kind in (("whole", None), ("r_0_0", 0)):
        sender(put, key, {"a": torch.full((1 << 13,), 1)})
        receiver(keep, key)
        sender(put, key, {"a": torch.full((1 << 13,), 2)})
        sender(clean_up, "whole" if kind is None else "r")
        # Into what was free.
        for number in range(30):
            sender(put, f"other {number} {key}", {"a": torch.full((1 << 13,), 3)})
        assert torch.equal(receiver(kept, key)["a"], torch.full((1 << 13,), 1))
    sender(close)
    for number in range(30):
        assert torch.equal(receiver(get, f"other {number} whole")["a"], torch.full((1 << 13,), 3))
    assert torch.equal(receiver(kept, "whole")["a"], torch.full((1 << 13,), 1))


def test_r8_o3_of_two_puts_of_a_key_the_later_counts(pipeline):
    sender, receiver = pipeline.stage(0), pipeline.stage(1)
    sender(put, "k", [1])
    sender(put, "k", [2])
    assert receiver(get, "k") == [2]
    assert receiver(poll, "k") is None


def test_r9_o18_the_host_says_where_a_payload_is_and_nobody_else(pipeline):
    """There is no place in what a stage is told by another one."""
    sender = pipeline.stage(0)
    _, _, metadata = sender(put, "k", b"x")
    assert set(metadata["kvferry"]) == {"incarnation", "client", "engine"}


def unencodable(here: Any) -> Any:
    return here.connector.put("0", "1", "r_0_1", {"a": object()})


def test_r10_outcomes_are_told_apart(pipeline):
    sender, receiver = pipeline.stage(0, put_wait_s=0), pipeline.stage(1)
    assert receiver(poll, "r_0_1") is None
    assert sender(put, "huge_0_0", torch.empty(32 << 20, dtype=torch.uint8)) == (False, 0, None)
    assert receiver(lost, "huge_0_0") == "given-up"
    assert sender(unencodable) == (False, 0, None)
    assert receiver(lost, "r_0_1") == "given-up"
    sender(put, "c", b"x")
    sender(clean_up, "c")
    assert receiver(lost, "c") == "cleaned-up"
    sender(put, "x", b"x")
    another = pipeline.stage(1)
    another(damage, "x")
    another.kill()
    assert receiver(lost, "x") == "corrupt"
    of_sender, of_receiver = sender(health), receiver(health)
    assert of_sender["failures"] == {"too-long": 1, "unencodable": 1}
    assert of_sender["outcomes"]["pool_full"] == 1
    assert of_sender["last_error"].startswith("r_0_1 from stage 0 to stage 1: TypeError: ")
    assert of_receiver["failures"] == {"given-up": 2, "cleaned-up": 1, "corrupt": 1}
    outcomes = of_receiver["outcomes"]
    assert (outcomes["peer_down"], outcomes["unknown"], outcomes["corrupt"]) == (2, 1, 1)
    assert outcomes["not_ready"] > 0
    assert set(outcomes) >= {"not_ready", "unknown", "pool_full", "peer_down", "timeout", "corrupt", "closed"}


def test_r10_each_kind_of_the_host_is_counted_and_in_the_document():
    root = Path(__file__).parents[3]
    of_host = re.findall(r'PayloadFailure::\w+.* => "([a-z-]+)",', (root / "engine/src/core/payload/io.rs").read_text())
    assert len(of_host) >= 12 and set(of_host) <= set(OUTCOMES)
    document = (root / "docs/omni.md").read_text()
    for kind, outcome in OUTCOMES.items():
        assert f"| `{kind}` | `{outcome}` |" in document


def damage(here: Any, key: str) -> None:
    """As somebody who writes into the pool. The payload is not taken, and goes to who asks next."""
    channel = here.connector._channels.current()
    channel.link.want(parsed("0", "1", key))
    _, _, offset, _, _ = channel.link.wait(parsed("0", "1", key), 60)
    channel.pool[offset : offset + 4] = 0


def said(here: Any, extra: dict[str, Any]) -> list[str]:
    """Lines of a start."""
    import logging

    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    ours = logging.getLogger("vllm.kvferry.omni.connector")
    ours.addHandler(handler)
    ours.setLevel(logging.INFO)
    here.connector = KvferryOmniConnector(extra)
    return lines


def test_r11_one_line_says_what_payloads_go_by(pipeline):
    stage = pipeline.stage(0)
    extra = pipeline.extra(1, backend_type="xgmi", memory_pool_device="cuda")
    line, *more = pipeline.bare()(said, extra)
    assert line == (
        "KvferryOmniConnector of stage 1: fabric host (backend_type xgmi, memory_pool_device cuda is not available), "
        f"pool of 16777216 bytes in host memory, deployment tests, host at {pipeline.socket}"
    )
    (unregistered,) = more
    assert "kvferry.omni.register was not called" in unregistered
    health_of = stage(health)
    assert (health_of["status"], health_of["connector"]) == ("healthy", "KvferryOmniConnector")
    assert (health_of["fabric"], health_of["pool_device"], health_of["pool_size"]) == ("host", "cpu", 16 << 20)
    stage(put, "k", bytes(1000))
    assert stage(health)["bytes_by_fabric"]["host"] >= 1000


@pytest.mark.parametrize(
    ("extra", "text"),
    [
        ({"require_fabric": "xgmi"}, "payloads move through a pool in host memory"),
        ({"require_fabric": True, "backend_type": "xgmi"}, "backend_type xgmi: payloads move through"),
        ({"require_fabric": 7}, 'require_fabric = 7: it has to be "host", or true'),
        ({"pool_byte": 1}, 'pool_byte: there is no such key; did you mean "pool_bytes"?'),
        ({"memory_pool_sizes": 1}, 'did you mean "memory_pool_size"?'),
        ({"deploymnet": "a"}, 'did you mean "deployment"?'),
        ({"pool_bytes": "1 GB"}, "pool_bytes = '1 GB': it has to be a number of bytes"),
        ({"pool_bytes": 1 << 20, "memory_pool_size": 1 << 21}, "the same thing"),
        ({"put_wait_s": -1}, "put_wait_s = -1: it has to be a number from 0 to 3600"),
        ({"get_wait_ms": "soon"}, "get_wait_ms = 'soon': it has to be a number from 0 to 1000"),
        ({"host": "conect"}, "host = 'conect': it has to be"),
        ({"socket": 3}, "socket = 3: it has to be a text"),
    ],
    ids=repr,
)
def test_r11_o22_a_mistake_in_the_configuration_is_an_error(extra, text):
    with pytest.raises(ValueError) as raised:
        settings.read({"socket": "/s", "deployment": "d"} | extra)
    assert text in str(raised.value)


def test_keys_of_vllm_omni_are_taken():
    of_mori = {
        "host": "auto", "zmq_port": 50_051, "backend_type": "rdma", "device_name": "", "memory_pool_size": "536870912",
        "memory_pool_device": "cpu", "xgmi_num_streams": 64, "codec_chunk_frames": 25, "codec_left_context_frames": 25,
        "initial_codec_chunk_frames": 4, "connector_get_sleep_s": 0.01, "stage_id": 2, "role": "receiver", "from_stage": 1,
        "to_stage": 2, "sender_host": "h", "sender_zmq_port": 1, "lease_seconds": 3, "something_new": {},
    }  # fmt: skip
    made = settings.read(of_mori | {"socket": "/s", "deployment": "d"})
    assert (made.pool_bytes, made.stage, made.spawn) == (512 << 20, "2", True)


@pytest.mark.parametrize("seed", range(3))
def test_r13_any_object_is_what_the_serializer_makes_of_it(pipeline, seed):
    sender, receiver = pipeline.stage(0), pipeline.stage(1)
    assert sender(put_many, seed) == 100
    receiver(got_many, seed)


def objects(seed: int) -> list[Any]:
    rng = random.Random(seed)
    return [[anything(rng)] for _ in range(100)]


def put_many(here: Any, seed: int) -> int:
    return sum(here.connector.put("0", "1", f"r_0_{n}", obj)[0] for n, obj in enumerate(objects(seed)))


def got_many(here: Any, seed: int) -> None:
    for number, obj in enumerate(objects(seed)):
        back, _ = wait_for(lambda: here.connector.get("0", "1", f"r_0_{number}"))
        assert same(back, serialized(obj)), f"object {number}: {obj!r}"


RAW = [b"", b"bytes", bytearray(b"array"), bytearray(), memoryview(b"view"), memoryview(b"")]


def test_r13_o25_raw_payloads_keep_their_kind(pipeline):
    sender, receiver = pipeline.stage(0), pipeline.stage(1)
    for number in range(len(RAW)):
        assert sender(put_raw, number) == (True, len(RAW[number]), True)
        assert receiver(get, f"k{number}") == (type(RAW[number]), bytes(RAW[number]))


def put_raw(here: Any, number: int) -> tuple[bool, int, bool]:
    done, size, metadata = here.connector.put("0", "1", f"k{number}", RAW[number])
    return done, size, metadata["is_fast_path"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_r13_o25_o26_a_tensor_keeps_dtype_and_shape(pipeline, dtype):
    sender, receiver = pipeline.stage(0), pipeline.stage(1)
    sender(put_tensors, str(dtype), dtype)
    receiver(got_tensors, str(dtype), dtype)


def put_tensors(here: Any, seed: str, dtype: torch.dtype) -> None:
    rng = random.Random(seed)
    for number in range(20):
        obj = tensor(rng, dtype)
        done, size, _ = here.connector.put("0", "1", f"k{number}", obj)
        assert done and size == obj.nbytes


def got_tensors(here: Any, seed: str, dtype: torch.dtype) -> None:
    rng = random.Random(seed)
    for number in range(20):
        obj = tensor(rng, dtype)
        buffer, size = wait_for(lambda: here.connector.get("0", "1", f"k{number}"))
        assert size == buffer.size == obj.nbytes
        assert (buffer.kind, buffer.dtype, buffer.shape) == (torch.Tensor, obj.dtype, obj.shape)
        assert stored(buffer.as_tensor()) == stored(obj) == buffer.to_bytes()
        assert buffer.tensor.dtype == torch.uint8 and buffer.tensor.dim() == 1


def put_buffers(here: Any) -> None:
    pool = torch.arange(64, dtype=torch.uint8)
    theirs = ManagedBuffer(BufferAllocator(64), 8, 16, pool)
    assert here.connector.put("1", "2", "theirs", theirs)[:2] == (True, 16)
    ours = wait_for(lambda: here.connector.get("0", "1", "k"))[0]
    assert here.connector.put("1", "2", "ours", ours)[:2] == (True, 24)


def test_r13_buffers_of_pools_are_put_again(pipeline):
    first, middle, last = (pipeline.stage(stage) for stage in (0, 1, 2))
    first(put, "k", torch.arange(6, dtype=torch.int32).view(2, 3))
    middle(put_buffers)
    assert torch.equal(last(get, "theirs", ("1", "2"))[1], torch.arange(8, 24, dtype=torch.uint8))
    assert torch.equal(last(get, "ours", ("1", "2"))[1], torch.arange(6, dtype=torch.int32).view(2, 3))


def used_buffer(here: Any) -> None:
    from vllm_omni.distributed.omni_connectors.kv_transfer_manager import KVCacheTransferData

    buffer, size = wait_for(lambda: here.connector.get("0", "1", "k"))
    assert isinstance(buffer, ManagedBuffer) and hasattr(buffer, "tensor") and hasattr(buffer, "release")
    assert buffer.to_bytes() == bytes(range(16)) and size == 16
    assert torch.equal(buffer.as_tensor(torch.int32, (2, 2)), buffer.tensor.view(torch.int32).view(2, 2))
    with pytest.raises(ValueError, match="requires 32 bytes"):
        buffer.as_tensor(torch.int64, (4,))
    view = buffer.tensor
    with buffer:
        pass
    buffer.release()
    with pytest.raises(RuntimeError, match="has been released"):
        buffer.tensor  # noqa: B018
    # As long as somebody has a view, nobody else has the slot.
    assert view.tolist() == list(range(16))
    kv = KVCacheTransferData("r", {"key_cache": [torch.arange(4.0)], "value_cache": [None]}, [1], {})
    assert here.connector.put("1", "2", "kv", kv.to_bytes())[0]


def kv_of_manager(here: Any) -> Any:
    """As OmniKVTransferManager reads what came."""
    from vllm_omni.distributed.omni_connectors.kv_transfer_manager import KVCacheTransferData

    raw, _ = wait_for(lambda: here.connector.get("1", "2", "kv"))
    data = KVCacheTransferData.from_bytes(memoryview(raw.tensor.numpy()))
    keys = [key.clone() for key in data["layer_blocks"]["key_cache"]]
    raw.release()
    return keys


def test_r14_a_raw_payload_is_a_managed_buffer(pipeline):
    first, middle, last = (pipeline.stage(stage) for stage in (0, 1, 2))
    first(put, "k", bytes(range(16)))
    middle(used_buffer)
    (keys,) = last(kv_of_manager)
    assert torch.equal(keys, torch.arange(4.0))


KEYS = ["", "a/b", "a@0_1", "ключ", "\0", "x" * 5000, "r_0_0", "r_0_00", "r_0_-1", "r_0_18446744073709551616", "_0_1", "🎤_0_3"]


def test_r15_keys_are_of_any_length_and_content(pipeline):
    sender, receiver = pipeline.stage(0), pipeline.stage(1)
    for number, key in enumerate(KEYS):
        assert sender(put, key, [number])[0]
    for number, key in enumerate(KEYS):
        assert receiver(get, key) == [number]


def test_r15_no_two_keys_are_one():
    rng = random.Random(0)
    seen = {}
    for _ in range(20_000):
        key = "".join(rng.choice(["_", "0", "1", "a", "_0_", "00"]) for _ in range(rng.randrange(6)))
        made = parsed("0", "1", key)
        assert seen.setdefault(made, key) == key
    assert parsed("0", "1", "r_0_12") == ("0", "1", "r", 12)
    assert parsed("10", "11", "a_b_10_3") == ("10", "11", "a_b", 3)
    assert parsed("1", "2", "r_0_3") == ("1", "2", "r_0_3", None)
    assert parsed("0", "1", "omni_0_to_1_kv_cache_r") == ("0", "1", "omni_0_to_1_kv_cache_r", None)


def test_r15_o30_deployments_do_not_meet_at_one_host(pipeline):
    one, other = pipeline.stage(0), pipeline.stage(0, deployment="other")
    of_one, of_other = pipeline.stage(1), pipeline.stage(1, deployment="other")
    one(put, "r_0_0", ["one"])
    other(put, "r_0_0", ["other"])
    assert of_other(get, "r_0_0") == ["other"] and of_one(get, "r_0_0") == ["one"]
    # Nor does the pair of stages not count.
    one(put, "k", ["0 to 1"])
    one(put, "k", ["0 to 2"], ("0", "2"))
    assert of_one(get, "k", ("0", "2")) == ["0 to 2"] and of_one(get, "k") == ["0 to 1"]


def of_environment(here: Any) -> tuple[str, str]:
    here.connector = KvferryOmniConnector({"pool_bytes": 1 << 20})
    return here.connector.settings.deployment, str(here.connector.settings.socket)


def test_r15_processes_of_one_server_are_one_deployment(pipeline, folder, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    monkeypatch.delenv(settings.DEPLOYMENT, raising=False)
    (mine, at) = pipeline.bare()(of_environment)
    (another, elsewhere) = pipeline.bare()(of_environment)
    assert mine != another and at != elsewhere
    monkeypatch.setenv(settings.DEPLOYMENT, "inherited")
    stages = [pipeline.bare(), pipeline.bare()]
    assert stages[0](of_environment) == stages[1](of_environment)
    stages[0](put, "k", b"x")
    assert stages[1](get, "k") == (bytes, b"x")


def test_r16_o24_no_driver_is_needed(pipeline):
    assert not torch.cuda.is_available()
    assert pipeline.stage(0)(health)["pool_device"] == "cpu"


def test_o21_a_payload_has_one_receiver(pipeline):
    sender, first, second = pipeline.stage(0), pipeline.stage(1), pipeline.stage(1)
    sender(put, "k", b"x")
    first(want, "other")
    assert first(get, "k") == (bytes, b"x")
    # Whoever asks then waits for the next one with this key, which another request may put.
    assert second(poll, "k") is None and second(poll, "k") is None
    sender(put, "k", b"y")
    assert second(get, "k") == (bytes, b"y")
    # Of a stream's later chunks there is no other one.
    for chunk in range(2):
        sender(put_chunk, "r", chunk, [chunk])
        assert first(get, f"r_0_{chunk}") == [chunk]
    assert second(lost, "r_0_1") == "taken"


def test_o6_of_two_who_want_a_key_one_gets_it(pipeline):
    sender, *receivers = pipeline.stage(0), pipeline.stage(1), pipeline.stage(1)
    for number in range(50):
        for receiver in receivers:
            receiver.begin(get_or_lose, f"k{number}")
        sender(put, f"k{number}", torch.full((1000,), number))
        got = sorted((receiver.result() for receiver in receivers), key=str)
        assert got[1] == "taken" and torch.equal(got[0][1], torch.full((1000,), number))


def get_or_lose(here: Any, key: str) -> Any:
    try:
        return get(here, key)
    except PayloadLost as error:
        return error.kind


def test_o15_o16_a_full_pool_is_waited_for_and_said(pipeline):
    sender, receiver = pipeline.stage(0, put_wait_s=0.05), pipeline.stage(1)
    quarter = torch.zeros(3 << 20, dtype=torch.uint8)
    count = 0
    while sender(put, f"k{count}", quarter)[0]:
        count += 1
    assert count >= 2
    found = sender(health)
    assert found["outcomes"]["pool_full"] == 1 and "in the pool" in found["last_error"]
    receiver(keep, "k0")
    assert not sender(put, "more", quarter)[0]
    # One that waits longer gets the room that comes free.
    patient = pipeline.stage(0, put_wait_s=60)
    patient.begin(put, "later", quarter)
    receiver(drop, "k0")
    assert patient.result()[0]
    assert torch.equal(receiver(get, "later")[1], quarter)


def test_a_chunk_that_is_not_put_ends_its_stream(pipeline):
    """What followed would come in its place: vLLM-Omni puts the next chunk with the key of the one that failed."""
    sender, receiver = pipeline.stage(0, put_wait_s=0), pipeline.stage(1)
    assert sender(put_chunk, "r", 0, [0])[0]
    assert not sender(put_chunk, "r", 1, torch.empty(32 << 20, dtype=torch.uint8))[0]
    assert not sender(put_chunk, "r", 1, [2])[0]
    assert receiver(get, "r_0_0") == [0]
    assert receiver(lost, "r_0_1") == "given-up"
    # The next request with this id begins anew.
    assert sender(put_chunk, "r", 0, ["new"])[0]
    assert receiver(get, "r_0_0") == ["new"]


def test_a_first_chunk_that_is_not_put_ends_its_request_and_no_other(pipeline):
    sender, receiver = pipeline.stage(0, put_wait_s=0), pipeline.stage(1)
    assert not sender(put_chunk, "r", 0, torch.empty(32 << 20, dtype=torch.uint8))[0]
    assert not sender(put_chunk, "r", 0, ["the second chunk"], ("0", "1"), True)[0]
    assert receiver(lost, "r_0_0") == "given-up"
    assert sender(put_chunk, "r", 0, ["another request"])[0]
    assert receiver(get, "r_0_0") == ["another request"]


def test_a_whole_payload_that_was_not_put_may_be_put_again(pipeline):
    sender, receiver = pipeline.stage(0, put_wait_s=0), pipeline.stage(1)
    assert not sender(put, "kv", torch.empty(32 << 20, dtype=torch.uint8))[0]
    assert receiver(lost, "kv") == "given-up"
    assert sender(put, "kv", b"smaller")[0]
    assert receiver(get, "kv") == (bytes, b"smaller")


def raised_between(here: Any, key: str) -> list[str]:
    """What polling for longer than a second raises."""
    raised, end = [], time.monotonic() + 1.5
    while time.monotonic() < end:
        try:
            assert here.connector.get("0", "1", key) is None
        except PayloadLost as error:
            raised.append(str(error))
        time.sleep(0.001)
    return raised


def test_a_loss_is_told_at_most_once_a_second(pipeline):
    sender, receiver = pipeline.stage(0), pipeline.stage(1)
    sender(put, "k", b"x")
    sender(clean_up, "k")
    told = receiver(raised_between, "k")
    assert 1 <= len(told) <= 2
    assert told[0] == "k from stage 0 to stage 1 is lost (cleaned-up): it was cleaned up"


def test_cleanup_is_of_a_payload_or_of_a_stream(pipeline):
    sender, receiver = pipeline.stage(0), pipeline.stage(1)
    for chunk in range(3):
        sender(put_chunk, "r", chunk, [chunk])
    sender(clean_up, "r_0_1")
    assert receiver(get, "r_0_0") == [0] and receiver(get, "r_0_2") == [2]
    assert receiver(lost, "r_0_1") == "cleaned-up"
    for chunk in range(3):
        sender(put_chunk, "q", chunk, [chunk])
        # What is no chunk only looks like one.
        sender(put, f"p_0_{chunk}", [chunk])
    sender(clean_up_internal, "q@0_1")
    sender(clean_up, "p")
    assert {receiver(lost, f"q_0_{chunk}") for chunk in range(3)} == {"cleaned-up"}
    assert [receiver(get, f"p_0_{chunk}") for chunk in range(3)] == [[0], [1], [2]]
    assert sender(bad_clean_ups) == 3


def clean_up_internal(here: Any, key: str) -> None:
    here.connector.cleanup(key)
    settle(here)


def bad_clean_ups(here: Any) -> int:
    count = 0
    for args in (("k", "0"), ("k",), ("k@0",)):
        with pytest.raises(ValueError, match="from_stage|key@from_to"):
            here.connector.cleanup(*args)
        count += 1
    return count


def test_the_first_payload_says_which_stage_it_is(pipeline):
    """vLLM-Omni's manager of KV caches does not tell a connector of a name that it does not know."""
    sender, receiver = pipeline.stage(0, stage_id=None), pipeline.stage(1, stage_id=None)
    assert sender(health)["stage"] is None and sender(parts_of_unknown) == -1
    assert receiver(poll, "omni_0_to_1_kv_cache_r") is None
    assert sender(put, "omni_0_to_1_kv_cache_r", b"kv")[0]
    assert (sender(health)["stage"], receiver(health)["stage"]) == ("0", "1")
    assert receiver(get, "omni_0_to_1_kv_cache_r") == (bytes, b"kv")


def parts_of_unknown(here: Any) -> int:
    return here.connector.stage_id
