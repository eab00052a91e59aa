"""The real vllm-router, in MoRI-IO mode."""

import http.client
import json
import os
import signal
import subprocess
import time
from pathlib import Path

from ports import free_ports

START_S = 30


class VllmRouter:
    """Listens for clients at `port` and for instances at `discovery`."""

    def __init__(self, log: Path):
        self.port, self.discovery, self.metrics = free_ports(3)
        self.log = log
        self.start()

    def start(self) -> None:
        command = ["vllm-router", "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--vllm-pd-disaggregation", "--kv-connector", "moriio"]
        command += ["--vllm-discovery-address", f"127.0.0.1:{self.discovery}"]
        command += ["--policy", "round_robin", "--prometheus-port", str(self.metrics)]
        with self.log.open("ab") as log:
            self.child = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def stop(self) -> None:
        os.killpg(self.child.pid, signal.SIGKILL)
        self.child.wait()

    def complete(self, body: dict, seconds: float = 30) -> tuple[int, str]:
        """Status and text of an answer to /v1/completions."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=seconds)
        try:
            headers = {"Content-Type": "application/json"}
            connection.request("POST", "/v1/completions", json.dumps(body), headers)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()

    def wait_for_pair(self, body: dict) -> None:
        """Waits until a request is answered."""
        deadline = time.monotonic() + START_S
        seen: object = None
        while time.monotonic() < deadline:
            try:
                seen = self.complete(body)
                if seen[0] == 200:
                    return
            except OSError as error:
                seen = error
            time.sleep(0.05)
        raise TimeoutError(f"no pair in {START_S} s: {seen}\n{self.log.read_text()[-2000:]}")
