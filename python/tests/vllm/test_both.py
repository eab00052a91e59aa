"""An engine that is prefill and decode (`kv_both`), with a host for each: two of them, without vLLM's
servers."""

import copy
import os
import signal

import pytest
from conftest import MODES, wide
from halves import LAYERS, TAKEN, TOKENS, Blocks, Engine, Pair, compute, config, step
from kvferry.start import HostProcess
from kvferry.vllm.check import check
from kvferry.vllm.roles import by_role
from pair import PLACES
from ports import free_ports

# Blocks of what an engine hands over, while it has others for what it takes.
GIVEN = [1, 9]


@pytest.fixture(params=wide([(mode, place) for mode in MODES for place in PLACES], 2), ids="-".join)
def pair(request, model, tmp_path):
    mode, place = request.param
    made = Pair(model, tmp_path, {"transfer": place}, mode, roles=("kv_both", "kv_both"))
    yield made
    made.close()


def other_way(pair):
    """The same pair, whose decode is the prefill."""
    turned = copy.copy(pair)
    turned.prefill, turned.decode = pair.decode, pair.prefill
    return turned


def hand_over(pair, names: list[str]) -> None:
    """Of each engine one prompt to the other, in the same steps."""
    ways = list(zip(names, (pair, other_way(pair)), strict=True))
    for name, way in ways:
        way.arrive(name)
    for name, way in ways:
        way.prefill.begin(step({name: TOKENS}, [(name, 0, (GIVEN,))]))
        compute(way.prefill, LAYERS, GIVEN, of=len(name))
        way.prefill.end()
    for name, way in ways:
        way.prefill.finish(name, (GIVEN,))
        request = way.decode.requests[name]
        way.prefill.until(lambda request=request, way=way: known(way.decode, request))
        tokens = way.decode.matched(name)
        way.decode.scheduler.update_state_after_alloc(request, Blocks((TAKEN,)), tokens)


def known(engine, request) -> bool:
    engine.idle()
    return engine.scheduler.get_num_new_matched_tokens(request, 0)[0] is not None


def settle(pair, name: str, way) -> None:
    """Both engines go on until a prompt has come and its blocks are free."""

    def has_come() -> bool:
        pair.decode.idle()
        return name in way.decode.loaded and name in way.prefill.freed

    pair.prefill.until(has_come)


def test_each_hands_over_to_the_other_at_once(pair):
    hand_over(pair, ["r", "other"])
    for name, way in (("r", pair), ("other", other_way(pair))):
        settle(pair, name, way)
        for layer in LAYERS:
            source, sink = way.prefill.blocks(layer, GIVEN), way.decode.blocks(layer, TAKEN)
            assert source == sink and all(any(block) for block in source), (name, layer)
    for engine in pair.engines:
        told = []
        engine.until(lambda engine=engine, told=told: done(engine, told) == 2 and told[-1]["held"] == 0)


def done(engine, told: list[dict]) -> int:
    """Transfers that the engine told as done, those of both roles together."""
    if (stats := engine.scheduler.get_kv_connector_stats()) is not None:
        told.append(stats.data)
    return sum(data["outcomes"].get("done", 0) for data in told)


def kill_host(engine, half: int):
    """That of one role. The answer tells whether there is another one: a link may not know yet that it has ended."""
    line = engine.scheduler.schedulers[half].line
    link = line.link
    os.kill(HostProcess(link.fileno()).pid, signal.SIGKILL)
    return lambda: engine.is_served() and line.link is not link


def test_a_host_that_ends_costs_the_other_role_nothing(model, tmp_path):
    pair = Pair(model, tmp_path, roles=("kv_both", "kv_both"))
    prefill = pair.prefill.link
    has_another = kill_host(pair.prefill, 1)
    pair.hand_over()
    assert pair.prefill.link is prefill
    # And it comes back.
    pair.prefill.until(has_another)
    turned = other_way(pair)
    turned.arrive("t")
    turned.begin("t", TOKENS // 2)
    has_another = kill_host(turned.decode, 1)
    assert not turned.decode.outcome("t")
    turned.prefill.end()
    turned.decode.until(has_another)
    turned.hand_over("s")
    pair.close()


def test_who_is_told_of_a_request(model, tmp_path):
    engine = Engine(config(model, "kv_both", {}), tmp_path)
    halves = engine.scheduler.schedulers
    both = {"do_remote_decode": True, "do_remote_prefill": True, "transfer_id": "t"}
    both |= {"remote_engine_id": None, "remote_block_ids": None}
    for name, params in (("plain", None), ("other", {"of": "another"}), ("both", both)):
        engine.arrive(name, {"kv_transfer_params": params}, TOKENS)
    assert [list(half.legs) for half in halves] == [["both"], []]
    assert engine.scheduler.get_num_new_matched_tokens(engine.requests["plain"], 0) == (0, False)
    engine.until(lambda: halves[0].legs["both"].over)
    held, answer = engine.finish("both", (TAKEN,))
    assert (held, "of two legs" in answer["kvferry"]["failed"]["why"]) == (False, True)
    engine.close()


def test_where_each_role_listens(model):
    handshake, notify = 6301, 6311
    keys = {"handshake_port": handshake, "notify_port": str(notify), "socket": "/run/k.sock"}
    made = config(model, "kv_both", keys)
    made.parallel_config = copy.copy(made.parallel_config)
    made.parallel_config.tensor_parallel_size = 2
    made.parallel_config.data_parallel_size = 2
    made.parallel_config.data_parallel_size_local = 2
    places = [half.kv_transfer_config.kv_connector_extra_config for half in by_role(made)]
    assert [(at["handshake_port"], int(at["notify_port"])) for at in places] == [(6301, 6311), (6303, 6313)]
    assert [at["socket"] for at in places] == ["/run/k.sock.prefill", "/run/k.sock.decode"]
    check(made)
    # The host of the next DP rank adds a port for each TP rank once more.
    made.parallel_config.data_parallel_index = 1
    places = [half.kv_transfer_config.kv_connector_extra_config for half in by_role(made)]
    assert [at["handshake_port"] for at in places] == [6303, 6305]
    keys["notify_port"] = 6308
    with pytest.raises(ValueError, match="with kv_both 8 ports are taken .* put them 8 apart"):
        check(config(model, "kv_both", keys, parallel_config=made.parallel_config))


def test_both_listen_at_ports_that_were_given(model, tmp_path):
    handshake, notify = free_ports(2, 2)
    made = config(model, "kv_both", {"handshake_port": handshake, "notify_port": notify})
    check(made, before_start=True)
    engine = Engine(made, tmp_path)
    ports = [half.line.link.ports for half in engine.scheduler.schedulers]
    assert ports == [{"handshake_port": handshake + n, "notify_port": notify + n} for n in range(2)]
    engine.close()
