"""Events behind the kernels of a GPU, of which there is none here: the test says what is done."""

import itertools

import pytest
import torch
from kvferry.vllm.kernels import Kernels


class Event:
    numbers = itertools.count(1)

    def __init__(self):
        self.cuda_event = next(self.numbers)
        self.records = 0

    def record(self):
        self.records += 1


@pytest.fixture
def kernels(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Event)
    return Kernels()


def test_an_event_is_used_again_when_it_was_seen_and_not_before(kernels):
    first, second = kernels.mark(0), kernels.mark(0)
    assert first != second
    third = kernels.mark(0)
    assert third not in (first, second)
    # Of three, the oldest was seen.
    assert kernels.mark(1) == first
    assert kernels.mark(1) not in (first, second, third)
    assert {kernels.mark(4), kernels.mark(4), kernels.mark(4)} == {first, second, third}


def test_each_event_is_recorded_when_it_is_given_out(kernels):
    given = [kernels.mark(seen) for seen in (0, 1, 2)]
    assert len(set(given)) == 1
    assert kernels.used[0].records == 3
