"""What wires do to a fleet on four hosts: each answer is right or says why there is none, each request ends, and when the wires are
whole again all is served again."""

import os

import pytest
from faults import FAULTS, SEED, Drawn
from fleet import served
from outcome import judge, suffer

HOSTS = ["r", "p0", "p1", "d0"]
# How long a fault lasts: longer than what silence may take until a peer is held lost, but for one that is late.
FAULT_S = 6.0
SOAK_S = float(os.environ.get("KVFERRY_HOSTS_S", "60"))


@pytest.fixture(scope="module", params=["push", "pull"])
def fleet(request, tmp_path_factory):
    with served(HOSTS, request.param, tmp_path_factory.mktemp(request.param), SEED) as fleet:
        yield fleet


@pytest.mark.parametrize("name", FAULTS)
def test_each_answer_is_right_and_all_is_served_again(fleet, row, name):
    outcome = suffer(fleet, FAULTS[name](fleet.wires), 0.0 if name == "nothing" else FAULT_S)
    row(outcome.cells(fleet.mode, name))
    judge(fleet, outcome)


@pytest.mark.wide
def test_whatever_wires_do_passes(fleet, row):
    outcome = suffer(fleet, Drawn(fleet, SOAK_S), 0.0)
    row(outcome.cells(fleet.mode, f"drawn for {SOAK_S:g} s, seed {SEED}"))
    judge(fleet, outcome)
