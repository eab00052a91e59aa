"""A prefill whose DP ranks are on two nodes, of which one has the API server. Both are addresses of this
machine."""

import json
import os
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
from client import metric
from conftest import at_once, prompt
from pair import KVFERRY, ROLES, Pair, request, served, tokens
from ports import free_ports
from server import ENVIRONMENT, FLAGS, Process

pytestmark = pytest.mark.wide

NODES = ["127.0.0.1", "127.0.0.2"]


class Nodes(Pair):
    """With a second node of the prefill."""

    def __init__(self, mode, model, logs, discovery, connectors, env=None, **more):
        [port] = free_ports(1)
        ranks = ["--data-parallel-size=2", "--data-parallel-size-local=1"]
        ranks += [f"--data-parallel-address={NODES[0]}", f"--data-parallel-rpc-port={port}"]
        super().__init__(mode, model, logs, discovery, connectors, env, flags={"prefill": ranks}, **more)
        extra = self.prefill.extra | {"host_ip": NODES[1], "http_ip": NODES[0]}
        kv = self.prefill.kv | {"kv_connector_extra_config": extra}
        command = [sys.executable, str(Path(__file__).with_name("headless.py")), "--model", str(model), *FLAGS]
        command += ["--no-async-scheduling", "--headless", "--data-parallel-start-rank=1", *ranks]
        command += ["--kv-transfer-config", json.dumps(kv)]
        log = logs / f"{kv['engine_id']}-second.log"
        self.second = Process("second node", command, os.environ | ENVIRONMENT | (env or {}), log)

    def stop(self) -> None:
        super().stop()
        self.second.stop()


@contextmanager
def servers(mode: str, place):
    connectors = dict.fromkeys(ROLES, KVFERRY)
    with served(f"nodes-{mode.lower()}", place, mode, connectors, make=Nodes) as pair:
        yield pair


@pytest.fixture(scope="module", params=["WRITE", "READ"])
def own(request, ahead):
    with ahead.servers(servers, request.param) as pair:
        yield pair


@pytest.mark.parametrize("length", [1, 33, 257, 2500])
def test_same_tokens_as_a_single_server(own, reference, length):
    ids = prompt(length, f"nodes {own.mode}")
    assert tokens(own.router.complete(request(ids))) == reference(ids)


def test_the_ranks_of_both_nodes_hand_over(own, reference):
    answers, expected = at_once(own, reference, f"nodes {own.mode}")
    assert answers == expected
    assert "leg failed" not in own.router.log.read_text()
    for rank in range(2):
        labels = f'engine="{rank}"', 'outcome="done"'
        assert metric(own.prefill.port, "vllm:kvferry_transfers_total", *labels) > 0
    for log, node in ((own.prefill.log, NODES[0]), (own.second.log, NODES[1])):
        assert f'handshake="tcp://{node}:' in log.read_text()


def test_afterwards_every_block_is_free(own):
    own.prefill.wait_idle(90)
    own.decode.wait_idle(90)
