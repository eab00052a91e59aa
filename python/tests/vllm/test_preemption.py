"""Blocks of a preempted prompt are reused when nobody reads them any more, whatever the host does."""

import os
import select
import signal
from contextlib import suppress
from typing import ClassVar

import pytest
from halves import LAYERS, TAKEN, TOKENS, Pair, compute, step
from kvferry.start import HostProcess
from kvferry.vllm import engine, scheduler, worker
from pair import PLACES
from stops import stop, until_idle
from vllm.v1.request import RequestStatus

FRESH = [7, 9]
# What a worker waits for a host that stands still.
SOON_S = 0.2


@pytest.fixture(params=PLACES)
def pair(request, model, tmp_path):
    made = Pair(model, tmp_path, {"transfer": request.param})
    yield made
    made.close()
    # Stopped ones do not hear that their engine has left.
    while Host.all:
        with suppress(ProcessLookupError):
            Host.all.pop().signal(signal.SIGKILL)


class Host:
    """The process of an engine's host, which the test stops and kills."""

    all: ClassVar[list["Host"]] = []

    def __init__(self, engine):
        self.pid = HostProcess(engine.link.fileno()).pid
        self.file = os.pidfd_open(self.pid)
        self.all.append(self)

    def signal(self, number: int) -> None:
        signal.pidfd_send_signal(self.file, number)

    def has_ended(self) -> bool:
        ended = select.poll()
        ended.register(self.file, select.POLLIN)
        return bool(ended.poll(0))


@pytest.fixture
def soon(monkeypatch):
    """Hosts that stand still are given up early."""
    for module in (engine, scheduler, worker):
        monkeypatch.setattr(module, "STILL_S", SOON_S)


def half_computed(pair) -> Host:
    """The prefill is amid the first chunk of a prompt that a decode waits for."""
    pair.arrive("r")
    pair.begin("r", TOKENS // 2)
    compute(pair.prefill, LAYERS[:2], TAKEN[:1])
    pair.decode.until(lambda: any(pair.decode.blocks(LAYERS[0], TAKEN)[0]))
    return Host(pair.prefill)


def reuse(pair) -> None:
    """What another prompt has in those blocks."""
    for name in LAYERS:
        for block in TAKEN:
            pair.prefill.kv[name][block] = -1.0


def assert_another_is_handed_over(pair, name: str) -> None:
    """Right after this the prefill has a host again."""
    pair.prefill.until(pair.prefill.is_served)
    pair.hand_over(name)


def test_a_preempted_prompt_is_sent_from_its_new_blocks(pair):
    host = half_computed(pair)
    pair.prefill.end()
    pair.prefill.begin(step(preempted=["r"]))
    reuse(pair)
    pair.prefill.end()
    pair.prefill.begin(step({"r": TOKENS}, [("r", 0, (FRESH,))]))
    compute(pair.prefill, LAYERS, FRESH)
    pair.prefill.end()
    pair.assert_handed_over("r", FRESH)
    assert not host.has_ended()


def test_a_host_that_stands_still_is_ended_before_blocks_are_reused(pair, soon):
    host = half_computed(pair)
    stop(host.pid)
    compute(pair.prefill, LAYERS[2:], TAKEN[:1])
    pair.prefill.end()
    assert not host.has_ended()
    pair.prefill.begin(step(preempted=["r"]))
    assert host.has_ended()
    reuse(pair)
    pair.prefill.end()
    # That it has what it asked for nobody tells it.
    assert not pair.decode.outcome("r")
    assert_another_is_handed_over(pair, "s")


@pytest.mark.parametrize("stands_still", [False, True])
def test_a_preempted_prompt_that_ends_before_the_next_step_is_waited_for(pair, soon, stands_still):
    """vLLM preempts all that run when its prefix cache is reset, and clients leave meanwhile."""
    host = half_computed(pair)
    pair.prefill.end()
    if stands_still:
        stop(host.pid)
    assert pair.prefill.finish("r", ([],), RequestStatus.FINISHED_ABORTED)[0]
    pair.prefill.begin(step(preempted=["r"]))
    half = pair.prefill.scheduler.schedulers[0]
    assert host.has_ended() if stands_still else "r" not in half.held
    reuse(pair)
    pair.prefill.end()
    assert not pair.decode.outcome("r")
    assert_another_is_handed_over(pair, "s")


def test_a_decode_that_stands_still_takes_nothing_out_of_reused_blocks(soon, model, tmp_path):
    """It is who copies what is pushed on one machine, and it goes on later."""
    pair = Pair(model, tmp_path)
    host = half_computed(pair)
    decode = Host(pair.decode)
    stop(decode.pid)
    compute(pair.prefill, LAYERS[2:], TAKEN[:1])
    pair.prefill.end()
    # Of what it has not begun to send nobody reads.
    until_idle(host.pid)
    pair.prefill.begin(step(preempted=["r"]))
    assert host.has_ended()
    reuse(pair)
    pair.prefill.end()
    decode.signal(signal.SIGCONT)
    assert not pair.decode.outcome("r")
    assert_another_is_handed_over(pair, "s")
    pair.close()


@pytest.mark.parametrize("when", ["before", "while it is waited for"])
def test_a_host_that_is_killed_is_not_waited_for(pair, monkeypatch, when):
    host = half_computed(pair)
    pair.prefill.end()
    if when == "before":
        host.signal(signal.SIGKILL)
    else:
        link = pair.prefill.worker.workers[0].line.link
        stop(host.pid)

        class Killed:
            """Of the link, what the worker waits by."""

            def __getattr__(self, name):
                return getattr(link, name)

            def wait(self, seconds):
                host.signal(signal.SIGKILL)
                return link.wait(seconds)

        monkeypatch.setattr(pair.prefill.worker.workers[0].line, "link", Killed())
    pair.prefill.begin(step(preempted=["r"]))
    assert host.has_ended()
    reuse(pair)
    pair.prefill.end()
    assert not pair.decode.outcome("r")
    assert_another_is_handed_over(pair, "s")


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_host_that_is_given_up_has_ended(pair, role):
    half_computed(pair)
    side = getattr(pair, role)
    host = Host(side)
    stop(host.pid)
    side.scheduler.schedulers[0].line.lost(RuntimeError("a mistake of the test"))
    assert host.has_ended()


@pytest.mark.parametrize("half", ["scheduler", "worker"])
def test_a_host_that_stands_still_does_not_hold_up_who_tells_it_more(soon, model, tmp_path, half):
    pair = Pair(model, tmp_path)
    host = half_computed(pair)
    stop(host.pid)
    # Until its socket is full.
    while not host.has_ended():
        if half == "worker":
            pair.prefill.worker.workers[0]._tell(1)
        else:
            pair.prefill.scheduler.schedulers[0]._tell("finished", "another", "stop")
    assert not pair.decode.outcome("r")
    pair.close()
