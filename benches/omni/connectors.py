"""The connectors of vLLM-Omni 0.30.0 side by side, each between two processes on this machine, in host memory:

    PYTHONPATH=$(python -m kvferry.dropin) python benches/omni/connectors.py [--connectors mori,shm] [--sizes 3305,...]

in the environment of `./test --omni` (python/tests/omni/requirements.txt) with the package kvferry. Mooncake takes part
where mooncake-transfer-engine-non-cuda==0.3.13.post1 is installed (PyPI; it needs libibverbs). `mori` is vLLM-Omni's MoRI
connector over kvferry's stand-in for MoRI, `kvferry` the one that this package has, and `floor` none: a payload is copied
into memory that both processes have, and read there, without a key, a check or anybody between. No connector for two
processes can do less. Prints the p50 of put, get and both (from put entered to get returned, with the metadata in between
over a pipe) in microseconds: the median of the rounds, which the connectors take in turns. The bytes of the first payload of
each round are compared. `copy` is one copy of a payload's bytes, in one process, in the same rounds; and of each connector
the time of a `get` of what is not there is printed. The load average is printed before and after, as other work counts.
"""

import argparse
import contextlib
import ctypes
import gc
import logging
import mmap
import multiprocessing
import os
import pickle
import socket
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("GLOG_minloglevel", "3")

# Bytes of a payload, and how often it is sent in a round.
SIZES = {3_305: 200, 65_536: 200, 1_611_713: 40, 16_777_216: 8, 134_217_728: 3}
KINDS = ("bytes", "tensor", "obj")
POOL = 512 << 20


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def shm(role: str, port: int) -> Any:
    from vllm_omni.distributed.omni_connectors import SharedMemoryConnector

    return SharedMemoryConnector({"stage_id": int(role == "receiver")})


def over_zmq(role: str, port: int) -> dict[str, Any]:
    """What the transfer engines' connectors are configured with."""
    peer = {"zmq_port": port} if role == "sender" else {"sender_host": "127.0.0.1", "sender_zmq_port": port}
    return {"host": "127.0.0.1", "role": role, "memory_pool_size": POOL, "memory_pool_device": "cpu"} | peer


def mooncake(role: str, port: int) -> Any:
    from vllm_omni.distributed.omni_connectors import MooncakeTransferEngineConnector

    return MooncakeTransferEngineConnector(over_zmq(role, port) | {"protocol": "tcp"})


def mori(role: str, port: int) -> Any:
    from vllm_omni.distributed.omni_connectors import MoriTransferEngineConnector

    return MoriTransferEngineConnector(over_zmq(role, port))


def kvferry(role: str, port: int) -> Any:
    from kvferry.omni import KvferryOmniConnector

    # The port is this pair's, and so is the host.
    own = {"socket": f"{tempfile.gettempdir()}/kvferry-bench-{port}", "deployment": "bench", "pool_bytes": POOL}
    return KvferryOmniConnector(own | {"stage_id": int(role == "receiver")})


class Floor:
    """What is left of a connector if nothing may go wrong: one copy into memory that is mapped here and there, always to the
    same place, and views of it. The metadata says which bytes are whose."""

    # Made by the main process, which both others are forked from.
    memory = mmap.mmap(-1, POOL)

    def __init__(self):
        import torch

        self.pool = torch.frombuffer(self.memory, dtype=torch.uint8)

    def put(self, _from: str, _to: str, _key: str, data: Any) -> tuple[bool, int, Any]:
        states = data["hidden_states"] if isinstance(data, dict) else None
        parts, at, ends = [data] if states is None else [states["output"], states["layers"][0]], 0, []
        for part in parts:
            is_bytes = isinstance(part, bytes)
            size = len(part) if is_bytes else part.nbytes
            ctypes.memmove(self.pool.data_ptr() + at, part if is_bytes else part.data_ptr(), size)
            at += size
            ends.append(at)
        # Pickled here: a pipe of multiprocessing would send the descriptor of a tensor's memory.
        return True, at, (ends, None if states is None else pickle.dumps({**data, "hidden_states": None}))

    def get(self, _from: str, _to: str, _key: str, metadata: Any = None) -> tuple[Any, int] | None:
        if metadata is None:
            return None
        ends, rest = metadata
        if rest is None:
            return self.pool[: ends[0]], ends[0]
        states = {"output": self.pool[: ends[0]], "layers": {0: self.pool[ends[0] : ends[1]]}}
        return {**pickle.loads(rest), "hidden_states": states}, ends[1]


def floor(role: str, port: int) -> Any:
    return Floor()


CONNECTORS = {"shm": shm, "mooncake": mooncake, "mori": mori, "kvferry": kvferry, "floor": floor}

# Polls of what is not there in a round.
ABSENT = 500


def payload(kind: str, size: int) -> Any:
    import torch

    data = torch.arange(size, dtype=torch.int64).mul_(0x9E3779B1).bitwise_right_shift_(7).to(torch.uint8)
    if kind == "bytes":
        return data.numpy().tobytes()
    if kind == "tensor":
        return data
    half = size // 2
    meta = {"finished": torch.tensor(False), "left_context_size": 25}
    return {"hidden_states": {"output": data[:half], "layers": {0: data[half:]}}, "meta": meta, "request_id": "r"}


def as_bytes(kind: str, obj: Any) -> bytes:
    """What is in a payload that was received; a pool's buffer has a tensor."""
    if kind == "obj":
        states = obj["hidden_states"]
        return states["output"].numpy().tobytes() + states["layers"][0].numpy().tobytes()
    obj = getattr(obj, "tensor", obj)
    return obj if isinstance(obj, bytes) else obj.numpy().tobytes()


def sender(name: str, port: int, pipe: Any) -> None:
    connector = CONNECTORS[name]("sender", port)
    pipe.send("ready")
    count = 0
    while (work := pipe.recv()) is not None:
        kind, size, repeats = work
        data, times = payload(kind, size), []
        gc.collect()
        for _ in range(repeats):
            count += 1
            key = f"bench_{os.getpid()}_{count}"
            begun = time.perf_counter()
            done, _, metadata = connector.put("0", "1", key, data)
            ended = time.perf_counter()
            if not done:
                raise RuntimeError(f"{name} did not take {size} bytes")
            pipe.send((key, metadata))
            returned, in_get = pipe.recv()
            times.append((ended - begun, in_get, returned - begun))
            if hasattr(connector, "reap_consumed"):
                connector.reap_consumed()
        pipe.send(None)
        pipe.send([statistics.median(each) * 1e6 for each in zip(*times, strict=True)])
    os._exit(0)


def receiver(name: str, port: int, pipe: Any) -> None:
    connector = CONNECTORS[name]("receiver", port)
    pipe.send("ready")
    while (work := pipe.recv()) is not None:
        kind, size, repeats = work
        if kind == "absent":
            pipe.send([polled(connector, repeats)])
            continue
        expected, first = as_bytes(kind, payload(kind, size)), True
        gc.collect()
        while (told := pipe.recv()) is not None:
            key, metadata = told
            begun = time.perf_counter()
            got = connector.get("0", "1", key, metadata)
            # Where metadata does not say all.
            while got is None and time.perf_counter() < begun + 60:
                got = connector.get("0", "1", key, metadata)
            ended = time.perf_counter()
            if got is None or first and as_bytes(kind, got[0]) != expected:
                raise RuntimeError(f"{name} lost or changed a payload of {size} bytes")
            first = False
            if hasattr(got[0], "release"):
                got[0].release()
            del got
            pipe.send((ended, ended - begun))
    os._exit(0)


def polled(connector: Any, repeats: int) -> float:
    """Microseconds of a `get` of what is not there; not of the first one."""
    times = []
    for _ in range(repeats + 1):
        begun = time.perf_counter()
        if connector.get("0", "1", "absent_0_0") is not None:
            raise RuntimeError("there is something that was not put")
        times.append(time.perf_counter() - begun)
    return statistics.median(times[1:]) * 1e6


class Copies:
    """One copy of the bytes of a payload, into memory that is used in turns, as a pool is."""

    def __init__(self):
        import torch

        self.pool = torch.zeros(POOL, dtype=torch.uint8)
        self.at = 0

    def round(self, size: int, repeats: int) -> float:
        data, times = payload("tensor", size), []
        for _ in range(repeats):
            if self.at + size > POOL:
                self.at = 0
            place = self.pool.data_ptr() + self.at
            begun = time.perf_counter()
            ctypes.memmove(place, data.data_ptr(), size)
            times.append(time.perf_counter() - begun)
            self.at += -(-size // 64) * 64
        return statistics.median(times) * 1e6


class Pair:
    """The two processes of a connector. perf_counter is the same clock in both."""

    def __init__(self, name: str):
        self.name = name
        context = multiprocessing.get_context("fork")
        port = free_port()
        self.pipes, between = [], context.Pipe()
        for role, its in ((sender, between[0]), (receiver, between[1])):
            mine, theirs = context.Pipe()
            context.Process(target=self.run, args=(role, port, Both(theirs, its)), daemon=True).start()
            self.pipes.append(mine)
            self.hear(mine)

    def run(self, role: Any, port: int, pipe: Any) -> None:
        try:
            role(self.name, port, pipe)
        except BaseException as error:
            pipe.main.send(RuntimeError(f"{role.__name__}: {type(error).__name__}: {error}"))
            os._exit(1)

    def hear(self, pipe: Any) -> Any:
        heard = pipe.recv()
        if isinstance(heard, BaseException):
            raise heard
        return heard

    def round(self, kind: str, size: int, repeats: int) -> list[float]:
        for pipe in reversed(self.pipes):
            pipe.send((kind, size, repeats))
        ready = multiprocessing.connection.wait(self.pipes)
        return self.hear(ready[0])

    def absent(self) -> float:
        self.pipes[1].send(("absent", 0, ABSENT))
        return self.hear(self.pipes[1])[0]

    def end(self) -> None:
        for pipe in self.pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)


class Both:
    """A process's pipes: to the main process, which gives work and gets results, and to the other one."""

    def __init__(self, main: Any, other: Any):
        self.main = main
        self.other = other
        self.working = False

    def recv(self) -> Any:
        if not self.working:
            work = self.main.recv()
            self.working = work is not None
            return work
        told = self.other.recv()
        self.working = told is not None
        return told

    def send(self, what: Any) -> None:
        if what == "ready" or isinstance(what, list):
            self.working = False
            self.main.send(what)
        else:
            self.other.send(what)


def started(names: list[str]) -> list[Pair]:
    pairs = []
    for name in names:
        try:
            pairs.append(Pair(name))
        except Exception as error:
            print(f"{name} cannot take part: {error}", file=sys.stderr)
    return pairs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connectors", default=",".join(CONNECTORS))
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)))
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    import stand_in

    stand_in.unpinned()
    # Once, for all processes.
    import vllm_omni.distributed.omni_connectors  # noqa: F401

    logging.disable(logging.WARNING)
    pairs = started(args.connectors.split(","))
    print(f"load average {os.getloadavg()[0]:.1f}")
    copies = Copies()
    print("kind        bytes  " + "".join(f"{pair.name + ' put / get / total':>36}" for pair in pairs) + "      copy")
    for kind in args.kinds.split(","):
        for size in map(int, args.sizes.split(",")):
            repeats = SIZES.get(size, 10)
            rounds, copied = [], []
            for _ in range(args.rounds + 1):
                rounds.append([pair.round(kind, size, repeats) for pair in pairs])
                copied.append(copies.round(size, repeats))
            cells = []
            # Not the first, in which pools meet their pages.
            for each in zip(*rounds[1:], strict=True):
                cells.append(" / ".join(f"{statistics.median(time):.0f}" for time in zip(*each, strict=True)))
            copy = statistics.median(copied[1:])
            print(f"{kind:7}{size:>11}  " + "".join(f"{cell:>36}" for cell in cells) + f"{copy:>10.0f}", flush=True)
    absent = [statistics.median(pair.absent() for _ in range(args.rounds)) for pair in pairs]
    print("absent             " + "".join(f"{time:>36.1f}" for time in absent))
    print(f"load average {os.getloadavg()[0]:.1f}")
    for pair in pairs:
        pair.end()


if __name__ == "__main__":
    main()
