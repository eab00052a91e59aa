"""A second process with an engine and a buffer of its own."""

import ctypes
import hashlib
import json
import mmap
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mori.io import BackendType, EngineDesc, IOEngine, IOEngineConfig, MemoryDesc
from mori.io import MemoryLocationType, RdmaBackendConfig

SIZE = 1 << 20
LIMIT_S = 30


class Buffer:
    """Anonymous memory with known bytes."""

    def __init__(self, seed: int, size: int = SIZE):
        self.memory = mmap.mmap(-1, size)
        self.memory[:] = pattern(seed, size)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.size = size

    def register(self, engine: IOEngine) -> MemoryDesc:
        return engine.register_memory(self.address, self.size, -1, MemoryLocationType.CPU)


def pattern(seed: int, size: int = SIZE) -> bytes:
    """Bytes of which no two blocks are alike."""
    return hashlib.shake_256(str(seed).encode()).digest(size)


def engine(key: str, port: int = 0) -> IOEngine:
    made = IOEngine(key, IOEngineConfig("127.0.0.1", port))
    made.create_backend(BackendType.RDMA, RdmaBackendConfig(1, -1, 1))
    return made


def finish(status):
    """Waits for the end of a transfer as vLLM does: by polling."""
    late = time.monotonic() + LIMIT_S
    while not (status.Succeeded() or status.Failed()):
        assert time.monotonic() < late, f"still {status} after {LIMIT_S} s"
        time.sleep(0.0005)
    return status


class Peer:
    """The other process; see peer.py."""

    def __init__(self, key: str = "peer"):
        command = [sys.executable, str(Path(__file__).with_name("peer.py")), key]
        pipe = subprocess.PIPE
        self.child = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
        hello = json.loads(self.child.stdout.readline())
        self.desc = EngineDesc.unpack(bytes.fromhex(hello["engine"]))
        self.memory = MemoryDesc.unpack(bytes.fromhex(hello["memory"]))

    def bytes(self, start: int, end: int) -> bytes:
        """What is in its buffer now."""
        self.child.stdin.write(f"{start} {end}\n")
        self.child.stdin.flush()
        return bytes.fromhex(self.child.stdout.readline())

    def deregister(self) -> bytes:
        """Deregisters its buffer; tells what is in it then."""
        self.child.stdin.write("deregister\n")
        self.child.stdin.flush()
        return bytes.fromhex(self.child.stdout.readline())

    def stop(self) -> None:
        self.child.kill()
        self.child.wait()
        self.child.stdin.close()
        self.child.stdout.close()


@pytest.fixture
def peer():
    made = Peer()
    yield made
    made.stop()


@pytest.fixture
def buffer():
    return Buffer(1)


@pytest.fixture
def session(peer, buffer):
    """From this process to the peer's buffer."""
    mine = engine("me")
    mine.register_remote_engine(peer.desc)
    return mine.create_session(buffer.register(mine), peer.memory)
