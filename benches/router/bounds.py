#!/usr/bin/env python3
"""Memory of `kvferry router` and `kvferry serve`, and waiting time of other clients, under requests that use as much as possible.

Needs builds of kvferry and nothing else. With --before and --after two builds are measured in turns in each round. Every
measurement starts a new process. Memory is VmRSS and VmHWM from /proc: at rest, at the peak, and two seconds after the last
answer. Meanwhile another client, from another address, asks for /health every 10 ms; its longest wait is told. The table has
medians over the rounds.
"""

import argparse
import collections
import http.client
import json
import os
import pathlib
import socket
import statistics
import subprocess
import sys
import threading
import time
import urllib.request

MIB = 1 << 20

# Time for one measurement.
PATIENCE = 600

MODELS = json.dumps({"object": "list", "data": [{"id": "m", "object": "model"}]}).encode()

PARAMS = {
    "do_remote_prefill": True, "do_remote_decode": False, "remote_block_ids": [1], "remote_engine_id": "p",
    "remote_host": "127.0.0.1", "remote_port": 5600, "tp_size": 1,
}


class Instance(threading.Thread):
    """Instance that reads legs and answers at once, or sends a part of a long answer."""

    def __init__(self, role, answer=None):
        super().__init__(daemon=True)
        self.role, self.answer = role, answer
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.url = "http://127.0.0.1:%d" % self.listener.getsockname()[1]
        # Long answers of which the first part was sent.
        self.halves = threading.Semaphore(0)
        self.rest = threading.Event()
        self.start()

    def run(self):
        while True:
            connection, _ = self.listener.accept()
            threading.Thread(target=self.serve, args=(connection,), daemon=True).start()

    def serve(self, connection):
        reader = connection.makefile("rb")
        buffer = bytearray(MIB)
        try:
            while line := reader.readline():
                length = 0
                while (header := reader.readline()) not in (b"\r\n", b""):
                    name, value = header.split(b":", 1)
                    if name.lower() == b"content-length":
                        length = int(value)
                while length:
                    got = reader.readinto(memoryview(buffer)[:min(length, MIB)])
                    if not got:
                        return
                    length -= got
                self.reply(connection, line.split()[1])
        except OSError:
            pass
        finally:
            connection.close()

    def reply(self, connection, path):
        if path in (b"/health", b"/v1/models"):
            return say(connection, MODELS)
        if self.answer and self.role == "decode":
            part, whole = self.answer
            connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % whole)
            piece = b" " * MIB
            for _ in range(part // MIB):
                connection.sendall(piece)
            self.halves.release()
            self.rest.wait()
            raise OSError("the answer ends here")
        answer = {"id": "x", "object": "text_completion", "choices": [{"index": 0, "text": "x", "finish_reason": "length"}]}
        if self.role == "prefill":
            answer["kv_transfer_params"] = PARAMS
        say(connection, json.dumps(answer).encode())


def say(connection, body):
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
    connection.sendall(head + body)


class OtherClient(threading.Thread):
    """Asks for /health until it is stopped."""

    def __init__(self, address):
        super().__init__(daemon=True)
        self.address, self.stopped, self.longest = address, threading.Event(), 0.0
        self.start()

    def run(self):
        while not self.stopped.wait(0.01):
            begin = time.monotonic()
            try:
                connection = http.client.HTTPConnection(*self.address, PATIENCE, source_address=("127.0.0.2", 0))
                connection.request("GET", "/health")
                connection.getresponse().read()
                connection.close()
            except OSError:
                continue
            self.longest = max(self.longest, time.monotonic() - begin)


class Program:
    """A process of kvferry."""

    def __init__(self, command):
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        line = json.loads(self.process.stdout.readline())
        host, port = line["http"].rsplit(":", 1)
        self.address = (host, int(port))

    def memory(self, field):
        for line in pathlib.Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith(field + ":"):
                return int(line.split()[1]) / 1024
        return 0.0

    def end(self):
        self.process.kill()
        self.process.wait()


def router(binary, prefill=None, decode=None):
    command = [binary, "router", "--json", "--listen", "127.0.0.1:0", "--discovery", "127.0.0.1:0"]
    command += ["--admin-addr", "127.0.0.1:0"]
    if prefill:
        # Connections are made late where the router is busy.
        command += ["--prefill", prefill.url, "--decode", decode.url, "--connect-timeout", "60"]
    program = Program(command)
    while prefill:
        try:
            url = "http://%s:%d/readiness" % program.address
            urllib.request.urlopen(url, timeout=PATIENCE).read()
            return program
        except OSError:
            time.sleep(0.1)
    return program


def head(length):
    return (b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
            b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % length)


def ask(address, body, outcomes):
    """Sends a completion and adds its status, or the lack of one, to the outcomes."""
    outcome = "closed"
    try:
        with socket.create_connection(address, timeout=PATIENCE) as it:
            try:
                it.sendall(head(len(body)) + body)
            except OSError:
                # It may have been answered already.
                pass
            words = it.makefile("rb").readline().split()
            outcome = words[1].decode() if len(words) > 1 else outcome
    except OSError:
        pass
    outcomes[outcome] += 1


def ask_all(address, bodies, meanwhile=lambda: None):
    outcomes = collections.Counter()
    asking = [threading.Thread(target=ask, args=(address, body, outcomes)) for body in bodies]
    for thread in asking:
        thread.start()
    meanwhile()
    for thread in asking:
        thread.join(PATIENCE)
    return outcomes


def completion(prompt, **more):
    return json.dumps({"model": "m", "max_tokens": 4, "prompt": prompt, **more}).encode()


def keys(binary, size):
    body = completion("p", **{f"k{n}": 0 for n in range(size * 1000)})
    program = router(binary)
    return program, lambda: ask_all(program.address, [body])


def samples(binary, size):
    body = completion("p" * (size * MIB), n=128)
    program = router(binary, Instance("prefill"), Instance("decode"))
    return program, lambda: ask_all(program.address, [body])


def answers(binary, size):
    decode = Instance("decode", answer=(size * MIB, 248 * MIB))
    program = router(binary, Instance("prefill"), decode)

    def run():
        def release():
            deadline = time.monotonic() + PATIENCE / 10
            for _ in range(16):
                # Requests that are refused never begin.
                if not decode.halves.acquire(timeout=max(0.1, min(5, deadline - time.monotonic()))):
                    break
            decode.rest.set()
        return ask_all(program.address, [completion("p")] * 16, release)
    return program, run


def serve(binary, size):
    command = [binary, "serve", "--role", "prefill", "--mode", "pull", "--http-port", "0"]
    program = Program(command)
    asked = {"do_remote_decode": True, "do_remote_prefill": False}
    body = completion("p" * (size * MIB), kv_transfer_params=asked)

    def run():
        outcomes, held = collections.Counter(), []
        for _ in range(20):
            it = socket.create_connection(program.address, timeout=PATIENCE)
            it.settimeout(10)
            try:
                it.sendall(head(len(body)) + body[:-1])
            except OSError:
                # Not read, or refused.
                pass
            held.append(it)
        for it in held:
            outcome = "closed"
            try:
                it.sendall(body[-1:])
            except OSError:
                pass
            try:
                words = it.makefile("rb").readline().split()
                outcome = words[1].decode() if len(words) > 1 else outcome
            except OSError as why:
                outcome = "no answer" if isinstance(why, TimeoutError) else outcome
            outcomes[outcome] += 1
            it.close()
        return outcomes
    return program, run


ROWS = {
    "keys": (keys, 100, "{size},000 keys in one body, no instance"),
    "samples": (samples, 24, "one prompt of {size} MiB, `n` 128"),
    "answers": (answers, 100, "16 answers, {size} MiB of 248 MiB each"),
    "serve": (serve, 30, "`kvferry serve`: 20 bodies of {size} MiB"),
}


def measure(binary, start, size):
    program, run = start(binary, size)
    try:
        # What the start leaves behind is given back.
        time.sleep(1)
        rest = program.memory("VmRSS")
        other = OtherClient(program.address)
        begin = time.monotonic()
        outcomes = run()
        took = time.monotonic() - begin
        other.stopped.set()
        other.join(PATIENCE)
        time.sleep(2)
        return {
            "rest": rest, "peak": program.memory("VmHWM"), "after": program.memory("VmRSS"),
            "wait": other.longest, "took": took, "outcomes": outcomes,
        }
    finally:
        program.end()


def arguments():
    root = pathlib.Path(__file__).resolve().parents[2]
    target = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", root / "target"))
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--before", help="a build of kvferry to compare with")
    parser.add_argument("--after", default=target / "release/kvferry")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    return parser.parse_args()


def main():
    args = arguments()
    builds = {"before": args.before, "after": args.after}
    builds = {name: str(path) for name, path in builds.items() if path and pathlib.Path(path).exists()}
    if not builds:
        sys.exit("no build: give --after BINARY, --before BINARY or both")
    found = collections.defaultdict(list)
    load = [os.getloadavg()[0]]
    for _ in range(args.rounds):
        for row in args.rows:
            start, size, _ = ROWS[row]
            for name, binary in builds.items():
                found[row, name].append(measure(binary, start, size))
        load.append(os.getloadavg()[0])
    print(f"{os.cpu_count()} CPUs, load average {min(load):.1f} to {max(load):.1f}, {args.rounds} rounds, medians")
    print("| What | Build | At rest | Peak | Afterwards | Another client's longest wait | Took | Answers |")
    print("|---|---|---|---|---|---|---|---|")
    for (row, name), all_of_them in found.items():
        rest, peak, after, wait, took = (
            statistics.median(it[key] for it in all_of_them) for key in ("rest", "peak", "after", "wait", "took"))
        outcomes = sum((it["outcomes"] for it in all_of_them), collections.Counter())
        told = ", ".join(f"{count} x {outcome}" for outcome, count in sorted(outcomes.items()))
        what = ROWS[row][2].format(size=ROWS[row][1])
        print(f"| {what} | {name} | {rest:.0f} MiB | {peak:.0f} MiB | {after:.0f} MiB | {wait:.2f} s | {took:.1f} s | {told} |")


if __name__ == "__main__":
    main()
