"""Hooks that meet a mistake of their own: vLLM hears nothing of it, and no request waits for ever."""

import os
import signal
import time
from types import SimpleNamespace

import native
import pytest
from halves import LAYERS, TAKEN, TOKENS, Pair, compute
from kvferry.start import HostProcess
from kvferry.vllm.scheduler import Leg, Scheduler
from kvferry.vllm.worker import Worker
from stops import stop

REQUEST = SimpleNamespace(request_id="r", kv_transfer_params={"do_remote_prefill": True})
# What each hook is called with, and what it answers when it fails.
SCHEDULER = {
    "arrived": ((REQUEST,), None),
    "matched": ((REQUEST, 0), (0, False)),
    "allocated": ((REQUEST, None, 5), None),
    "step": ((SimpleNamespace(preempted_req_ids=["r"]), True), (None, 0, [], [], [], [], 7)),
    "deliver": ((None,), None),
    "stats": ((), None),
    "hears": ((0.0,), True),
}
WORKER = {"computed": (1, 1, "l"), "step_over": (1,), "wait_for_preempted": (["r"],)}


def broken(cls, **more):
    """Without what its hooks need; with a line that notes why the host is given up."""
    half = cls.__new__(cls)
    lost = []
    half.line = SimpleNamespace(lost=lost.append)
    vars(half).update(more)
    return half, lost


def scheduler(produces: bool):
    sets = {name: set() for name in ("awaited", "failed", "over", "told")}
    return broken(Scheduler, produces=produces, leased=[], lease_s=30.0, lost_host=7, **sets)


@pytest.mark.parametrize("hook", SCHEDULER)
def test_a_scheduler_hook_that_fails_gives_up_the_host(hook):
    half, lost = scheduler(produces=False)
    args, answer = SCHEDULER[hook]
    assert getattr(half, hook)(*args) == answer
    assert len(lost) == 1
    # Blocks that were allocated for a load are answered for.
    waits = {"r"} if hook == "allocated" else set()
    assert (half.awaited, half.failed) == (waits, waits)


def test_blocks_of_a_finished_prefill_stay_while_others_may_read_them():
    half, lost = scheduler(produces=True)
    assert half.finished(REQUEST, ([1],)) == (True, None)
    [(until, requests)] = half.leased
    assert (until > time.monotonic() + 29, requests, len(lost)) == (True, {"r"}, 1)
    half, lost = scheduler(produces=False)
    assert (half.finished(REQUEST, ([1],)), half.leased, len(lost)) == ((False, None), [], 1)


def test_what_is_told_of_a_request_that_has_ended_is_dropped():
    told = dict.fromkeys(("loading", "held", "gone", "open"), '{"why": "w"}')
    half, _ = scheduler(produces=False)
    half.line.link = SimpleNamespace(told=lambda request: told.pop(request, None))
    half.legs = {"loading": Leg(5, loading=True, ended=True), "open": Leg(5)}
    half.held, half.free, half.loaded = {"held"}, set(), set()
    half._apply("load_failed", "loading", ("warning", "w"))
    for request in ("held", "gone", "open"):
        half._apply("rejected", request, ("warning", "w"))
    assert (set(told), set(half.legs)) == ({"open"}, {"open"})
    assert (half.free, half.loaded, half.failed) == ({"held"}, {"loading"}, set())
    assert half.finished(SimpleNamespace(request_id="open"), ()) == (False, {"why": "w"})
    assert (told, half.legs) == ({}, {})


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("whose", ["nobody's", "a decode's"])
def test_parameters_of_no_use_cost_no_host(model, tmp_path, whose, is_late):
    """Also if the prompt ends before the host could say so."""
    pair = Pair(model, tmp_path)
    link = pair.prefill.link
    host = HostProcess(link.fileno()).pid
    wrong = {"kv_transfer_params": {"do_remote_decode": True, "kvferry": {"key": 7}}}
    if is_late:
        stop(host)
    pair.prefill.arrive("r", native.to_decode(pair, native.key()) if whose == "a decode's" else wrong, TOKENS)
    pair.prefill.begin(pair.step("r"))
    compute(pair.prefill, LAYERS)
    pair.prefill.end()
    if not is_late:
        pair.prefill.until(lambda: pair.prefill.scheduler.schedulers[0].legs["r"].over)
    keeps, told = pair.prefill.finish("r", (TAKEN,))
    assert (keeps, told is None) == (is_late, is_late)
    os.kill(host, signal.SIGCONT)
    pair.prefill.until(lambda: not keeps or "r" in pair.prefill.freed)
    assert pair.prefill.link is link
    pair.hand_over("s")
    pair.close()


def test_parameters_that_are_too_long_cost_no_host(model, tmp_path):
    """More than a message to the host can have."""
    pair = Pair(model, tmp_path)
    links = [engine.link for engine in pair.engines]
    flags = {"do_remote_decode": True, "do_remote_prefill": True}
    for engine in pair.engines:
        engine.arrive("r", {"kv_transfer_params": flags | {"more": "x" * (65 << 20)}}, TOKENS)
    pair.begin("r")
    compute(pair.prefill, LAYERS)
    pair.prefill.end()
    assert pair.prefill.finish("r", (TAKEN,)) == (False, None)
    assert not pair.decode.outcome("r")
    pair.hand_over("s")
    assert [engine.link for engine in pair.engines] == links
    pair.close()


@pytest.mark.parametrize("hook", WORKER)
def test_a_worker_hook_that_fails_gives_up_the_host(hook):
    half, lost = broken(Worker)
    getattr(half, hook)(*WORKER[hook])
    assert len(lost) == 1
