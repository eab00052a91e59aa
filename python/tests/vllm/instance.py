"""`kvferry serve`: an instance without a model, with the KV layout of the tiny one."""

import json
import os
import subprocess
import threading
from pathlib import Path

import model as tiny
from client import post
from router import BINARY
from server import BLOCK_TOKENS, Process


class Instance(Process):
    """Listens at ports of its own choice, which it tells in its first line."""

    def __init__(self, role: str, mode: str, log: Path, proxy: int = 0):
        command = [os.environ[BINARY], "serve", "--role", role]
        command += ["--mode", {"WRITE": "push", "READ": "pull"}[mode]]
        command += ["--layers", str(tiny.LAYERS), "--kv-heads", str(tiny.KV_HEADS)]
        command += ["--head-bytes", str(2 * 4 * tiny.HEAD_DIM), "--element", "4"]
        command += ["--block-tokens", str(BLOCK_TOKENS)]
        if proxy:
            command += ["--proxy", f"127.0.0.1:{proxy}"]
        super().__init__(f"{role} instance", command, dict(os.environ), log, subprocess.PIPE)
        late = threading.Timer(30, self.child.kill)
        late.start()
        line = self.child.stdout.readline()
        late.cancel()
        if not line:
            self.kill()
            raise RuntimeError(f"{self.name} does not start\n{self.tail()}")
        ready = json.loads(line)
        self.port, self.handshake, self.notify = (
            int(ready[key].rsplit(":", 1)[1]) for key in ("http", "handshake", "notify")
        )

    def complete(self, body: dict, request_id: str, seconds: float = 60) -> dict:
        """Answer to /v1/completions under an id of a router."""
        headers = {"X-Request-Id": request_id}
        return post(self.port, "/v1/completions", body, seconds, headers)
