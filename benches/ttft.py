#!/usr/bin/env python3
"""Time to the first token behind `kvferry router`: KvferryConnector beside vLLM's MoRIIOConnector over
the drop-in `mori`, and a single server without a connector.

Needs vLLM, the package `kvferry` and its drop-in on PYTHONPATH, and KVFERRY_BIN, as `python/test` has them;
but of a release build, which that of the tests is not. In each mode both pairs and the single server have
turns of ten requests, one at a time, in another order each round; who has no turn is stopped, because
vLLM's workers spin for seconds after a request. A prefill and the single server have one core, decodes
another one. With --shared-cores all may use all: then it is chance whether a worker that spins is in the
way of the other server.
Prompts are random, so that nothing is cached. The table has medians and 90th percentiles in milliseconds.

With --floor a connector that moves no byte (`floor.py`) has turns, too: both legs of its requests go straight
to the servers, at the same time.

With --before a second pair has turns whose package is the one in that folder, as `python/test` installs it: that of
another build.

With --hand-off the legs go straight to the servers of the pairs, and the time is that from the answer of
the prefill, which has computed its last layer, to the first token of the decode.
"""

import argparse
import http.client
import json
import os
import pathlib
import random
import signal
import statistics
import sys
import tempfile
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from functools import partial

TESTS = pathlib.Path(__file__).resolve().parent.parent / "python/tests"
sys.path[:0] = [str(TESTS), str(TESTS / "vllm")]

import model as tiny  # noqa: E402
import native  # noqa: E402
from client import get  # noqa: E402
from pair import KVFERRY, MORIIO, ROLES, Pair, request  # noqa: E402
from ports import free_ports  # noqa: E402
from router import Router  # noqa: E402
from server import Server  # noqa: E402

TOKENS = 4
# With `floor.py` beside vLLM.
FLOOR_ENV = {"PYTHONPATH": f"{pathlib.Path(__file__).resolve().parent}:{os.environ.get('PYTHONPATH', '')}"}
TURN = 10


def floor_at(path: str) -> dict:
    """The connector that moves no byte, with the socket of its decode there."""
    extra = {"kv_connector_extra_config": {"floor": path}}
    return {"kv_connector": "FloorConnector", "kv_connector_module_path": "floor", **extra}


def stream(port: int, ids: list[int], **more) -> tuple[float, float]:
    """When the request was sent and the first bytes of its answer came, in seconds."""
    greedy = {"temperature": 0, "ignore_eos": True, "max_tokens": TOKENS}
    body = json.dumps({"prompt": ids, "stream": True, **greedy, **more})
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    start = time.perf_counter()
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    first = answer.readline()
    came = time.perf_counter()
    rest = answer.read()
    connection.close()
    if answer.status != 200 or not first.startswith(b"data: {") or b"error" in first + rest:
        raise OSError(f"port {port}: {answer.status} {(first + rest).decode(errors='replace')}")
    return start, came


def first_token(port: int, ids: list[int]) -> float:
    """Milliseconds from the request to the first bytes of the stream."""
    start, came = stream(port, ids)
    return (came - start) * 1e3


def hand_off(pair: Pair, ids: list[int]) -> float:
    """Milliseconds from the answer of the prefill to the first bytes of the decode's stream."""

    def prefill(params: dict) -> tuple[float, dict]:
        answer = pair.prefill.complete(request(ids, max_tokens=1) | params)
        return time.perf_counter(), answer

    with ThreadPoolExecutor(1) as pool:
        if pair.connectors["decode"]["kv_connector"] == KVFERRY["kv_connector"]:
            key = native.key()
            answered = pool.submit(prefill, native.to_prefill(pair, key))
            params = native.to_decode(pair, key)
        else:
            transfer, pull = f"tx-{uuid.uuid4()}", pair.mode == "READ"
            peer = None if pull else pair.decode
            answered = pool.submit(prefill, pair.params(transfer, True, peer))
            if pull:
                answer = answered.result()[1]
                params = {"kv_transfer_params": answer["kv_transfer_params"]}
            else:
                params = pair.params(transfer, False, pair.prefill)
        _, came = stream(pair.decode.port, ids, **params)
        return (came - answered.result()[0]) * 1e3


def floor_token(pair: Pair, ids: list[int]) -> float:
    """Milliseconds from both legs of a request, which are sent at once, to the first bytes of the decode's
    stream."""

    def leg(flag: str) -> dict:
        return {"kv_transfer_params": {flag: True, "floor": key}}

    key = uuid.uuid4().hex
    with ThreadPoolExecutor(1) as pool:
        start = time.perf_counter()
        prefilled = pool.submit(pair.prefill.complete, request(ids, max_tokens=1) | leg("do_remote_decode"))
        _, came = stream(pair.decode.port, ids, **leg("do_remote_prefill"))
        prefilled.result()
    return (came - start) * 1e3


def wake(port: int, length: int) -> None:
    """Requests that are not counted: connections that were kept over the stop are closed by it."""
    served = 0
    for _ in range(20):
        try:
            first_token(port, random.choices(range(256), k=length))
            served += 1
        except OSError:
            time.sleep(0.1)
        if served == 2:
            return
    sys.exit(f"port {port} does not serve again")


def connectors(before: str | None) -> list[tuple[str, dict, dict]]:
    """Name, connector and environment of each pair."""
    pairs = [(connector["kv_connector"], connector, {}) for connector in (MORIIO, KVFERRY)]
    if before is not None:
        path = {"PYTHONPATH": f"{before}:{os.environ.get('PYTHONPATH', '')}"}
        pairs.append((f"{KVFERRY['kv_connector']} before", KVFERRY, path))
    return pairs


def pin(server: Server, core: int) -> None:
    """Gives a server that has just been started, and whatever it starts, one core."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(server.child.pid, {cores[core % len(cores)]})


def turn(servers: list[Server], what: signal.Signals) -> None:
    """Stops servers, or lets them go on."""
    for server in servers:
        os.killpg(server.child.pid, what)


def measure(mode: str, model: pathlib.Path, logs: pathlib.Path, args) -> dict:
    """Milliseconds of every request by target and length."""
    started, targets = [], {}
    try:
        log = logs / f"single-{mode}.log"
        single = Server("single", model, free_ports(1)[0], log, None, {})
        if not args.shared_cores:
            pin(single, 0)
        started.append(single)
        for name, connector, env in connectors(args.before):
            router = Router(logs / f"router-{name}-{mode}.log".replace(" ", "-"))
            started.append(router)
            pair = Pair(mode, model, logs, router.discovery, dict.fromkeys(ROLES, connector), env)
            started.append(pair)
            if not args.shared_cores:
                pin(pair.prefill, 0)
                pin(pair.decode, 1)
            pair.ready()
            router.wait_for("the pair")
            take = partial(hand_off, pair) if args.hand_off else partial(first_token, router.port)
            both = [pair.prefill, pair.decode]
            targets[f"{name} {mode}"] = (router.port, "/readiness", both, take)
            turn([pair.prefill, pair.decode], signal.SIGSTOP)
        if args.floor:
            path = tempfile.mktemp(prefix="kvferry-floor-", suffix=".sock")
            pair = Pair(mode, model, logs, 0, dict.fromkeys(ROLES, floor_at(path)), FLOOR_ENV)
            started.append(pair)
            if not args.shared_cores:
                pin(pair.prefill, 0)
                pin(pair.decode, 1)
            pair.ready()
            both = [pair.prefill, pair.decode]
            take = partial(floor_token, pair)
            targets[f"no bytes {mode}"] = (pair.decode.port, "/health", both, take)
            turn(both, signal.SIGSTOP)
        single.ready()
        if not args.hand_off:
            take = partial(first_token, single.port)
            targets["single server"] = (single.port, "/health", [single], take)
        turn([single], signal.SIGSTOP)
        rows = {}
        chance = random.Random(mode)
        for length in args.lengths:
            for _ in range(-(-args.requests // TURN)):
                names = list(targets)
                chance.shuffle(names)
                for name in names:
                    port, path, servers, take = targets[name]
                    turn(servers, signal.SIGCONT)
                    single.wait_until("ready again", lambda: get(port, path) == 200, 60)
                    wake(port, length)
                    for _ in range(TURN):
                        ids = chance.choices(range(256), k=length)
                        rows.setdefault((name, length), []).append(take(ids))
                    turn(servers, signal.SIGSTOP)
        return rows
    finally:
        turn([*started[:1], *(it for _, _, both, _ in targets.values() for it in both)], signal.SIGCONT)
        for process in reversed(started):
            process.stop()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=[32, 257, 1500, 2500])
    parser.add_argument("--requests", type=int, default=50, help="per length and server")
    parser.add_argument("--modes", nargs="+", default=["WRITE", "READ"], choices=["WRITE", "READ"])
    parser.add_argument("--before", metavar="FOLDER", help="package of another build, which has turns, too")
    parser.add_argument("--hand-off", action="store_true", help="in place of the time to the first token")
    parser.add_argument("--floor", action="store_true", help="beside a connector that moves no byte")
    parser.add_argument("--shared-cores", action="store_true", help="no core for each server")
    args = parser.parse_args()
    # Who is stopped is to go on, and to end.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    logs = pathlib.Path(tempfile.mkdtemp(prefix="kvferry-ttft-"))
    model = tiny.write(logs / "model")
    print(
        f"{os.cpu_count()} CPUs, load average {os.getloadavg()[0]:.1f}, {args.requests} requests per "
        f"length; median and 90th percentile in ms; logs in {logs}",
        flush=True,
    )
    print("| | " + " | ".join(f"{length} tokens" for length in args.lengths) + " |", flush=True)
    print("|---" * (len(args.lengths) + 1) + "|", flush=True)
    for mode in args.modes:
        rows = measure(mode, model, logs, args)
        for name in dict.fromkeys(name for name, _ in rows):
            cells = []
            for length in args.lengths:
                took = rows[name, length]
                late = statistics.quantiles(took, n=10)[-1]
                cells.append(f"{statistics.median(took):.1f}, {late:.1f}")
            print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
