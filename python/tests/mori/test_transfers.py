"""Bytes between two processes."""

import os
import signal
import threading

import pytest
from conftest import SIZE, Buffer, Peer, engine, finish, pattern
from mori.io import StatusCode
from stops import stop

# Scattered, neighbouring and odd-sized, in no order.
LOCAL = [4096, 0, 70000, 70007, 500000]
REMOTE = [100, 900000, 4096, 4103, 8192]
SIZES = [4096, 100, 7, 13, 300000]


def test_read(session, buffer):
    assert finish(session.batch_read(LOCAL, REMOTE, SIZES, 1)).Succeeded()
    expected = bytearray(pattern(1))
    theirs = pattern(2)
    for local, remote, size in zip(LOCAL, REMOTE, SIZES):
        expected[local : local + size] = theirs[remote : remote + size]
    assert buffer.memory[:] == expected


def test_write(session, buffer, peer):
    status = finish(session.batch_write(LOCAL, REMOTE, SIZES, 1))
    assert status.Succeeded() and status.Code() == StatusCode.SUCCESS and status.Message() == ""
    expected = bytearray(pattern(2))
    mine = pattern(1)
    for local, remote, size in zip(LOCAL, REMOTE, SIZES):
        expected[remote : remote + size] = mine[local : local + size]
    assert peer.bytes(0, SIZE) == expected
    assert buffer.memory[:] == mine


def test_one_range(session, buffer, peer):
    assert finish(session.write(0, 8, 16, 1)).Succeeded()
    assert peer.bytes(8, 24) == pattern(1)[:16]
    assert finish(session.read(64, 1024, 32, 2)).Succeeded()
    assert buffer.memory[64:96] == pattern(2)[1024:1056]


def test_the_path_is_known(session):
    assert session.paths == ("cross-memory", "cross-memory")


def test_the_paths_are_configured(monkeypatch, tmp_path, peer, buffer):
    settings = tmp_path / "fabric.toml"
    monkeypatch.setenv("KVFERRY_FABRIC", str(settings))
    settings.write_text('paths = ["shared-memory", "tcp"]\n')
    strict = engine("strict")
    strict.register_remote_engine(peer.desc)
    with pytest.raises(RuntimeError, match="cross-memory.*slower = true"):
        strict.create_session(buffer.register(strict), peer.memory)
    settings.write_text('paths = ["tcp"]\n')
    mine = engine("mine")
    mine.register_remote_engine(peer.desc)
    session = mine.create_session(buffer.register(mine), peer.memory)
    assert session.paths == ("tcp", "tcp")
    assert finish(session.batch_read(LOCAL, REMOTE, SIZES, 1)).Succeeded()
    assert buffer.memory[500000:800000] == pattern(2)[8192:308192]
    assert finish(session.write(0, 0, 4096, 2)).Succeeded()
    assert peer.bytes(0, 4096) == buffer.memory[:4096]


@pytest.mark.parametrize("at", [SIZE - 7, SIZE, 1 << 62, (1 << 64) - 4])
def test_nothing_outside_of_a_region(session, peer, at):
    for local, remote in [(at, 0), (0, at)]:
        status = finish(session.batch_write([0, local], [0, remote], [8, 8], 1))
        assert status.Failed() and status.Code() == StatusCode.ERR_INVALID_ARGS, status
    assert peer.bytes(0, 8) == pattern(2)[:8]


def test_lists_of_unequal_length(session):
    status = session.batch_read([0], [0, 1], [1, 1], 1)
    assert status.Failed() and "1 local and 2 remote offsets for 2 sizes" in status.Message()
    with pytest.raises(OverflowError):
        session.batch_read([-1], [0], [1], 1)


def test_many_threads(session, buffer, peer):
    def work(nth: int) -> None:
        for turn in range(50):
            at = nth * 4096 + turn * 64
            statuses.append(session.batch_write([at], [at], [64], turn))

    statuses: list = []
    threads = [threading.Thread(target=work, args=[nth]) for nth in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(statuses) == 400
    assert all(finish(status).Succeeded() for status in statuses)
    for nth in range(8):
        at = nth * 4096
        assert peer.bytes(at, at + 3200) == buffer.memory[at : at + 3200]


def test_a_killed_peer_fails_what_is_posted(session, peer):
    peer.stop()
    for post in (session.batch_write, session.batch_read):
        status = finish(post([0], [0], [4096], 1))
        assert status.Failed() and status.Message(), status


def test_a_restarted_peer_is_another_one(session, peer):
    peer.stop()
    again = Peer(peer.desc.key)
    try:
        mine = engine("other")
        memory = Buffer(3)
        mine.register_remote_engine(peer.desc)
        with pytest.raises(RuntimeError, match="cannot open a session with peer"):
            mine.create_session(memory.register(mine), peer.memory)
        mine.register_remote_engine(again.desc)
        fresh = mine.create_session(memory.register(mine), again.memory)
        assert finish(fresh.read(0, 0, 64, 1)).Succeeded()
        assert memory.memory[:64] == pattern(2)[:64]
    finally:
        again.stop()


def test_the_interpreter_runs_while_a_session_opens(peer, buffer):
    # Only this thread can let the peer go on, so it opens only if this thread runs meanwhile.
    mine = engine("me")
    mine.register_remote_engine(peer.desc)
    local = buffer.register(mine)
    opened = []
    thread = threading.Thread(target=lambda: opened.append(mine.create_session(local, peer.memory)))
    stop(peer.child.pid)
    thread.start()
    os.kill(peer.child.pid, signal.SIGCONT)
    thread.join()
    assert len(opened) == 1
