"""What wires do to a fleet on four hosts: each answer is right or says why there is none, each request ends, and when the wires are
whole again all is served again."""

import os
import random
import re
import time
from contextlib import ExitStack
from dataclasses import dataclass

import pytest
from fleet import HANG_S, Clients, Fleet
from wires import Wires

HOSTS = ["r", "p0", "p1", "d0"]
# How long a fault lasts: longer than what silence may take until a peer is held lost.
FAULT_S = 6.0
# In a row, so that both prefills have their turn.
SERVED = 12
SOAK_S = float(os.environ.get("KVFERRY_HOSTS_S", "60"))
SEED = int(os.environ.get("KVFERRY_HOSTS_SEED", "1"))


def between(one: str, other: str) -> list[str]:
    return [way(one, other), way(other, one)]


def way(one: str, other: str) -> str:
    return f'iifname "{one}" oifname "{other}"'


FAULTS = {
    "nothing": lambda _: ExitStack(),
    "cable of the decode pulled": lambda wires: wires.pulled("d0"),
    "cable of a prefill pulled": lambda wires: wires.pulled("p0"),
    "cable of the router pulled": lambda wires: wires.pulled("r"),
    "prefill and decode cut": lambda wires: wires.dropping(*between("p0", "d0")),
    "nothing from prefill to decode": lambda wires: wires.dropping(way("p0", "d0")),
    "nothing from decode to prefill": lambda wires: wires.dropping(way("d0", "p0")),
    "nothing from router to decode": lambda wires: wires.dropping(way("r", "d0")),
    "nothing from decode to router": lambda wires: wires.dropping(way("d0", "r")),
    "2 % of packets of the decode lost": lambda wires: wires.dropping(
        *(f'{end} "d0" numgen random mod 100 < 2' for end in ("iifname", "oifname"))
    ),
    "100 Mbit/s at the decode": lambda wires: wires.slow("d0", "100mbit"),
    "packets over 1500 B of the decode vanish": lambda wires: wires.narrow("d0", 1500),
}


@pytest.fixture(scope="module", params=["push", "pull"])
def fleet(request, tmp_path_factory):
    wires = Wires(HOSTS)
    made = None
    try:
        made = Fleet(wires, request.param, tmp_path_factory.mktemp(request.param))
        yield made
    finally:
        if made:
            made.close()
        wires.close()


@dataclass
class Outcome:
    """What a fault did to the requests."""

    clients: Clients
    healed: float
    recovered: float | None = None

    def cells(self, mode: str, name: str) -> list[str]:
        answers = self.clients.answers
        failed = sum(answer.status not in (200, None) for answer in answers)
        longest = max(answer.ended - answer.begun for answer in answers)
        hung, wrong = self.count(lambda it: it.status is None), self.count(lambda it: it.is_wrong())
        recovered = "never" if self.recovered is None else f"{self.recovered:.1f}"
        return [mode, name, str(len(answers)), str(failed), f"{longest:.1f}", str(hung), str(wrong), recovered]

    def count(self, what) -> int:
        return sum(map(what, self.clients.answers))


def suffer(fleet: Fleet, fault, seconds: float) -> Outcome:
    with Clients(fleet) as clients:
        until(lambda: clients.served_since(0.0, SERVED))
        with fault:
            begun = time.monotonic()
            until(lambda: time.monotonic() - begun >= seconds)
        outcome = Outcome(clients, healed=time.monotonic())
        if until(lambda: clients.served_since(outcome.healed, SERVED)):
            outcome.recovered = time.monotonic() - outcome.healed
    return outcome


def until(what) -> bool:
    """False if it did not come true in the time that a request may take."""
    begun = time.monotonic()
    while not what():
        if time.monotonic() - begun > HANG_S:
            return False
        time.sleep(0.05)
    return True


def judge(fleet: Fleet, outcome: Outcome) -> None:
    assert outcome.count(lambda it: it.is_wrong()) == 0, "a wrong answer"
    assert outcome.count(lambda it: it.status is None) == 0, f"a request that has no outcome after {HANG_S:g} s"
    assert outcome.recovered is not None, "not served again"
    why = [answer.why for answer in outcome.clients.answers if answer.status != 200]
    assert all(re.search(r'"(message|error)"', text) for text in why), why
    # Who has lost a peer keeps its blocks for as long as that may still read or write them.
    assert until(lambda: set(fleet.held().values()) == {"0"}), fleet.held()


@pytest.mark.parametrize("name", FAULTS)
def test_each_answer_is_right_and_all_is_served_again(fleet, row, name):
    outcome = suffer(fleet, FAULTS[name](fleet.wires), 0.0 if name == "nothing" else FAULT_S)
    row(outcome.cells(fleet.mode, name))
    judge(fleet, outcome)


class Drawn(ExitStack):
    """Up to two faults at a time, which come and go."""

    def __init__(self, fleet: Fleet, seconds: float):
        super().__init__()
        self.fleet, self.seconds = fleet, seconds

    def __enter__(self) -> "Drawn":
        random_ = random.Random(f"{SEED} {self.fleet.mode}")
        names = [name for name in FAULTS if name != "nothing"]
        end = time.monotonic() + self.seconds
        while time.monotonic() < end:
            with ExitStack() as faults:
                for name in random_.sample(names, random_.choice([1, 1, 2])):
                    faults.enter_context(FAULTS[name](self.fleet.wires))
                time.sleep(random_.uniform(0.2, 8.0))
            time.sleep(random_.uniform(0.0, 4.0))
        return self


@pytest.mark.wide
def test_whatever_wires_do_passes(fleet, row):
    outcome = suffer(fleet, Drawn(fleet, SOAK_S), 0.0)
    row(outcome.cells(fleet.mode, f"drawn for {SOAK_S:g} s, seed {SEED}"))
    judge(fleet, outcome)
