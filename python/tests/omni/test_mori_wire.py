"""Payloads between a kvferry host and stages whose connector is vLLM-Omni 0.30.0's MoriTransferEngineConnector."""

import os
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import torch
import zmq
from kvferry._native import PayloadLink
from kvferry.omni import KvferryOmniConnector, codec
from mori_stage import MoriStage, mori_stage
from objects import same
from ports import free_ports
from vllm_omni.distributed.omni_connectors.utils.serialization import OmniSerializer

POOL = 64 << 20
DEPLOYMENT = "mixed"

# However busy the machine is, nothing takes as long.
PATIENCE = 300

OBJECTS = {
    "bytes": bytes(range(256)) * 13,
    "tensor": torch.arange(400_000, dtype=torch.float32).to(torch.bfloat16).view(4, -1),
    "object": {"codes": torch.arange(4_000).view(8, 500), "text": "é", "meta": {"finished": False, "list": [1, None, 2.5]}},
    "none": None,
    "empty": b"",
    "large": bytes(8 << 20),
}

pytestmark = pytest.mark.filterwarnings("ignore")


class Host:
    """A kvferry host, and a process of each of its stages."""

    def __init__(self, folder: Path):
        self.port, self.metrics = free_ports(2)
        socket = folder / "host.sock"
        self.process = subprocess.Popen(
            [
                *(os.environ["KVFERRY_BIN"], "host", "--socket", str(socket), "--payload-pool", str(POOL)),
                *("--payload-mori-listen", f"127.0.0.1:{self.port}", "--payload-mori-deployment", DEPLOYMENT),
                *("--metrics", f"127.0.0.1:{self.metrics}", "--log-level", "debug"),
            ],
            stderr=(folder / "log").open("wb"),
        )
        self.log = folder / "log"
        self.socket = socket
        self.thinker, self.talker = self.stage("0"), self.stage("1")

    def stage(self, stage: str, deployment: str = DEPLOYMENT) -> PayloadLink:
        while True:
            assert self.process.poll() is None, self.log.read_text()
            try:
                link = PayloadLink.connect(str(self.socket), deployment, stage)
                break
            except ConnectionError:
                time.sleep(0.01)
        link.wait_ready(PATIENCE)
        return link

    def put(self, key: tuple[str, str, str, int | None], encoded: codec.Encoded) -> None:
        slot, offset = self.thinker.reserve(encoded.nbytes, PATIENCE)
        encoded.write(self.pool(self.thinker)[offset : offset + encoded.nbytes])
        self.thinker.put(slot, key, False)
        # An answer says that it is there, and not on its way; a slot of that length is none that is kept.
        slot, _ = self.thinker.reserve(1 << 20, PATIENCE)
        self.thinker.give_back(slot)

    def pool(self, link: PayloadLink) -> np.memmap:
        return np.memmap(f"/proc/self/fd/{link.pool_fd}", np.uint8, "r+")

    def page(self) -> list[str]:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics}/metrics") as page:
            return page.read().decode().splitlines()

    def is_counted(self, line: str) -> bool:
        """Whether the metrics have a line, now or in a moment."""
        deadline = time.monotonic() + PATIENCE
        while line not in self.page():
            assert time.monotonic() < deadline, "\n".join(self.page())
            time.sleep(0.05)
        return True


@pytest.fixture(scope="module")
def host(tmp_path_factory) -> Iterator[Host]:
    host = Host(tmp_path_factory.mktemp("mori"))
    yield host
    host.process.kill()
    host.process.wait()
    print(host.log.read_text())


@pytest.fixture(scope="module")
def receiver(host) -> Iterator[MoriStage]:
    with mori_stage(role="receiver", stage_id=1, sender_host="127.0.0.1", sender_zmq_port=host.port) as stage:
        yield stage


@pytest.fixture(scope="module")
def sender() -> Iterator[tuple[MoriStage, int]]:
    (port,) = free_ports(1)
    with mori_stage(role="sender", stage_id=0, zmq_port=port) as stage:
        yield stage, port


def serialized(obj: Any) -> Any:
    return OmniSerializer.deserialize(OmniSerializer.serialize(obj))


def raw_bytes(obj: Any) -> bytes | None:
    """What MoRI's connector moves as it is; None of others."""
    if isinstance(obj, torch.Tensor):
        return obj.contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return obj if isinstance(obj, bytes) and obj else None


@pytest.mark.parametrize("name", OBJECTS)
def test_a_stage_with_moris_connector_gets_what_is_put_here(host, receiver, name):
    obj = OBJECTS[name]
    host.put(("0", "1", f"to-{name}", 0), codec.encode_foreign(obj))
    got = receiver.call("get", "0", "1", f"to-{name}_0_0", None)
    raw = raw_bytes(obj)
    if raw is None:
        assert same(got[0], serialized(obj))
    else:
        assert got == (raw, len(raw))
    # Once, and then it is free.
    assert receiver.call("get", "0", "1", f"to-{name}_0_0", None) is None
    assert host.is_counted("kvferry_payloads 0")


def test_a_raw_payload_needs_no_other_form(host, receiver):
    data = bytes(range(251)) * 31
    host.put(("0", "1", "raw", None), codec.encode(data))
    assert receiver.call("get", "0", "1", "raw", None) == (data, len(data))


def test_what_it_cannot_read_is_for_others(host, receiver):
    key = ("0", "1", "ours", None)
    host.put(key, codec.encode({"a": 1}))
    assert receiver.call("get", "0", "1", "ours", None) is None
    host.talker.want(key)
    arrived, claim, offset, nbytes, _ = host.talker.wait(key, PATIENCE)
    assert codec.decode(host.pool(host.talker)[offset : offset + nbytes]) == {"a": 1}
    host.talker.release(claim)


def test_what_is_not_there_is_not_waited_for(host, receiver):
    start = time.monotonic()
    for _ in range(20):
        assert receiver.call("get", "0", "1", "absent_0_0", None) is None
    # One query that is not answered takes 5 s.
    assert time.monotonic() - start < 100


def test_o19_a_wrong_length_is_refused_and_the_payload_kept(host, receiver):
    host.put(("0", "1", "length", 0), codec.encode_foreign(b"x" * 500))
    told = {"source_host": "127.0.0.1", "source_port": host.port, "is_fast_path": True}
    assert receiver.call("get", "0", "1", "length_0_0", {**told, "data_size": 2}) is None
    assert receiver.call("get", "0", "1", "length_0_0", {**told, "data_size": 500}) == (b"x" * 500, 500)
    assert host.is_counted('kvferry_payload_mori_pulls_total{outcome="length"} 1')


def fetched(host: Host, key: tuple[str, str, str, int | None]) -> Any:
    outcome = host.talker.wait(key, PATIENCE)
    assert outcome[0] == "arrived", outcome
    _, claim, offset, nbytes, _ = outcome
    memory = np.array(host.pool(host.talker)[offset : offset + nbytes])
    host.talker.release(claim)
    raw = codec.decode_raw(memory)
    return codec.decode(memory) if raw is None else raw.tensor.numpy().tobytes()


@pytest.mark.parametrize("name", [name for name in OBJECTS if name != "empty"])
def test_a_stage_here_gets_what_moris_connector_puts(host, sender, name):
    stage, port = sender
    obj, key = OBJECTS[name], ("0", "1", f"from-{name}", 0)
    # It may be asked for before it is there.
    host.talker.fetch(key, "127.0.0.1", port)
    ok, _, _ = stage.call("put", "0", "1", f"from-{name}_0_0", obj)
    assert ok
    got, raw = fetched(host, key), raw_bytes(obj)
    assert got == raw if raw is not None else same(got, serialized(obj))


@pytest.fixture(scope="module")
def own_receiver(sender) -> Iterator[MoriStage]:
    _, port = sender
    with mori_stage(role="receiver", stage_id=1, sender_host="127.0.0.1", sender_zmq_port=port) as stage:
        yield stage


@pytest.mark.parametrize("name", [name for name in OBJECTS if name != "empty"])
def test_both_stages_may_have_moris_connector(sender, own_receiver, name):
    """Over the module `mori` alone."""
    obj, (stage, _) = OBJECTS[name], sender
    ok, _, metadata = stage.call("put", "0", "1", f"own-{name}_0_0", obj)
    assert ok
    got, raw = own_receiver.call("get", "0", "1", f"own-{name}_0_0", metadata), raw_bytes(obj)
    assert same(got[0], serialized(obj)) if raw is None else got[0] == raw
    # Once, and then it is free.
    assert own_receiver.call("get", "0", "1", f"own-{name}_0_0", None) is None


def test_a_receiver_of_its_own_that_is_killed_fails_alone(sender, own_receiver):
    stage, port = sender
    with mori_stage(role="receiver", stage_id=1, sender_host="127.0.0.1", sender_zmq_port=port) as other:
        stage.call("put", "0", "1", "first_0_0", b"a" * 5000)
        assert other.call("get", "0", "1", "first_0_0", None) == (b"a" * 5000, 5000)
    stage.call("put", "0", "1", "second_0_0", b"b" * 5000)
    assert own_receiver.call("get", "0", "1", "second_0_0", None) == (b"b" * 5000, 5000)


def asked(host: Host, body: bytes) -> str:
    """What is answered to a message, as a receiver's socket has it."""
    context = zmq.Context()
    with context, context.socket(zmq.REQ) as asks:
        asks.linger = 0
        asks.rcvtimeo = PATIENCE * 1000
        asks.connect(f"tcp://127.0.0.1:{host.port}")
        asks.send(body)
        return asks.recv().decode()


def pull(key: str, **other: Any) -> bytes:
    """As MoRI's connector asks for a payload of 500 bytes, with a region of 4096 bytes in its memory."""
    engine = ["receiver", "node", "machine", "127.0.0.1", 1, 7]
    memory = ["receiver", 3, -1, "", 1 << 20, 4096, 1, bytes(64), 0, 0, bytes(64), -1, "", 0, 0]
    message = {
        "request_id": f"{key}@0_1",
        "engine_desc_packed": msgpack.packb(engine),
        "mem_desc_packed": msgpack.packb(memory),
        "dst_offset": 0,
        "length": 500,
    }
    return msgpack.packb(message | other)


@pytest.mark.parametrize(
    ("name", "other", "why"),
    [
        ("o18", {"dst_offset": 1 << 40}, "dst_offset 1099511627776 and length 500 are not within the region of 4096 bytes"),
        ("o19", {"length": 501}, "length 501, the payload has 500 bytes"),
        ("o20", {"dst_offset": -1}, "dst_offset"),
        ("o27_no_array", {"mem_desc_packed": b"\x01"}, "mem_desc_packed"),
        ("o27_of_another_build", {"engine_desc_packed": msgpack.packb([5, {}])}, "engine_desc_packed"),
    ],
    ids=lambda value: value if isinstance(value, str) and value.startswith("o") else "",
)
def test_a_pull_that_cannot_be_served_is_told_why(host, receiver, name, other, why):
    """And the payload is there for the next one."""
    host.put(("0", "1", name, 0), codec.encode_foreign(b"x" * 500))
    answer = asked(host, pull(f"{name}_0_0", **other))
    assert answer.startswith("trans_error: ") and why in answer
    assert receiver.call("get", "0", "1", f"{name}_0_0", None) == (b"x" * 500, 500)


def test_o20_a_query_that_is_none_is_not_answered_with_not_ready(host):
    assert asked(host, b"query_info" + msgpack.packb({"request_id": "absent_0_0@0_1"})) == "info_not_found"
    for body in (b"", b"\x91\xa1r", msgpack.packb({"request_id": 5})):
        assert asked(host, b"query_info" + body).startswith("trans_error: ")


def test_who_wants_no_more_is_given_nothing(host, sender):
    stage, port = sender
    key = ("0", "1", "left", 0)
    host.talker.fetch(key, "127.0.0.1", port)
    host.talker.abandon(key)
    stage.call("put", "0", "1", "left_0_0", b"late")
    host.talker.fetch(key, "127.0.0.1", port)
    assert fetched(host, key) == b"late"


def test_a_sender_that_is_not_there_is_an_outcome(host):
    key = ("0", "1", "nobody", 0)
    (port,) = free_ports(1)
    host.talker.fetch(key, "127.0.0.1", port)
    missing, kind, why, former = host.talker.wait(key, PATIENCE)
    assert (missing, kind, former) == ("missing", "given-up", "no")
    assert f"tcp://127.0.0.1:{port} cannot be reached" in why


def test_other_deployments_are_told_that_it_is_not_for_them(host):
    other, key = host.stage("1", "another"), ("0", "1", "r", 0)
    other.fetch(key, "127.0.0.1", 9)
    missing, kind, why, former = other.wait(key, PATIENCE)
    assert (missing, kind, former) == ("missing", "given-up", "no")
    assert f"deployment {DEPLOYMENT}" in why


def connector(host: Host, **extra: Any) -> KvferryOmniConnector:
    at = {"socket": str(host.socket), "host": "127.0.0.1", "zmq_port": host.port, "deployment": DEPLOYMENT}
    return KvferryOmniConnector(at | extra)


@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize("name", OBJECTS)
def test_r17_the_connector_puts_for_such_a_stage(host, receiver, name, told):
    obj, key = OBJECTS[name], f"put-{name}-{told}_0_0"
    with connector(host, stage_id=0, mori_stages=[1]) as here:
        done, _, metadata = here.put("0", "1", key, obj)
        assert done
        got = receiver.call("get", "0", "1", key, metadata if told else None)
    assert same(got[0], serialized(obj) if raw_bytes(obj) is None else raw_bytes(obj))


@pytest.mark.parametrize("name", [name for name in OBJECTS if name not in ("none", "empty")])
def test_r17_the_connector_gets_from_such_a_stage(host, sender, name):
    obj, (stage, port) = OBJECTS[name], sender
    assert stage.call("put", "0", "1", f"get-{name}_0_0", obj)[0]
    with connector(host, stage_id=1, mori_stages=[0], sender_host="127.0.0.1", sender_zmq_port=port) as here:
        got = here.get_with_deadline("0", "1", f"get-{name}_0_0", deadline=time.monotonic() + PATIENCE)
        raw = raw_bytes(obj)
        if raw is None:
            assert same(got[0], serialized(obj))
        else:
            assert got[0].to_bytes() == raw
            got[0].release()
