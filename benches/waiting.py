#!/usr/bin/env python3
"""CPU time of a decode that waits for KV, and what a request waits that arrives meanwhile.

Needs what `ttft.py` needs. The worker of a prefill is stopped while a decode waits for its KV: what the processes of
the decode use then, in CPU seconds a second, beside what they use with nothing to do. Then requests without a transfer
go to the decode, in milliseconds until their first token: while it waits, and after. With --before also of the
package in that folder, in turns.
"""

import argparse
import os
import pathlib
import signal
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor

import ttft
from pair import KVFERRY, ROLES, Pair, prompt, request
from router import Router
from stops import stop

# vLLM's workers spin for a second after a step.
SPIN_S = 1.5


def usage(server, seconds: float) -> float:
    """CPU seconds a second of its processes."""
    before = server.cpu_seconds()
    time.sleep(seconds)
    return (server.cpu_seconds() - before) / seconds


def first_tokens(port: int, count: int, seed: str) -> list[float]:
    """Milliseconds of requests that come at times that have nothing to do with steps."""
    took = []
    for number in range(count):
        time.sleep(0.03 + number % 7 / 1000)
        took.append(ttft.first_token(port, prompt(32, f"{seed} {number}")))
    return took


def turn(pair: Pair, seconds: float, count: int, number: int) -> dict[str, list[float]]:
    rows = {}
    time.sleep(SPIN_S)
    rows["idle"] = [usage(pair.decode, seconds)]
    worker = pair.prefill.worker()
    stop(worker)
    try:
        with ThreadPoolExecutor(1) as pool:
            late = pool.submit(pair.router.complete, request(prompt(300, f"late {number}")))
            time.sleep(SPIN_S)
            rows["waiting"] = [usage(pair.decode, seconds)]
            rows["request meanwhile"] = first_tokens(pair.decode.port, count, f"meanwhile {number}")
            os.kill(worker, signal.SIGCONT)
            late.result()
    finally:
        os.kill(worker, signal.SIGCONT)
    rows["request alone"] = first_tokens(pair.decode.port, count, f"alone {number}")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each measurement")
    parser.add_argument("--requests", type=int, default=30, help="that arrive meanwhile, per round")
    parser.add_argument("--before", metavar="FOLDER", help="package of another build, which has turns, too")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    logs = pathlib.Path(tempfile.mkdtemp(prefix="kvferry-waiting-"))
    model = ttft.tiny.write(logs / "model")
    print(f"{os.cpu_count()} CPUs, load average {os.getloadavg()[0]:.1f}; logs in {logs}", flush=True)
    rows, started = {}, []
    try:
        for name, connector, env in ttft.connectors(args.before):
            if connector != KVFERRY:
                continue
            router = Router(logs / f"router-{name}.log".replace(" ", "-"))
            started.append(router)
            pair = Pair("WRITE", model, logs, router.discovery, dict.fromkeys(ROLES, connector), env)
            pair.router = router
            started.append(pair)
            rows[name] = pair.ready(), {}
            router.wait_for("the pair")
        for number in range(args.rounds):
            for pair, measured in rows.values():
                for what, values in turn(pair, args.seconds, args.requests, number).items():
                    measured.setdefault(what, []).extend(values)
    finally:
        for process in reversed(started):
            process.stop()
    for name, (_, measured) in rows.items():
        for what, values in measured.items():
            print(f"| {name} | {what} | {statistics.median(values):.3f} | {max(values):.3f} |")


if __name__ == "__main__":
    main()
