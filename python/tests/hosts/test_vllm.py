"""vLLM's CPU servers with KvferryConnector on hosts of their own: the tokens are those of a single server whatever happens to the
cables, and no request is without an outcome."""

import json
from pathlib import Path

import model
import pytest
from faults import FAULTS, SEED
from fleet import Fleet, served
from outcome import judge, suffer
from pair import prompt, request, tokens
from ports import free_ports
from server import Server
from wires import Wires

HOSTS = ["r", "p0", "d0"]
FAULT_S = 6.0
HTTP = 8000
# On the loopback of each host.
HOST_METRICS = "127.0.0.1:9100"
# Of the prompts, in tokens of 8 KiB of KV each.
LENGTHS = [1, 33, 100, 257, 400, 512, 700, 900, 1100, 1500, 2000, 2500]
KV_BYTES_PER_TOKEN = model.LAYERS * 2 * model.KV_HEADS * model.HEAD_DIM * 4
SUFFERED = [
    "nothing",
    "cable of the decode pulled",
    "nothing from prefill to decode",
    "nothing from decode to prefill",
    "2 % of packets of the decode lost",
    "10 to 30 ms each way, overtaking",
]


class Vllm(Fleet):
    """The router of the others, and a server for each role."""

    def __init__(self, wires: Wires, mode: str, folder: Path, weights: Path, known: list[tuple[list[int], list[int]]]):
        """`known` are prompts and their tokens of a single server."""
        self.weights, self.known = weights, known
        self.servers: dict[str, Server] = {}
        super().__init__(wires, mode, folder)

    def start(self, name: str) -> None:
        if name == "r":
            super().start(name)
            return
        address, role = self.wires.address(name), "prefill" if name.startswith("p") else "decode"
        extra = {
            "transfer": "sidecar",
            "host_ip": address,
            "http_port": HTTP,
            "handshake_port": 0,
            "notify_port": 0,
            "read_mode": self.mode == "pull",
            "proxy_ip": self.wires.address("r"),
            "proxy_ping_port": 36367,
        }
        kv = {
            "kv_connector": "KvferryConnector",
            "kv_connector_module_path": "kvferry.vllm",
            "kv_role": "kv_producer" if role == "prefill" else "kv_consumer",
            # So that an answer is one whose KV came.
            "kv_load_failure_policy": "fail",
            "engine_id": f"{name}-{self.mode}",
            "kv_connector_extra_config": extra,
        }
        env = {
            "KVFERRY_SECRET_FILE": str(self.secret),
            "VLLM_HOST_IP": address,
            "KVFERRY_HOST_METRICS": HOST_METRICS,
        }
        # Listens for the router, and on the host's own loopback for these tests. Each prompt is handed over each time.
        flags = ["--host", "0.0.0.0", "--no-enable-prefix-caching"]
        log = self.folder / f"{name}.log"
        what = (f"{role} {self.mode}", self.weights, HTTP, log, kv, env)
        self.servers[name] = self.wires.on(name, lambda: Server(*what, asynchronous=True, flags=flags))

    def ready(self) -> "Vllm":
        for name, server in self.servers.items():
            self.wires.on(name, server.ready)
        return self

    def close(self) -> None:
        for server in self.servers.values():
            server.stop()
        super().close()

    def body(self, number: int) -> dict:
        return request(self.known[number % len(self.known)][0])

    def kv(self, number: int, answer: dict) -> dict:
        expected = self.known[number % len(self.known)][1]
        return {"digest": tokens(answer), "expected": expected, "source": "transferred"}

    def held(self) -> dict[str, str]:
        """As those of others; vLLM has no more than whether any block is used."""
        idle = {name: self.wires.on(name, server.idle) for name, server in self.servers.items()}
        return {name: "0" if it else "some" for name, it in idle.items()}

    def remembered(self) -> dict[str, str]:
        return super().remembered() | {
            name: self.metric(name, HOST_METRICS, "kvferry_failures_remembered") for name in self.servers
        }


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    return model.write(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def known(weights, tmp_path_factory):
    [port] = free_ports(1)
    single = Server("single", weights, port, tmp_path_factory.mktemp("single") / "log", None, {})
    try:
        single.ready()
        prompts = [prompt(length, "hosts") for length in LENGTHS]
        return [(ids, tokens(single.complete(request(ids)))) for ids in prompts]
    finally:
        single.stop()


@pytest.fixture(scope="module", params=["push", "pull"])
def fleet(request, weights, known, tmp_path_factory):
    def make(*place) -> Vllm:
        return Vllm(*place, weights, known)

    with served(HOSTS, request.param, tmp_path_factory.mktemp(request.param), SEED, make) as fleet:
        yield fleet.ready()


def carried(fleet: Fleet) -> int:
    """Bytes to the decode on its cable."""
    [link] = json.loads(fleet.wires.shown("d0", "-s", "-j", "link", "show", "eth0"))
    return link["stats64"]["rx"]["bytes"]


@pytest.mark.parametrize("name", SUFFERED)
def test_the_tokens_are_those_of_a_single_server(fleet, row, name):
    before = carried(fleet)
    outcome = suffer(fleet, FAULTS[name](fleet.wires), 0.0 if name == "nothing" else FAULT_S)
    row(outcome.cells(f"vLLM {fleet.mode}", name))
    judge(fleet, outcome)
    # No memory that the namespaces share is a path between them.
    least = outcome.count(lambda it: it.status == 200) // len(LENGTHS) * sum(LENGTHS) * KV_BYTES_PER_TOKEN
    assert carried(fleet) - before >= least > 0
