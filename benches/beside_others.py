"""Others on the workloads of `cargo bench -p benches --bench host`, between two processes, each row in
turns with that benchmark.

    python benches/beside_others.py [--tcp] BENCH [ROW...]

BENCH is the benchmark's binary below target/release/deps. The others are NIXL 1.5.1 with its default
transports, or with --tcp NIXL over UCX's TCP, Mooncake's TCP, plain sendmsg and recvmsg, and iperf3
if it is installed:

    pip install nixl==1.5.1 mooncake-transfer-engine-non-cuda==0.3.13.post1 numpy

Where Python finds our module `mori.io`, as after `./test --python` with I=target/python/mori/installed and
PYTHONPATH=$I:$I/kvferry/dropin, a write by that is measured, too.

Prints the median of each in GB/s; all bytes are compared. All have memory with pages of 4 KiB.
"""

import importlib.util
import json
import multiprocessing
import os
import random
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time

BY_TCP = "--tcp" in sys.argv
# Before they are imported: one would ask for huge pages, the other go other ways.
os.environ["NUMPY_MADVISE_HUGEPAGE"] = "0"
if BY_TCP:
    os.environ["UCX_TLS"] = "tcp"
    fabric = tempfile.NamedTemporaryFile("w", suffix=".toml")
    fabric.write('paths = ["tcp"]\n')
    fabric.flush()
    os.environ["KVFERRY_FABRIC"] = fabric.name
import numpy  # noqa: E402

KIB = 1024
# Name: bytes of a block, blocks, blocks that lie one after the other on both sides.
ROWS = {
    "kv4Kx512": (4 * KIB, 512, 1),
    "kv16Kx512": (16 * KIB, 512, 1),
    "kv64Kx512": (64 * KIB, 512, 1),
    "kv256Kx512": (256 * KIB, 512, 1),
    "kv1Mx128": (1024 * KIB, 128, 1),
    "kv4K-256M": (4 * KIB, 65536, 1),
    "kv16K-256M": (16 * KIB, 16384, 1),
    "kv64K-256M": (64 * KIB, 4096, 1),
    "kv4K-run32": (4 * KIB, 65536, 32),
}
ROUNDS = 3
REPEATS = 9


def agent(name: str):
    from nixl._api import nixl_agent, nixl_agent_config

    return nixl_agent(name, nixl_agent_config(enable_prog_thread=False))


def pool(size: int, count: int, fill: int) -> numpy.ndarray:
    """Memory of twice as many slots as blocks."""
    data = numpy.empty(2 * count * size, dtype=numpy.uint8)
    data[:] = fill
    return data


def slots(data: numpy.ndarray, size: int, order: list[int]) -> list[tuple[int, int, int]]:
    return [(data.ctypes.data + slot * size, size, 0) for slot in order]


def write(data: numpy.ndarray, size: int, order: list[int]) -> None:
    """Another byte for each of 250 neighbours."""
    for nth, slot in enumerate(order):
        data[slot * size : (slot + 1) * size] = nth % 250 + 1


def is_written(data: numpy.ndarray, size: int, order: list[int]) -> bool:
    return all(
        (data[slot * size : (slot + 1) * size] == nth % 250 + 1).all()
        for nth, slot in enumerate(order)
    )


def target(pipe, size: int, count: int, order: list[int]) -> None:
    one = agent("target")
    data = pool(size, count, 0)
    one.register_memory([(data.ctypes.data, data.nbytes, 0, "")], "DRAM")
    pipe.send((one.get_agent_metadata(), slots(data, size, order)))
    while (word := hear(one, pipe)) != "end":
        if word == "write":
            write(data, size, order)
        pipe.send(is_written(data, size, order))


def hear(one, pipe) -> str:
    """What the initiator says. Without a thread of its own, NIXL goes on only while it is asked."""
    while not pipe.poll(0):
        one.get_new_notifs()
    return pipe.recv()


def drawn(size: int, count: int, run: int) -> list[list[int]]:
    """The places of the blocks on both sides."""
    draw = random.Random(size * count)
    return [
        [run * first + n for first in draw.sample(range(2 * count // run), count // run) for n in range(run)]
        for _ in range(2)
    ]


def median(size: int, count: int, times: list[float]) -> float:
    """Of GB/s. The first one opens connections."""
    return size * count / sorted(times[1:])[REPEATS // 2] / 1e9


def nixl(direction: str, size: int, count: int, run: int) -> float:
    """Median GB/s of one transfer after the other."""
    here, there = drawn(size, count, run)
    pipe, other = multiprocessing.Pipe()
    child = multiprocessing.Process(target=target, args=(other, size, count, there), daemon=True)
    child.start()
    one = agent("initiator")
    data = pool(size, count, 0)
    if direction == "WRITE":
        write(data, size, here)
    one.register_memory([(data.ctypes.data, data.nbytes, 0, "")], "DRAM")
    metadata, remote = pipe.recv()
    if direction == "READ":
        pipe.send("write")
        assert pipe.recv()
    peer = one.add_remote_agent(metadata)
    local = one.prep_xfer_dlist("", slots(data, size, here), "DRAM")
    remote = one.prep_xfer_dlist(peer, remote, "DRAM")
    indices = list(range(count))
    times = []
    for _ in range(REPEATS + 1):
        handle = one.make_prepped_xfer(direction, local, indices, remote, indices)
        begun = time.perf_counter()
        state = one.transfer(handle)
        while state == "PROC":
            state = one.check_xfer_state(handle)
        times.append(time.perf_counter() - begun)
        assert state == "DONE", state
        one.release_xfer_handle(handle)
    pipe.send("look")
    assert pipe.recv() and is_written(data, size, here), "other bytes arrived"
    pipe.send("end")
    child.join()
    return median(size, count, times)


def mori_engine(name: str):
    from mori.io import BackendType, IOEngine, IOEngineConfig, RdmaBackendConfig

    one = IOEngine(name, IOEngineConfig("127.0.0.1", 0))
    one.create_backend(BackendType.RDMA, RdmaBackendConfig(1, -1, 1))
    return one


def mori_register(one, data: numpy.ndarray):
    from mori.io import MemoryLocationType

    return one.register_memory(data.ctypes.data, data.nbytes, -1, MemoryLocationType.CPU)


def mooncake_engine():
    from mooncake.engine import TransferEngine

    one = TransferEngine()
    assert one.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    return one


def mori_target(data: numpy.ndarray, _slots: list[tuple]) -> tuple:
    one = mori_engine("target")
    return one, (one.get_engine_desc().pack(), mori_register(one, data).pack())


def mori_writer(data: numpy.ndarray, told: tuple, orders: list[list[int]], size: int):
    """What writes all blocks; whether it did."""
    from mori.io import EngineDesc, MemoryDesc

    peer, remote = told
    one = mori_engine("initiator")
    one.register_remote_engine(EngineDesc.unpack(peer))
    session = one.create_session(mori_register(one, data), MemoryDesc.unpack(remote))
    offsets = [[slot * size for slot in order] for order in orders]

    def go() -> bool:
        status = session.batch_write(*offsets, [size] * len(offsets[0]), one.allocate_transfer_uid())
        status.Wait()
        return status.Succeeded()

    return go


def mooncake_target(data: numpy.ndarray, slots: list[tuple]) -> tuple:
    one = mooncake_engine()
    assert one.register_memory(data.ctypes.data, data.nbytes) == 0
    return one, (f"127.0.0.1:{one.get_rpc_port()}", [at for at, _, _ in slots])


def mooncake_writer(data: numpy.ndarray, told: tuple, orders: list[list[int]], size: int):
    """As `mori_writer`."""
    peer, remote = told
    one = mooncake_engine()
    assert one.register_memory(data.ctypes.data, data.nbytes) == 0
    local = [at for at, _, _ in slots(data, size, orders[0])]
    return lambda: one.batch_transfer_sync_write(peer, local, remote, [size] * len(local)) == 0


def written_target(made, pipe, size: int, count: int, order: list[int]) -> None:
    data = pool(size, count, 0)
    _one, told = made(data, slots(data, size, order))
    pipe.send(told)
    pipe.recv()
    pipe.send(is_written(data, size, order))


def writes(target, writer, size: int, count: int, run: int) -> float:
    """Median GB/s of one write after the other; none where it fails."""
    orders = drawn(size, count, run)
    pipe, other = multiprocessing.Pipe()
    child = multiprocessing.Process(
        target=written_target, args=(target, other, size, count, orders[1]), daemon=True
    )
    child.start()
    data = pool(size, count, 0)
    write(data, size, orders[0])
    go = writer(data, pipe.recv(), orders, size)
    times = []
    for _ in range(REPEATS + 1):
        begun = time.perf_counter()
        if not go():
            child.kill()
            return float("nan")
        times.append(time.perf_counter() - begun)
    pipe.send("look")
    assert pipe.recv(), "other bytes arrived"
    child.join()
    return median(size, count, times)


def iperf(streams: int) -> float:
    """GB/s of iperf3 in two seconds."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    server = subprocess.Popen(["iperf3", "-s", "-1", "--forceflush", "-p", port], stdout=subprocess.PIPE, text=True)
    # It listens when it has said so.
    while "Server listening" not in server.stdout.readline():
        pass
    client = ["iperf3", "-c", "127.0.0.1", "-p", port, "-t", "2", "-P", str(streams), "-J"]
    told = json.loads(subprocess.run(client, capture_output=True, check=True).stdout)
    server.wait()
    return told["end"]["sum_received"]["bits_per_second"] / 8e9


def ours(bench: str, row: str) -> dict[str, float]:
    """Median GB/s by way."""
    command = [bench, row, *(["tcp"] if BY_TCP else []), "--bench"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    part = re.search(rf"^{row} \([^)]*\), 1 at a time.*?(?=^\S|\Z)", text, re.S | re.M).group()
    ways = "shared memory|cross-memory|shared, read|cross, read|bare readv|readv, told|tcp|raw tcp, 2|raw tcp, 4|raw tcp"
    found = re.findall(rf"^  ({ways}) +([\d.]+) GB/s", part, re.M)
    return {name: float(rate) for name, rate in found}


def turn(bench: str, row: str) -> dict[str, float]:
    """GB/s by way, of everybody once."""
    rates = ours(bench, row)
    for direction in ["WRITE"] if BY_TCP else ["WRITE", "READ"]:
        rates[f"NIXL {direction}"] = nixl(direction, *ROWS[row])
    if importlib.util.find_spec("mori"):
        rates["mori.io"] = writes(mori_target, mori_writer, *ROWS[row])
    if BY_TCP:
        rates["Mooncake"] = writes(mooncake_target, mooncake_writer, *ROWS[row])
    return rates


def main() -> None:
    bench, *rows = [word for word in sys.argv[1:] if word != "--tcp"]
    load = open("/proc/loadavg").read().split()[0]
    print(f"load average {load}; GB/s, median of {ROUNDS} rounds in turns")
    if BY_TCP and shutil.which("iperf3"):
        print(*(f"iperf3, {n}: {iperf(n):.2f}" for n in [1, 2, 4]), sep="  ", flush=True)
    for row in rows or ROWS:
        rates: dict[str, list[float]] = {}
        for _ in range(ROUNDS):
            for name, rate in turn(bench, row).items():
                rates.setdefault(name, []).append(rate)
        told = {name: sorted(values)[ROUNDS // 2] for name, values in rates.items()}
        print(row, *(f"{name} {rate:.2f}" for name, rate in told.items()), sep="  ", flush=True)


if __name__ == "__main__":
    main()
