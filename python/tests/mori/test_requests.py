"""Transfers of the engine itself, waiting for them, and memory that is registered no more."""

import ctypes
import gc
import mmap
import signal
import threading
import types
import weakref

import pytest
from conftest import LIMIT_S, SIZE, Buffer, Peer, engine, finish, pattern
from mori.cpp import TransferStatus
from mori.io import MemoryLocationType, StatusCode

PATIENCE_MS = LIMIT_S * 1000


class Pair:
    """An engine here and what it has registered of this process and of a peer."""

    def __init__(self, peer: Peer, buffer: Buffer):
        self.engine, self.peer, self.buffer = engine("me"), peer, buffer
        self.local = buffer.register(self.engine)
        self.engine.register_remote_engine(peer.desc)

    def write(self, at: int = 0, size: int = 64) -> TransferStatus:
        (status,) = self.engine.batch_write([self.local], [[at]], [self.peer.memory], [[at]], [[size]], [7])
        return status


@pytest.fixture
def pair(peer, buffer):
    return Pair(peer, buffer)


def test_one_call_for_several_regions(pair):
    mine, second = pair.engine, Peer("second")
    try:
        mine.register_remote_engine(second.desc)
        statuses = mine.batch_write(
            [pair.local, pair.local, pair.local],
            [[0, 4096], [8192], []],
            [pair.peer.memory, second.memory, second.memory],
            [[100, 8192], [0], []],
            [[50, 4096], [64], []],
            [mine.allocate_transfer_uid() for _ in range(3)],
        )
        assert mine.wait_all(statuses, timeout_ms=PATIENCE_MS) is StatusCode.SUCCESS
        assert all(status.Succeeded() and status.Code() is StatusCode.SUCCESS for status in statuses)
        ours = pattern(1)
        assert pair.peer.bytes(100, 150) == ours[:50]
        assert pair.peer.bytes(8192, 12288) == ours[4096:8192]
        assert second.bytes(0, 65) == ours[8192:8256] + pattern(2)[64:65]
    finally:
        second.stop()


def test_one_range_each_way(pair):
    mine = pair.engine
    assert finish(mine.write(pair.local, 0, pair.peer.memory, 8, 16, 1)).Succeeded()
    assert pair.peer.bytes(8, 24) == pattern(1)[:16]
    assert finish(mine.read(pair.local, 64, pair.peer.memory, 1024, 32, 2)).Succeeded()
    assert pair.buffer.memory[64:96] == pattern(2)[1024:1056]


def test_calls_that_are_wrong(pair):
    mine, there = pair.engine, pair.peer.memory
    with pytest.raises(ValueError, match="1 local regions, 1 lists of local offsets, 2 remote regions"):
        mine.batch_write([pair.local], [[0]], [there, there], [[0]], [[8]], [1])
    (ragged,) = mine.batch_write([pair.local], [[0, 8]], [there], [[0]], [[8]], [1])
    assert ragged.Code() is StatusCode.ERR_INVALID_ARGS
    stranger = engine("stranger")
    foreign = Buffer(3).register(stranger)
    good, bad = mine.batch_write([pair.local] * 2, [[0]] * 2, [there, foreign], [[0]] * 2, [[8]] * 2, [1, 2])
    assert finish(good).Succeeded()
    assert bad.Code() is StatusCode.ERR_BAD_STATE and "call register_remote_engine first" in bad.Message()
    assert mine.wait_all([good, bad]) is StatusCode.ERR_BAD_STATE


def test_a_peer_that_cannot_be_reached_is_an_error_before_anything_is_posted(pair):
    gone = Peer("gone")
    gone.stop()
    mine = pair.engine
    mine.register_remote_engine(gone.desc)
    there = [pair.peer.memory, gone.memory]
    with pytest.raises(RuntimeError, match="cannot open a session with gone"):
        mine.batch_write([pair.local] * 2, [[0]] * 2, there, [[0]] * 2, [[8]] * 2, [1, 2])
    assert pair.peer.bytes(0, 8) == pattern(2)[:8]


def test_a_killed_peer_fails_and_its_successor_is_reached(pair):
    assert finish(pair.write()).Succeeded()
    key = pair.peer.desc.key
    pair.peer.stop()
    try:
        assert finish(pair.write()).Failed()
    except RuntimeError as error:
        # Its end was seen already.
        assert "cannot open a session" in str(error)
    pair.peer = Peer(key)
    try:
        pair.engine.register_remote_engine(pair.peer.desc)
        assert finish(pair.write()).Succeeded()
        assert pair.peer.bytes(0, 64) == pattern(1)[:64]
    finally:
        pair.peer.stop()


def test_a_peer_can_be_forgotten(pair):
    assert finish(pair.write()).Succeeded()
    pair.engine.deregister_remote_engine(pair.peer.desc)
    assert "call register_remote_engine first" in pair.write().Message()
    with pytest.raises(ValueError, match="the engine peer is not registered here"):
        pair.engine.deregister_remote_engine(pair.peer.desc)
    pair.engine.register_remote_engine(pair.peer.desc)
    assert finish(pair.write()).Succeeded()


def test_a_status_of_no_transfer():
    status = TransferStatus()
    assert status.Init() and not (status.InProgress() or status.Succeeded() or status.Failed())
    status.Wait()
    assert status.WaitFor(PATIENCE_MS) is StatusCode.INIT


@pytest.fixture
def endless(monkeypatch, tmp_path, peer, buffer):
    """The first transfer of an engine never ends."""
    path = tmp_path / "faults.toml"
    path.write_text('[[fault]]\nkind = "fabric.completion_lost"\non = { event = "op.posted" }\n')
    monkeypatch.setenv("KVFERRY_FAULTS", str(path))
    made = Pair(peer, buffer)
    return made, made.write()


def test_waiting_has_a_limit(endless):
    pair, status = endless
    assert status.InProgress() and status.Code() is StatusCode.IN_PROGRESS
    assert status.WaitFor(0) is StatusCode.IN_PROGRESS and status.WaitFor(1) is StatusCode.IN_PROGRESS
    done = finish(pair.write())
    wait_all = pair.engine.wait_all
    for timeout_ms in (0, 1):
        assert wait_all([status, done], timeout_ms=timeout_ms) is StatusCode.IN_PROGRESS
    bad = pair.write(at=SIZE)
    assert wait_all([status, bad, None], 0) is StatusCode.ERR_INVALID_ARGS
    assert wait_all([], 0) is StatusCode.SUCCESS


def test_a_signal_ends_waiting(endless):
    pair, status = endless

    def interrupt(*_):
        raise InterruptedError("the alarm")

    for wait in (status.Wait, lambda: pair.engine.wait_all([status])):
        previous = signal.signal(signal.SIGALRM, interrupt)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.01)
            with pytest.raises(InterruptedError, match="the alarm"):
                wait()
        finally:
            signal.signal(signal.SIGALRM, previous)


def test_waiting_leaves_the_interpreter_to_others(endless):
    pair, status = endless
    waits = threading.Thread(target=status.WaitFor, args=[PATIENCE_MS], daemon=True)
    waits.start()
    assert finish(pair.write()).Succeeded()
    # Ends what it waits for.
    pair.engine.deregister_memory(pair.local)
    assert status.InProgress(), "its end is lost"
    del pair.engine
    gc.collect()


def test_nothing_lands_in_deregistered_memory(pair):
    """Under fire; what was under way fails at who posted it."""
    failed, turns = threading.Event(), []

    def fire():
        mine = pair.buffer.memory
        for turn in range(1 << 30):
            mine[:4] = turn.to_bytes(4, "little")
            try:
                statuses = [pair.write(at, 8192) for at in range(0, 1 << 17, 8192)]
            except RuntimeError:
                # The session ended, and none can be opened any more.
                break
            if pair.engine.wait_all(statuses, PATIENCE_MS) is not StatusCode.SUCCESS:
                break
            turns.append(turn)
        failed.set()

    thread = threading.Thread(target=fire, daemon=True)
    thread.start()
    while not turns:
        assert thread.is_alive()
    before = pair.peer.deregister()
    assert failed.wait(LIMIT_S)
    with pytest.raises(RuntimeError, match="cannot open a session"):
        # The first one may only learn of it.
        for _ in range(3):
            assert finish(pair.write()).Failed()
    assert pair.peer.bytes(0, SIZE) == before


def test_own_transfers_end_with_their_memory(pair):
    session = pair.engine.create_session(pair.local, pair.peer.memory)
    pair.engine.deregister_memory(pair.local)
    status = session.write(0, 0, 8, 1)
    assert status.Code() is StatusCode.ERR_BAD_STATE and "its memory was deregistered" in status.Message()
    assert "region 1 of me is not registered here" in pair.write().Message()
    with pytest.raises(ValueError, match="region 1 of me is not registered here"):
        pair.engine.deregister_memory(pair.local)
    again = pair.buffer.register(pair.engine)
    assert again != pair.local
    pair.local = again
    assert finish(pair.write()).Succeeded()


def test_a_tensor_is_kept_until_it_is_deregistered(buffer):
    class Tensor(types.SimpleNamespace):
        pass

    device = types.SimpleNamespace(type="cpu")
    tensor = Tensor(
        device=device, nbytes=buffer.size, is_contiguous=lambda: True, data_ptr=lambda: buffer.address
    )
    kept, mine = weakref.ref(tensor), engine("me")
    desc = mine.register_torch_tensor(tensor)
    del tensor
    assert kept() is not None
    mine.deregister_memory(desc)
    assert kept() is None


def test_what_is_said_to_be_a_gpus_is_looked_at(pair):
    """SGLang says it of all KV."""
    desc = pair.engine.register_memory(pair.buffer.address, SIZE, 0, MemoryLocationType.GPU)
    pair.local = desc
    assert finish(pair.write()).Succeeded()
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    # As the runtime of a GPU has its addresses in this process.
    reserved = libc.mmap(None, ctypes.c_size_t(SIZE), 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    said = f"{SIZE} B at {reserved:#x} of a GPU: {reserved:#x} is mapped ---p.*run the server on the CPU"
    with pytest.raises(ValueError, match=said):
        pair.engine.register_memory(reserved, SIZE, 3, MemoryLocationType.GPU)
