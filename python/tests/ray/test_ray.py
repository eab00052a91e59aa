"""KvferryConnector in both servers of Ray Serve's PD builder, in pull, which is the mode that its legs allow."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import model as tiny
import pytest
from client import Refused, metric, post
from pair import ROLES, prompt, request, tokens
from ports import free_ports
from server import BATCHED_TOKENS, BLOCK_TOKENS, ENVIRONMENT, KV_BYTES, START_S, Process, Server

ENGINE = {
    "enforce_eager": True,
    "dtype": "float32",
    "max_model_len": 4096,
    "block_size": BLOCK_TOKENS,
    "kv_cache_memory_bytes": KV_BYTES,
    "max_num_batched_tokens": BATCHED_TOKENS,
}


class App(Process):
    """The process that starts Ray's, and ends them."""

    def __init__(self, model: Path, logs: Path):
        [self.port, prefill, decode] = free_ports(3)
        self.metrics = dict(zip(ROLES, (prefill, decode), strict=True))
        # Ray's sockets have long names.
        self.folder = Path(tempfile.mkdtemp(prefix="kvray-"))
        told = {
            "model": str(model),
            "port": self.port,
            "folder": str(self.folder),
            "metrics": self.metrics,
            "engine": ENGINE,
        }
        command = [sys.executable, str(Path(__file__).with_name("app.py")), json.dumps(told)]
        env = os.environ | ENVIRONMENT | {"RAY_USAGE_STATS_ENABLED": "0"}
        super().__init__("Ray", command, env, logs / "ray.log")

    def ready(self) -> "App":
        self.wait_until("it serves", lambda: "\nready\n" in self.log.read_text(errors="replace"), START_S)
        # Limits of seconds, which a machine passes that is still busy with the start.
        self.wait_until("its hosts have met", self._is_served, START_S)
        return self

    def _is_served(self) -> bool:
        try:
            self.complete(request([1]))
        except Refused:
            return False
        return True

    def stop(self) -> None:
        self.child.terminate()
        try:
            self.child.wait(60)
        except subprocess.TimeoutExpired:
            pass
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def complete(self, body: dict) -> list[int]:
        return tokens(post(self.port, "/v1/completions", body | {"model": "tiny"}, 120))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tiny.write(tmp_path_factory.mktemp("model")), tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="module")
def reference(place):
    model, logs = place
    server = Server("reference", model, free_ports(1)[0], logs / "reference.log", None, {})
    yield server
    server.stop()


@pytest.fixture(scope="module")
def app(place, reference):
    app = App(*place)
    try:
        reference.ready()
        yield app.ready()
    finally:
        app.stop()


def spoken(app: App) -> float:
    """Transfers of the decode in the native dialect."""
    try:
        return metric(app.metrics["decode"], "kvferry_transfers_spoken_total", 'dialect="native"')
    except KeyError:
        return 0


@pytest.mark.parametrize("length", [33, 257, 2500])
def test_same_tokens_as_a_single_server_and_native(app, reference, length):
    before, ids = spoken(app), prompt(length, "ray")
    assert app.complete(request(ids)) == tokens(reference.complete(request(ids)))
    app.wait_until("it was native", lambda: spoken(app) == before + 1, 30)


def test_eight_at_a_time(app, reference):
    before, prompts = spoken(app), [prompt(100 + 211 * n, "ray") for n in range(8)]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda ids: app.complete(request(ids)), prompts))
    assert answers == [tokens(reference.complete(request(ids))) for ids in prompts]
    app.wait_until("all were native", lambda: spoken(app) == before + len(prompts), 30)
