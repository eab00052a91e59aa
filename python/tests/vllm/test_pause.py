"""Pause of an engine core whose requests wait for KV: when a step is held back, and what ends the pause."""

import queue
import time
from collections import deque
from types import SimpleNamespace

import pytest
from halves import step
from kvferry.vllm.pause import Pause
from kvferry.vllm.scheduler import Leg, Scheduler
from vllm.v1.metrics.stats import SchedulerStats


class Half:
    """One half of a connector, with `waiting_for_kv` requests, whose host has news after so many looks."""

    def __init__(self, waiting_for_kv: int = 1, looks: int = 3, orders: bool = False, held=()):
        self.waiting_for_kv, self.left, self.orders, self.held = waiting_for_kv, looks, orders, set(held)
        self.leased = ()

    def waiting(self) -> int:
        return self.waiting_for_kv

    def has_orders(self) -> bool:
        return self.orders

    def hears(self, patience: float) -> bool:
        self.left -= 1
        return self.left == 0


class EngineCore:
    """The parts of vLLM's that a pause needs. It has so many running and waiting requests."""

    def __init__(self, running: int = 0, waiting: int = 1):
        self.input_queue, self.output_queue = queue.Queue(), queue.Queue()
        self.batch_queue = None
        self.scheduler = SimpleNamespace(
            get_request_counts=lambda: (running, waiting),
            make_stats=lambda: SchedulerStats(num_waiting_reqs=waiting),
        )

    def step(self, pause: Pause, output, *halves) -> bool:
        return pause.hold(output, halves)


def pause(ranks: int = 1, connector: str = "KvferryConnector") -> Pause:
    return Pause(
        SimpleNamespace(
            parallel_config=SimpleNamespace(data_parallel_size=ranks),
            kv_transfer_config=SimpleNamespace(kv_connector=connector),
        )
    )


@pytest.mark.parametrize("halves", [1, 2])
def test_step_without_tokens_is_held_back_until_a_host_has_news(halves):
    engine, idle = EngineCore(), [Half(0, 9) for _ in range(halves - 1)]
    waiting = Half(looks=3)
    assert engine.step(pause(), step(), *idle, waiting)
    assert waiting.left == 0


def test_step_of_a_prefill_is_held_back_while_a_host_holds_its_blocks():
    assert EngineCore(waiting=0).step(pause(), step(), Half(0, held=["r"]))


def test_message_of_a_client_ends_the_pause():
    engine, half = EngineCore(), Half(looks=-1)
    hears = half.hears

    def arrives(patience: float) -> bool:
        engine.input_queue.put("a request")
        return hears(patience)

    half.hears = arrives
    assert engine.step(pause(), step(), half)
    assert (half.left, engine.input_queue.qsize()) == (-2, 1)


def test_metrics_of_the_step_are_sent_before_the_pause():
    engine = EngineCore(waiting=4)
    assert engine.step(pause(), step(), Half(4))
    [(client, outputs)] = engine.output_queue.queue
    assert (client, outputs.scheduler_stats.num_waiting_reqs, outputs.outputs) == (0, 4, [])


OUTPUTS = {
    "it computes": step({"r": 1}),
    "a request was preempted": step(preempted=["r"]),
    "a request has finished": SimpleNamespace(**vars(step()) | {"finished_req_ids": {"r"}}),
}


@pytest.mark.parametrize("why", OUTPUTS)
def test_step_that_the_workers_need_is_due_at_once(why):
    half = Half()
    assert not EngineCore().step(pause(), OUTPUTS[why], half)
    assert half.left == 3


@pytest.mark.parametrize(
    "engine, half",
    [
        pytest.param(EngineCore(), Half(orders=True), id="news for the workers"),
        pytest.param(EngineCore(waiting=2), Half(), id="a request that waits for something else"),
        pytest.param(EngineCore(running=1), Half(), id="a running request"),
        pytest.param(EngineCore(waiting=0), Half(0), id="nothing to wait for"),
    ],
)
def test_step_is_due_at_once_if_there_is(engine, half):
    assert not engine.step(pause(), step(), half)
    assert half.left == 3


def test_step_is_due_at_once_if_a_batch_is_under_way():
    engine = EngineCore()
    engine.batch_queue = ["a batch"]
    assert not engine.step(pause(), step(), Half())


@pytest.mark.parametrize("other", [{"ranks": 2}, {"connector": "MultiConnector"}], ids=str)
def test_engines_that_step_with_others_are_not_held_back(other):
    assert not EngineCore().step(pause(**other), step(), Half())


def test_engine_core_of_another_form_steps_on_and_is_warned_of_once(monkeypatch):
    warnings, made = [], pause()
    monkeypatch.setattr("kvferry.vllm.pause.logger", SimpleNamespace(warning=lambda *args: warnings.append(args)))
    assert [made.hold(step(), [Half()]) for _ in range(3)] == [False] * 3
    assert len(warnings) == 1 and "input_queue" in warnings[0][1]


LEGS = {
    "it waits for a prefill": (Leg(5), 1),
    "it loads": (Leg(5, may_allocate=True, allocated=True, loading=True), 1),
    "it may allocate": (Leg(5, may_allocate=True), 0),
    "it has its KV": (Leg(5, may_allocate=True, allocated=True), 0),
    "it has ended while it loads": (Leg(5, allocated=True, loading=True, ended=True), 0),
}


def scheduler(**more) -> Scheduler:
    half = Scheduler.__new__(Scheduler)
    sets = {name: set() for name in ("failed", "over", "free", "loaded", "held")}
    link = SimpleNamespace(wait=lambda patience: [])
    line = SimpleNamespace(current=lambda: link, link=link, lost=lambda error: None)
    vars(half).update(produces=False, legs={}, leased=[], lost_host=0, line=line, **sets)
    vars(half).update(more)
    return half


@pytest.mark.parametrize("why", LEGS)
def test_request_waits_for_the_host_if(why):
    leg, waiting = LEGS[why]
    assert scheduler(legs={"r": leg}).waiting() == waiting
    assert scheduler(legs={"r": leg}, produces=True).waiting() == 0


def test_decode_hears_that_blocks_may_be_allocated():
    half = scheduler(legs={"r": Leg(5)})
    assert not half.hears(0.001)
    half.line.link.wait = lambda patience: [("allocate", "r", None)]
    assert half.hears(0.001)
    assert half.waiting() == 0


def test_end_of_a_lease_is_news():
    half = scheduler(leased=deque([(time.monotonic(), {"r"})]))
    assert half.hears(0.001)
    assert half.free == {"r"}


def test_loss_of_the_host_is_news():
    half = scheduler(legs={"r": Leg(5)})
    half.line.current = lambda: setattr(half, "lost_host", 7)
    assert half.hears(0.001)
