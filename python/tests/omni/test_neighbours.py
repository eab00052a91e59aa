"""What others on a machine or in a pipeline do to a stage, and a stage to them. A name carries the number of the hazard of
vLLM-Omni's own connectors that it is about; docs/testing.md lists all of them."""

import contextlib
import hashlib
import os
import select
import signal
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from kvferry.omni import KvferryOmniConnector, settings
from stages import Stage, drop, get, health, hosts, keep, kept, kill, lost, put, wait_for, want
from stops import stop

# Longer than a test waits for anything.
MINUTE_S = 60

LISTEN = "KVFERRY_HOST_PAYLOAD_LISTEN"
HOSTS = "KVFERRY_HOST_PAYLOAD_HOSTS"
SET = "KVFERRY_HOST_SET"
SECRET = "KVFERRY_SECRET_FILE"

# The state of a TCP socket at which a process listens.
LISTENS = "0A"


def engine(here: Any) -> str | None:
    return here.connector._channels.current().link.engine


def on_machine(pipeline: Any, name: str, stage: int, **more: Any) -> Stage:
    """A stage with a host of its own, which has the environment of this process."""
    return pipeline.stage(stage, socket=str(pipeline.folder / name), **more)


def host_of(pipeline: Any, name: str) -> int:
    (found,) = hosts(pipeline.folder, name)
    return found


def test_o1_a_payload_that_is_read_outlives_its_time(pipeline, monkeypatch):
    """What nobody took is dropped after that time; what is read by somebody is not."""
    monkeypatch.setenv("KVFERRY_HOST_PAYLOAD_HOLD_MS", "100")
    sender, receiver = pipeline.stage(0, put_wait_s=MINUTE_S), pipeline.stage(1)
    receiver(want, "read")
    sender(put, "read", torch.full((10_000,), 1))
    receiver(keep, "read")
    for number in range(4):
        # More than a half of the stage's share: there is room for the next one when the time of this one is over.
        assert sender(put, f"not taken {number}", torch.full((600_000,), number))[0]
    assert receiver(lost, "not taken 0") == "expired"
    assert torch.equal(receiver(kept, "read")[1], torch.full((10_000,), 1))


def left(here: Any, key: str) -> bool:
    """As a receiver whose time is over while the bytes are on their way; False if it got them at once."""
    got = here.connector.get("0", "1", key)
    here.connector.abandon_get(key)
    return got is None


def test_o4_what_lands_late_lands_in_nobody_elses_slot(pipeline, monkeypatch):
    monkeypatch.setenv(LISTEN, "127.0.0.1:0")
    # A host that was left before it began to read is waited for so long.
    monkeypatch.setenv(SET, "protocol.lease_ms=4000")
    first = on_machine(pipeline, "first", 0)
    monkeypatch.setenv(HOSTS, first(engine))
    second = on_machine(pipeline, "second", 1)
    late = []
    for number in range(40):
        first(put, f"late {number}", torch.full((10_000,), -1))
        first(put, f"next {number}", torch.full((10_000,), number))
        late += [number] * second(left, f"late {number}")
        second(keep, f"next {number}")
    for number in range(40):
        assert torch.equal(second(kept, f"next {number}")[1], torch.full((10_000,), number))
    # It is for who asks again.
    for number in late:
        assert torch.equal(second(get, f"late {number}")[1], torch.full((10_000,), -1))


def test_o10_a_machine_that_stands_still_delays_no_other(pipeline, monkeypatch):
    monkeypatch.setenv(LISTEN, "127.0.0.1:0")
    machines = [on_machine(pipeline, name, 0) for name in ("still", "sound")]
    monkeypatch.setenv(HOSTS, ",".join(machine(engine) for machine in machines))
    receiver = on_machine(pipeline, "receiver", 1)
    metadata = []
    for machine in machines:
        metadata.append(machine(put, f"first of {machine.pid}", b"x")[2])
        assert receiver(get, f"first of {machine.pid}", ("0", "1"), metadata[-1]) == (bytes, b"x")
    (still, sound), (of_still, of_sound) = machines, metadata
    for number in range(8):
        still(put, f"of still {number}", bytes(1 << 20))
    host = host_of(pipeline, "still")
    stop(host)
    try:
        # More than the four workers that would all wait for it.
        for number in range(8):
            receiver(polled, f"of still {number}", of_still)
        for number in range(20):
            key = f"of sound {number}"
            sound(put, key, torch.full((100_000,), number))
            assert torch.equal(receiver(get, key, ("0", "1"), of_sound)[1], torch.full((100_000,), number))
        # Nor has any of the others come, or been said to be lost before the limit.
        assert receiver(health)["host"]["wants"] == 8
    finally:
        os.kill(host, signal.SIGCONT)
    for number in range(8):
        assert receiver(get, f"of still {number}", ("0", "1"), of_still) == (bytes, bytes(1 << 20))


def polled(here: Any, key: str, metadata: Any) -> None:
    assert here.connector.get("0", "1", key, metadata) is None


def test_o13_a_port_that_is_taken_is_an_error_soon(pipeline, monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        monkeypatch.setenv(LISTEN, f"127.0.0.1:{taken.getsockname()[1]}")
        with pytest.raises(ConnectionError, match="the one that was started ended at once"):
            pipeline.stage(0)
    # Nothing of it is left.
    monkeypatch.delenv(LISTEN)
    sender, receiver = pipeline.stage(0), pipeline.stage(1)
    sender(put, "k", b"x")
    assert receiver(get, "k") == (bytes, b"x")


def test_o17_payloads_that_stay_do_not_split_the_pool(pipeline):
    """With first fit each would end a hole: nearly all of the pool is free, and none of it long enough."""
    # One stage, so that all of the pool is its share.
    stage = pipeline.stage(0, put_wait_s=0, pool_bytes=96 << 20)
    count = 0
    while stage(put_zeros, f"large {count}", 9 << 20):
        stage(put, f"stays {count}", torch.full((3_000,), count))
        stage(keep, f"stays {count}")
        count += 1
    assert count == 10
    for number in range(count):
        stage(keep, f"large {number}")
        stage(drop, f"large {number}")
    assert stage(put_zeros, "longest", 80 << 20), stage(health)["last_error"]
    for number in range(count):
        assert torch.equal(stage(kept, f"stays {number}")[1], torch.full((3_000,), number))


def put_zeros(here: Any, key: str, nbytes: int) -> bool:
    return here.connector.put("0", "1", key, torch.zeros(nbytes, dtype=torch.uint8))[0]


def test_o28_machines_that_begin_anew_leave_nothing(pipeline, monkeypatch):
    monkeypatch.setenv(LISTEN, "127.0.0.1:0")
    # Sooner than by default it is known that one is gone.
    monkeypatch.setenv(SET, "channel.silent_ms=2000")
    receiver = on_machine(pipeline, "receiver", 1)
    here, counts = host_of(pipeline, "receiver"), []
    for life in range(4):
        sender = on_machine(pipeline, f"life {life}", 0)
        _, _, metadata = sender(put, "k", [life])
        sender(put, f"left {life}", [life])
        assert receiver(get, "k", ("0", "1"), metadata) == [life]
        assert connections(here)
        sender.kill()
        kill(hosts(pipeline.folder, f"life {life}"))
        # Of that life nothing comes, whatever the next one puts.
        assert receiver(lost, f"left {life}", ("0", "1"), metadata) in ("peer-gone", "producer-gone")
        counts.append(wait_for_peers(here))
    assert counts[-1] <= counts[0], counts


def wait_for_peers(host: int) -> int:
    """Descriptors of a host that has no peer any more, which it sees at some time after its death."""
    folder = f"/proc/{host}/fd"
    return wait_for(lambda: not connections(host) and len(os.listdir(folder)))


def connections(process: int) -> list[str]:
    return [state for state in states(process) if state != LISTENS]


def states(process: int) -> list[str]:
    """Of the TCP sockets of a process, as the kernel numbers them."""
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    known = {f"socket:[{line[9]}]": line[3] for line in lines}
    found = []
    for descriptor in Path(f"/proc/{process}/fd").iterdir():
        # It may be closed meanwhile.
        with contextlib.suppress(FileNotFoundError):
            found.append(known.get(os.readlink(descriptor)))
    return [state for state in found if state is not None]


def test_o29_a_host_that_is_slow_to_start_is_waited_for(pipeline):
    """Longer than the second after which MoRI's connector takes it for ready."""
    sender = pipeline.stage(0)
    host = pipeline.host()
    stop(host)
    receiver = pipeline.bare()
    receiver.begin(made, pipeline.extra(1, host="connect"))
    try:
        ready, _, _ = select.select([receiver.pipe.fileno()], [], [], 1.2)
    finally:
        os.kill(host, signal.SIGCONT)
    assert not ready
    assert receiver.result() == "healthy"
    sender(put, "k", b"x")
    assert receiver(get, "k") == (bytes, b"x")


def made(here: Any, extra: dict[str, Any]) -> str:
    here.connector = KvferryOmniConnector(extra)
    return here.connector.health()["status"]


def environments(here: Any, one: dict[str, Any], other: dict[str, Any]) -> tuple[dict[str, str], dict[str, str]]:
    before = dict(os.environ)
    connectors = [KvferryOmniConnector(one), KvferryOmniConnector(other)]
    after = dict(os.environ)
    for connector in connectors:
        connector.close()
    return before, after


def test_o31_a_connector_changes_nothing_for_the_next_one(pipeline, monkeypatch):
    """Not even where its configuration has what MoRI's would write into the environment."""
    monkeypatch.delenv("MORI_RDMA_DEVICES", raising=False)
    one = pipeline.extra(0, device_name="mlx5_0", put_wait_s=0)
    other = pipeline.extra(1, device_name="", put_wait_s=7)
    before, after = pipeline.bare()(environments, one, other)
    assert before == after and "MORI_RDMA_DEVICES" not in after
    settings_of = [settings.read(extra).put_wait_s for extra in (one, other)]
    assert settings_of == [0, 7]


def test_o32_stages_and_ranks_share_no_port(pipeline):
    """Each has the port of the configuration, from which MoRI's derive theirs by stage and rank; none is listened at."""
    stages = [pipeline.stage(stage, zmq_port=50_051) for stage in range(6)]
    ranks = [pipeline.stage(4, zmq_port=50_051, role="sender") for _ in range(7)]
    for stage in range(5):
        key, pair = f"r_{stage}_0", (str(stage), str(stage + 1))
        stages[stage](put, key, [stage], pair)
        assert stages[stage + 1](get, key, pair) == [stage]
    for rank, sender in enumerate(ranks):
        key = f"r_4_0_{rank}_{rank}"
        sender(put, key, [rank], ("4", "5"))
        assert stages[5](get, key, ("4", "5")) == [rank]
    for process in (pipeline.host(), *(stage.pid for stage in pipeline.stages)):
        assert LISTENS not in states(process)
    with socket.socket() as server:
        server.listen()
        assert LISTENS in states(os.getpid()), "it would be seen"


def secret(folder: Path, name: str) -> str:
    path = folder / name
    path.write_text(hashlib.sha256(name.encode()).hexdigest())
    path.chmod(0o400)
    return str(path)


def test_o34_who_does_not_know_the_secret_gets_nothing(pipeline, monkeypatch):
    monkeypatch.setenv(LISTEN, "127.0.0.1:0")
    monkeypatch.setenv(SECRET, secret(pipeline.folder, "a"))
    sender = on_machine(pipeline, "sender", 0)
    _, _, metadata = sender(put, "k", [1])
    monkeypatch.setenv(SECRET, secret(pipeline.folder, "b"))
    stranger = on_machine(pipeline, "stranger", 1)
    assert stranger(lost, "k", ("0", "1"), metadata) == "peer-gone"
    monkeypatch.setenv(SECRET, str(pipeline.folder / "a"))
    receiver = on_machine(pipeline, "receiver", 1)
    assert receiver(get, "k", ("0", "1"), metadata) == [1]


def test_o34_the_host_s_socket_is_its_user_s_alone(pipeline):
    pipeline.stage(0)
    assert pipeline.socket.stat().st_mode & 0o777 == 0o600
    assert pipeline.socket.stat().st_uid == os.getuid()
