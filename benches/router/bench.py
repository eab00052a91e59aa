#!/usr/bin/env python3
"""`kvferry router` beside vllm-router 0.1.17, with instant backends and wrk.

Needs wrk, nginx, openssl and the release build of kvferry; vllm-router comes from PyPI into a virtual
environment (--venv, made if missing). With --tls the router is measured with TLS towards clients,
towards instances, and towards both, too; with --beside another build of kvferry is. Every round
measures all targets one after the other, so that what disturbs the machine disturbs all of them; the
table has medians over the rounds. CPU is that of the router's processes, from /proc.
"""

import argparse
import json
import os
import pathlib
import re
import socket
import ssl
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request

BODY = json.dumps({
    "model": "m", "max_tokens": 16, "temperature": 0.7, "top_p": 0.95,
    "prompt": "The quick brown fox jumps over the lazy dog. " * 7,
})

ANSWER = json.dumps({
    "id": "cmpl-1", "object": "text_completion", "created": 1, "model": "m",
    "choices": [{"index": 0, "text": "x", "finish_reason": "length"}],
})

PREFILL = json.dumps({
    "id": "cmpl-1", "object": "text_completion", "created": 1, "model": "m",
    "choices": [{"index": 0, "text": "x", "finish_reason": "length"}],
    "kv_transfer_params": {
        "do_remote_prefill": True, "do_remote_decode": False, "remote_block_ids": [[1, 2, 3]],
        "remote_engine_id": "p", "remote_host": "127.0.0.1", "remote_handshake_port": 6301,
        "remote_notify_port": 61005, "remote_dp_rank": 0, "remote_dp_rank_override": True,
        "remote_dp_size": 1, "remote_dp_size_local": 1, "tp_size": 1, "transfer_id": "tx-1",
    },
})

LUA = """
wrk.method = "POST"
wrk.body = [==[%s]==]
wrk.headers["Content-Type"] = "application/json"
done = function(summary, latency, requests)
  local e = summary.errors
  io.write(string.format("RESULT %%d %%f %%f %%f %%d\\n", summary.requests, summary.duration / 1e6,
    latency:percentile(50), latency:percentile(99),
    e.connect + e.read + e.write + e.status + e.timeout))
end
"""

NGINX = """
worker_processes 1;
daemon off;
pid {dir}/nginx.pid;
error_log {dir}/error.log;
events {{ worker_connections 4096; }}
http {{
  access_log off;
  keepalive_requests 100000000;
  client_body_temp_path {dir}; proxy_temp_path {dir}; fastcgi_temp_path {dir};
  uwsgi_temp_path {dir}; scgi_temp_path {dir};
  default_type application/json;
  server {{ listen 127.0.0.1:{p}; location / {{ return 200 '{prefill}'; }} }}
  server {{ listen 127.0.0.1:{d}; location / {{ return 200 '{answer}'; }} }}
  ssl_certificate {dir}/cert.pem; ssl_certificate_key {dir}/key.pem;
  server {{ listen 127.0.0.1:{tls_p} ssl; location / {{ return 200 '{prefill}'; }} }}
  server {{ listen 127.0.0.1:{tls_d} ssl; location / {{ return 200 '{answer}'; }} }}
}}
"""


def free_port():
    with socket.socket() as it:
        it.bind(("127.0.0.1", 0))
        return it.getsockname()[1]


def packed(fields):
    """MessagePack of a small map of texts and numbers below 128."""
    out = bytes([0x80 | len(fields)])
    for pair in fields.items():
        for value in pair:
            if isinstance(value, int):
                out += bytes([value])
            else:
                text = value.encode()
                out += (bytes([0xA0 | len(text)]) if len(text) < 32 else bytes([0xD9, len(text)])) + text
    return out


def greeting():
    ready = b"\x05READY" + b"\x0bSocket-Type" + (6).to_bytes(4, "big") + b"DEALER"
    ready += b"\x08Identity" + (0).to_bytes(4, "big")
    first = b"\xff" + b"\0" * 8 + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + b"\0" * 32
    return first, b"\x04" + bytes([len(ready)]) + ready


class Heart(threading.Thread):
    """Instances that register every second, over ZMTP by hand."""

    def __init__(self, port, mode, p, d):
        super().__init__(daemon=True)
        self.port, self.stopped = port, threading.Event()
        self.frames = [
            packed({
                "type": role, "http_address": f"127.0.0.1:{http}",
                "zmq_address": "host:127.0.0.1,handshake:6301,notify:61005",
                "dp_size": 1, "tp_size": 1, "transfer_mode": mode,
            })
            for role, http in (("P", p), ("D", d))
        ]

    def run(self):
        while not self.stopped.is_set():
            try:
                self.beat()
            except OSError:
                self.stopped.wait(0.2)

    def beat(self):
        with socket.create_connection(("127.0.0.1", self.port)) as it:
            first, ready = greeting()
            # libzmq takes a greeting only in the steps in which it sends one itself.
            for part in (first[:10], first[10:11], first[11:], ready):
                it.sendall(part)
                time.sleep(0.05)
            while not self.stopped.is_set():
                for frame in self.frames:
                    it.sendall(b"\0" + bytes([len(frame)]) + frame)
                self.stopped.wait(1.0)


def descendants(pid):
    found = [pid]
    for task in pathlib.Path(f"/proc/{pid}/task").glob("*/children"):
        for child in task.read_text().split():
            found += descendants(int(child))
    return found


def cpu_seconds(pid):
    total = 0
    for it in descendants(pid):
        fields = pathlib.Path(f"/proc/{it}/stat").read_text().rsplit(")", 1)[1].split()
        total += int(fields[11]) + int(fields[12])
    return total / os.sysconf("SC_CLK_TCK")


def resident_mb(pid):
    pages = 0
    for it in descendants(pid):
        pages += int(pathlib.Path(f"/proc/{it}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def wait_until_served(url, process):
    deadline = time.monotonic() + 60
    while True:
        try:
            asked = urllib.request.Request(url, BODY.encode(), {"Content-Type": "application/json"})
            context = ssl._create_unverified_context() if url.startswith("https") else None
            urllib.request.urlopen(asked, timeout=5, context=context).read()
            return
        except OSError as why:
            if process.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"{url} does not serve: {why}")
            time.sleep(0.1)


def make_certificate(folder):
    subprocess.run([
        "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes",
        "-days", "30", "-subj", "/CN=bench", "-addext", "subjectAltName=IP:127.0.0.1",
        "-addext", "basicConstraints=critical,CA:FALSE",
        "-keyout", f"{folder}/key.pem", "-out", f"{folder}/cert.pem",
    ], check=True, stderr=subprocess.DEVNULL)
    os.chmod(f"{folder}/key.pem", 0o400)


def start_ours(binary, mode, p, d, log, flags=()):
    command = [binary, "router", "--json", "--listen", "127.0.0.1:0", "--discovery", "127.0.0.1:0"]
    command += ["--admin-addr", "127.0.0.1:0", *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
    line = json.loads(process.stdout.readline())
    heart = Heart(int(line["discovery"].rsplit(":", 1)[1]), mode, p, d)
    scheme = "https" if "--tls-cert" in flags else "http"
    return process, f"{scheme}://{line['http']}/v1/completions", heart


def start_theirs(venv, policy, mode, p, d, log):
    port, discovery = free_port(), free_port()
    command = [
        f"{venv}/bin/vllm-router", "--host", "127.0.0.1", "--port", str(port),
        "--vllm-pd-disaggregation", "--kv-connector", "moriio", "--policy", policy,
        "--vllm-discovery-address", f"127.0.0.1:{discovery}",
        "--prometheus-port", str(free_port()), "--log-level", "error",
    ]
    process = subprocess.Popen(command, stdout=log, stderr=log)
    return process, f"http://127.0.0.1:{port}/v1/completions", Heart(discovery, mode, p, d)


def wrk(url, connections, seconds, script):
    command = ["wrk", "-t1", f"-c{connections}", f"-d{seconds}s", "-s", script, url]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"RESULT (\d+) (\S+) (\S+) (\S+) (\d+)", out)
    count, duration, p50, p99, errors = found.groups()
    if int(errors):
        sys.exit(f"{url}: {errors} errors\n{out}")
    return int(count), float(duration), float(p50), float(p99)


def measure(target, connections, seconds, script):
    before = cpu_seconds(target["pid"]) if target["pid"] else 0
    count, duration, p50, p99 = wrk(target["url"], connections, seconds, script)
    cpu = (cpu_seconds(target["pid"]) - before) / count * 1e6 if target["pid"] else 0
    return {"rate": count / duration, "p50": p50, "p99": p99, "cpu": cpu}


def cpu_name():
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return "unknown"


def arguments():
    root = pathlib.Path(__file__).resolve().parents[2]
    target = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", root / "target"))
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--binary", default=target / "release/kvferry")
    parser.add_argument("--beside", help="another build of kvferry, measured in the same rounds")
    parser.add_argument("--venv", default=pathlib.Path(tempfile.gettempdir()) / "kvferry-vllm-router")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=int, default=3)
    parser.add_argument("--connections", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--tls", action="store_true")
    parser.add_argument("--modes", nargs="+", default=["WRITE", "READ"])
    parser.add_argument("--policies", nargs="*", default=["round_robin", "cache_aware"])
    return parser.parse_args()


def main():
    args = arguments()
    if args.policies and not (pathlib.Path(args.venv) / "bin/vllm-router").exists():
        subprocess.run([sys.executable, "-m", "venv", args.venv], check=True)
        pip = f"{args.venv}/bin/pip"
        subprocess.run([pip, "install", "-q", "vllm-router==0.1.17"], check=True)
    started, hearts = [], []
    with tempfile.TemporaryDirectory() as folder, open(f"{folder}/log", "w") as log:
        try:
            run(args, folder, log, started, hearts)
        finally:
            for heart in hearts:
                heart.stopped.set()
            for process in started:
                process.terminate()
            for process in started:
                process.wait()


def run(args, folder, log, started, hearts):
    p, d, tls_p, tls_d = (free_port() for _ in range(4))
    make_certificate(folder)
    config = NGINX.format(
        dir=folder, p=p, d=d, tls_p=tls_p, tls_d=tls_d, prefill=PREFILL, answer=ANSWER)
    pathlib.Path(f"{folder}/nginx.conf").write_text(config)
    pathlib.Path(f"{folder}/post.lua").write_text(LUA % BODY)
    started.append(subprocess.Popen(["nginx", "-c", f"{folder}/nginx.conf"], stderr=log))
    targets = {"direct": {"url": f"http://127.0.0.1:{d}/v1/completions", "pid": None}}
    wait_until_served(targets["direct"]["url"], started[0])
    for mode in args.modes:
        ways = {f"kvferry {mode}": start_ours(args.binary, mode, p, d, log)}
        if args.beside:
            ways[f"beside {mode}"] = start_ours(args.beside, mode, p, d, log)
        if args.tls:
            shown = ["--tls-cert", f"{folder}/cert.pem", "--tls-key", f"{folder}/key.pem"]
            asked = ["--legs-ca", f"{folder}/cert.pem"]
            for name, ports, flags in (
                ("clients", (p, d), shown), ("legs", (tls_p, tls_d), asked),
                ("both", (tls_p, tls_d), shown + asked),
            ):
                ways[f"kvferry {mode}, TLS {name}"] = start_ours(args.binary, mode, *ports, log, flags)
        for policy in args.policies:
            ways[f"{policy} {mode}"] = start_theirs(args.venv, policy, mode, p, d, log)
        for name, (process, url, heart) in ways.items():
            started.append(process)
            hearts.append(heart)
            heart.start()
            wait_until_served(url, process)
            targets[name] = {"url": url, "pid": process.pid}
    script = f"{folder}/post.lua"
    for target in targets.values():
        wrk(target["url"], 8, 1, script)
    rows = {}
    load = [os.getloadavg()[0]]
    for _ in range(args.rounds):
        for connections in args.connections:
            for name, target in targets.items():
                row = measure(target, connections, args.seconds, script)
                rows.setdefault((name, connections), []).append(row)
        load.append(os.getloadavg()[0])
    print(f"{cpu_name()}, {os.cpu_count()} CPUs, load average {min(load):.1f} to {max(load):.1f}, "
          f"{args.rounds} rounds of {args.seconds} s, medians, body of {len(BODY)} bytes")
    print("| target | connections | req/s | p50 us | p99 us | CPU us/req | MB |")
    print("|---|---|---|---|---|---|---|")
    for (name, connections), found in rows.items():
        rate, p50, p99, cpu = (
            statistics.median(row[key] for row in found) for key in ("rate", "p50", "p99", "cpu"))
        pid = targets[name]["pid"]
        size = f"{resident_mb(pid):.0f}" if pid else "-"
        print(f"| {name} | {connections} | {rate:.0f} | {p50:.0f} | {p99:.0f} | {cpu:.1f} | {size} |")


if __name__ == "__main__":
    main()
