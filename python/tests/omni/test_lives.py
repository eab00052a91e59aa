"""Processes and hosts that end, also in the middle of something."""

import gc
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from typing import Any

import pytest
import torch
from kvferry._native import PayloadLink
from kvferry.omni import KvferryOmniConnector, PayloadLost
from kvferry.omni.keys import parsed
from stages import Stage, close, drop, get, health, hosts, keep, kept, lost, poll, put, put_chunk, wait_for, want
from stops import stop

# A stage whose host is to be there, and a host that takes long, are not looked at for longer.
MINUTE_S = 60


def started_together(here: Any, extra: dict[str, Any]) -> int:
    here.connector = KvferryOmniConnector(extra)
    return here.connector._channels.current().link.incarnation


def test_all_stages_find_one_host(pipeline):
    stages = [pipeline.bare() for _ in range(6)]
    for number, stage in enumerate(stages):
        stage.begin(started_together, pipeline.extra(number % 3))
    assert len({stage.result() for stage in stages}) == 1
    # Those that came second have ended.
    wait_for(lambda: len(hosts(pipeline.folder)) == 1)


def test_a_host_that_nobody_needs_ends(pipeline):
    """After ten seconds. It is no child of who started it."""
    stage = pipeline.stage(0)
    host = pipeline.host()
    stage.kill()
    wait_for(lambda: not os.path.exists(f"/proc/{host}"))


@pytest.mark.parametrize("where", ["nowhere", "folder", "long"])
def test_r12_o13_a_host_that_cannot_be_reached_is_an_error_soon(pipeline, where):
    if where == "folder":
        pipeline.socket.mkdir()
    socket = pipeline.socket / ("x" * 108) if where == "long" else pipeline.socket
    begun = time.monotonic()
    with pytest.raises((OSError, ValueError)) as raised:
        Stage(pipeline.extra(0, socket=str(socket), host="connect" if where == "nowhere" else "spawn"))
    assert time.monotonic() - begun < MINUTE_S / 2
    assert str(socket) in str(raised.value)


def test_r12_a_host_that_does_not_start_is_an_error_soon(pipeline):
    begun = time.monotonic()
    with pytest.raises(ConnectionError, match="the one that was started ended at once"):
        Stage(pipeline.extra(0, pool_bytes=1 << 47))
    assert time.monotonic() - begun < MINUTE_S / 2


def not_started(here: Any, extra: dict[str, Any], files: int) -> str:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(2048, most), most))
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(files)]
    with pytest.raises((ConnectionError, ValueError)) as raised:
        KvferryOmniConnector(extra)
    for file in opened:
        os.close(file)
    return str(raised.value)


def test_a_process_with_more_files_than_select_takes_hears_that_its_host_ended(pipeline):
    said = pipeline.bare()(not_started, pipeline.extra(0, pool_bytes=1 << 47), 1024)
    assert "the one that was started ended at once" in said


def half_built(here: Any) -> list[Any]:
    unraisable = []
    sys.unraisablehook = unraisable.append
    for extra in ({"pool_byte": 1}, {"host": "connect", "socket": "/nowhere/s"}, {"deployment": 3}):
        with pytest.raises((OSError, ValueError)):
            KvferryOmniConnector({"socket": "/nowhere/s", "host": "connect"} | extra)
    bare = KvferryOmniConnector.__new__(KvferryOmniConnector)
    bare.close()
    del bare
    gc.collect()
    return [str(what.exc_value) for what in unraisable]


def test_r1_a_half_built_one_is_closed_without_a_word(pipeline):
    assert pipeline.bare()(half_built) == []


def waiting_and_closed(here: Any) -> float:
    """A thread waits for what does not come, and has a deadline in a minute."""
    waits = threading.Thread(
        target=lambda: here.connector.get_with_deadline("0", "1", "absent", deadline=time.monotonic() + MINUTE_S),
        daemon=True,
    )
    waits.start()
    wait_for(lambda: here.connector._wants)
    return close(here)


@pytest.mark.parametrize("trouble", ["peer dead", "host stopped", "host dead", "payload is read", "a thread waits"])
def test_r12_o11_o12_close_does_not_wait(pipeline, trouble):
    sender, receiver = pipeline.stage(0), pipeline.stage(1)
    sender(put, "k", b"x")
    receiver(keep, "k")
    receiver(poll, "absent")
    host = pipeline.host()
    if trouble == "peer dead":
        sender.kill()
    elif trouble == "host stopped":
        stop(host)
    elif trouble == "host dead":
        pipeline.lose_host()
    elif trouble == "payload is read":
        receiver(drop, "k")
        sender(put, "k", b"x")
        receiver(keep, "k")
    assert receiver(waiting_and_closed if trouble == "a thread waits" else close) < 5
    assert receiver(close) < 5
    if trouble == "host stopped":
        os.kill(host, signal.SIGCONT)


def test_r6_what_is_read_outlives_the_connector(pipeline):
    sender, receiver = pipeline.stage(0, put_wait_s=0, pool_bytes=20 << 20), pipeline.stage(1, pool_bytes=20 << 20)
    half = torch.full((9 << 20,), 1, dtype=torch.uint8)
    sender(put, "k", {"a": half})
    receiver(keep, "k")
    receiver(close)
    assert not sender(put, "other", {"a": half + 1})[0], "there is no room beside it"
    assert torch.equal(receiver(kept, "k")["a"], half)
    # With it the connection ends, and the slot is free.
    receiver(drop, "k")
    patient = pipeline.stage(0, put_wait_s=MINUTE_S)
    assert patient(put, "other", {"a": half + 1})[0]


EXIT = """
import sys
from kvferry.omni import KvferryOmniConnector
connector = KvferryOmniConnector({"stage_id": 1, "socket": sys.argv[1], "deployment": "tests", "host": "connect"})
kept = None
while kept is None:
    kept = connector.get("0", "1", "k")
"""


def test_o35_an_interpreter_that_exits_is_no_trouble(pipeline):
    sender = pipeline.stage(0)
    sender(put, "k", {"a": torch.ones(3)})
    done = subprocess.run(
        [sys.executable, "-c", EXIT, str(pipeline.socket)], stderr=subprocess.PIPE, text=True, check=False
    )
    assert done.returncode == 0
    assert "Exception ignored" not in done.stderr and "Traceback" not in done.stderr
    wait_for(lambda: sender(put, "all", torch.empty(15 << 20, dtype=torch.uint8))[0])


def untaken(here: Any, key: str) -> bytes:
    """It has heard that it is there, and no more."""
    channel = here.connector._channels.current()
    channel.link.want(parsed("0", "1", key))
    _, _, offset, nbytes, _ = channel.link.wait(parsed("0", "1", key), MINUTE_S)
    return channel.pool[offset : offset + nbytes].tobytes()


def test_r7_o5_what_a_receiver_did_not_take_is_there_for_the_next(pipeline):
    sender, first, second, third = pipeline.stage(0), pipeline.stage(1), pipeline.stage(1), pipeline.stage(1)
    sender(put, "k", torch.arange(5))
    there = first(untaken, "k")
    first.kill()
    second(keep, "k")
    assert second(kept, "k")[1].numpy().tobytes() in there
    # It has had it, whatever becomes of it.
    second.kill()
    assert third(poll, "k") is None and third(poll, "k") is None


def test_a_producer_that_dies_is_an_outcome(pipeline):
    sender, receiver = pipeline.stage(0), pipeline.stage(1)
    another = pipeline.stage(0)
    sender(put_chunk, "r", 0, [0])
    sender(put_chunk, "r", 1, [1])
    assert receiver(get, "r_0_0") == [0]
    sender.kill()
    # What it put stays; what it did not does not come, though there is another process of its stage.
    assert receiver(get, "r_0_1") == [1]
    assert receiver(lost, "r_0_2") == "producer-gone"
    receiver(want, "kv")
    # With the last process of a stage goes all that it might have put.
    another.kill()
    assert receiver(lost, "kv") == "producer-gone"


def test_r2_metadata_names_who_is_to_put(pipeline):
    sender, another, receiver = pipeline.stage(0), pipeline.stage(0), pipeline.stage(1)
    _, _, metadata = sender(put, "k", b"x")
    assert receiver(get, "k", ("0", "1"), metadata) == (bytes, b"x")
    sender.kill()
    assert receiver(lost, "of the same process", ("0", "1"), metadata) == "producer-gone"
    assert another(health)["status"] == "healthy"


def timed(here: Any, key: str) -> float:
    begun = time.monotonic()
    with pytest.raises(PayloadLost):
        while True:
            here.connector.get("0", "1", key)
    times = []
    for _ in range(100):
        at = time.monotonic()
        here.connector.get("0", "1", key)
        times.append(time.monotonic() - at)
    assert sorted(times)[50] < 0.001
    return time.monotonic() - begun


def test_o14_a_dead_sender_delays_nobody(pipeline):
    sender, receiver = pipeline.stage(0), pipeline.stage(1)
    sender(put_chunk, "r", 0, [0])
    sender.kill()
    assert receiver(timed, "r_0_1") < MINUTE_S / 2


def test_o28_a_lost_host_is_said_at_once_and_replaced(pipeline):
    sender, receiver = pipeline.stage(0), pipeline.stage(1)
    sender(put_chunk, "r", 0, [0])
    sender(put_chunk, "q", 0, [0])
    assert receiver(get, "r_0_0") == [0]
    assert receiver(poll, "r_0_1") is None
    _, _, metadata = sender(put, "m", b"x")
    pipeline.lose_host()
    # Who waited for something is told.
    assert receiver(lost, "r_0_1") == "host-gone"
    assert sender(put_chunk, "r", 1, [1]) == (False, 0, None)
    assert sender(health)["outcomes"]["peer_down"] >= 1
    # Each stage finds the next one; the first that looks starts it.
    wait_for(lambda: sender(health)["status"] == receiver(health)["status"] == "healthy")
    # Who did not wait then is told that nothing comes any more of what was in the lost host.
    assert receiver(lost, "q_0_0") == "given-up"
    assert receiver(lost, "m", ("0", "1"), metadata) == "host-gone"
    assert sender(put_chunk, "q", 1, [1]) == (False, 0, None)
    for chunk in range(3):
        assert sender(put_chunk, "next", chunk, [chunk])[0]
        assert receiver(get, f"next_0_{chunk}") == [chunk]


def test_r11_health_sees_by_itself_that_the_host_is_gone(pipeline):
    stage = pipeline.stage(0)
    pipeline.lose_host()
    found = wait_for(lambda: (found := stage(health))["status"] == "unhealthy" and found)
    assert "host is gone" in found["error"]


def test_what_was_got_outlives_the_host(pipeline):
    sender, receiver = pipeline.stage(0), pipeline.stage(1)
    sender(put, "k", {"a": torch.arange(1000)})
    receiver(keep, "k")
    pipeline.lose_host()
    assert torch.equal(receiver(kept, "k")["a"], torch.arange(1000))
    wait_for(lambda: receiver(health)["status"] == "healthy")
    assert torch.equal(receiver(kept, "k")["a"], torch.arange(1000))
    receiver(drop, "k")


def test_a_host_that_stands_still_takes_nothing_away(pipeline):
    """It may go on: what is read has not become free for others."""
    sender, receiver = pipeline.stage(0, put_wait_s=0), pipeline.stage(1)
    sender(put, "k", {"a": torch.arange(1000)})
    receiver(keep, "k")
    host = pipeline.host()
    stop(host)
    assert sender(put, "r_0_0", torch.zeros(1 << 16)) == (False, 0, None)
    assert sender(health)["failures"] == {"host-silent": 1}
    os.kill(host, signal.SIGCONT)
    assert receiver(lost, "r_0_0") == "given-up"
    for number in range(5):
        assert sender(put, f"k{number}", torch.zeros(1 << 16))[0]
    assert torch.equal(receiver(kept, "k")["a"], torch.arange(1000))
    assert receiver(get, "k4")[1].shape == (1 << 16,)


def forked(here: Any) -> str:
    kept = wait_for(lambda: here.connector.get("0", "1", "k"))
    reader, writer = os.pipe()
    if os.fork() == 0:
        try:
            here.connector.put("1", "2", "of a fork", b"x")
            os.write(writer, b"it was put")
        except RuntimeError as error:
            os.write(writer, str(error).encode())
        here.connector.close()
        del here.connector, kept
        gc.collect()
        os._exit(0)
    os.close(writer)
    os.wait()
    with os.fdopen(reader) as told:
        said = told.read()
    assert here.connector.put("1", "2", "of the parent", kept[0])[0]
    return said


def test_a_fork_does_not_share_a_connection(pipeline):
    sender, middle, last = (pipeline.stage(stage) for stage in (0, 1, 2))
    sender(put, "k", {"a": torch.arange(5)})
    assert f"was made by process {middle.pid}, of which this one is a fork" in middle(forked)
    assert torch.equal(last(get, "of the parent", ("1", "2"))["a"], torch.arange(5))
    assert last(poll, "of a fork", ("1", "2")) is None


def let_go_in_a_fork(here: Any, extra: dict[str, Any]) -> bool:
    link = PayloadLink.connect(extra["socket"], "tests", "1")
    link.wait_ready(MINUTE_S)
    if os.fork() == 0:
        del link
        gc.collect()
        os._exit(0)
    os.wait()
    slot, _ = link.reserve(100_000, MINUTE_S)
    link.give_back(slot)
    return slot is not None


def test_what_a_fork_lets_go_of_stays_open(pipeline):
    pipeline.stage(0)
    assert pipeline.bare()(let_go_in_a_fork, pipeline.extra(1))


def many(here: Any, extra: dict[str, Any]) -> tuple[int, int]:
    """Connectors come and go: threads and descriptors after the first ten, and after all."""
    counts = []
    for number in range(60):
        connector = KvferryOmniConnector(extra)
        connector.put("0", "1", "k", b"x")
        assert wait_for(partial(connector.get, "0", "1", "k"))
        if number % 2:
            connector.close()
        del connector
        if number in (10, 59):
            gc.collect()
            wait_for(lambda: sum(thread.name.endswith("(_watch)") for thread in threading.enumerate()) == 0)
            counts.append(len(os.listdir("/proc/self/fd")))
    return counts[0], counts[1]


def test_a_connector_that_is_gone_leaves_nothing(pipeline):
    pipeline.stage(0)
    before, after = pipeline.bare()(many, pipeline.extra(0))
    assert after <= before
