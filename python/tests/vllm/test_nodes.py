"""DP ranks on several nodes: who a rank is to the router, and what has to be said of it."""

import copy

import pytest
from halves import config
from kvferry.vllm import engine
from kvferry.vllm.check import check

ROUTER = {"proxy_ip": "127.0.0.1", "proxy_ping_port": 1, "http_port": 8100}

# Rank, ranks, rank on the node, ranks of the node, and which API servers there are; then the rank that
# requests name. Each of a dense model's ranks is told that it is the only one.
RANKS = {
    "one API server": ((3, 4, 1, 2, ""), (3, 4)),
    "one API server, a dense model": ((1, 1, 0, 1, ""), (1, 2)),
    "one of each node": ((3, 4, 1, 2, "hybrid"), (1, 2)),
    "one of each node, a dense model": ((3, 1, 1, 1, "hybrid"), (1, 2)),
    "one of each rank": ((3, 4, 0, 1, "external"), (0, 1)),
}


def parallel(model, index: int, size: int, local: int, size_local: int, servers: str):
    made = copy.copy(config(model, "prefill", {}).parallel_config)
    made.data_parallel_index, made.data_parallel_size = index, size
    made.data_parallel_rank_local, made.data_parallel_size_local = local, size_local
    made.data_parallel_hybrid_lb = servers == "hybrid"
    made.data_parallel_external_lb = servers == "external"
    return made


@pytest.mark.parametrize("name", RANKS)
def test_requests_name_the_rank_as_its_api_server_does(name, model):
    given, named = RANKS[name]
    made = parallel(model, *given)
    assert engine._dp(made, f"engine_dp{made.data_parallel_index}") == named


def test_a_rank_without_an_api_server_on_its_node_says_where_it_is(model):
    made = config(model, "prefill", ROUTER, parallel_config=parallel(model, 0, 4, None, 2, ""))
    check(made, before_start=True)
    made.parallel_config.data_parallel_rank = 2
    with pytest.raises(ValueError, match="http_ip is not given: .* API server of the first node"):
        check(made, before_start=True)
    # Not of a rank's own process, which vLLM tells another rank.
    check(made)
    made.kv_transfer_config.kv_connector_extra_config["http_ip"] = "127.0.0.1"
    check(made, before_start=True)
    made.kv_transfer_config.kv_connector_extra_config = {}
    check(made, before_start=True)
    made.kv_transfer_config.kv_connector_extra_config = ROUTER | {"http_ip": "0.0.0.0"}
    with pytest.raises(ValueError, match="http_ip = .*: the router is told it and cannot connect"):
        check(made, before_start=True)
