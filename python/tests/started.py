"""Programs of kvferry that were started, and that say where they listen."""

import json
import subprocess
import threading
import urllib.error
import urllib.request

# Longest wait for a first line.
LIMIT_S = 300


def line_of(process: subprocess.Popen) -> str:
    """Its first one; it is killed unless it says something."""
    late = threading.Timer(LIMIT_S, process.kill)
    late.start()
    line = process.stdout.readline()
    late.cancel()
    assert line, f"{process.args} says nothing"
    return line


def served(url: str, request: dict) -> dict:
    """The answer to a request, which is asked until there is a pair to serve it."""
    for _ in range(60):
        try:
            kind = {"content-type": "application/json"}
            asked = urllib.request.Request(url, json.dumps(request).encode(), kind)
            # The router waits itself for a pair, for 2 s.
            with urllib.request.urlopen(asked, timeout=60) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as why:
            assert why.code == 503, why.read()
    raise AssertionError("there is no pair")
