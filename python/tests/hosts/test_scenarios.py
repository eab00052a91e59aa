"""Faults of the scenario files, as far as wires can have them, between hosts of their own."""

import os
import subprocess
import tomllib
from pathlib import Path

import pytest
from faults import SEED
from fleet import Fleet, served
from outcome import judge, suffer
from scenario import LASTING, PACKETS, UNPLAYABLE, Plan, Play, drawn, reason

HOSTS = ["r", "p0", "p1", "p2", "d0", "d1"]
SCENARIOS = Path(__file__).parents[3] / "scenarios"
FILES = sorted(SCENARIOS.rglob("*.toml"))
# Of a file, the first of so many seeds that draws the mode in which the file has its turn, and has a fault for wires.
SEEDS = 20


def faults(file: Path) -> list[dict]:
    return tomllib.loads(file.read_text()).get("fault", [])


def is_of_wires(kind: str) -> bool:
    return kind.startswith("wire.") or kind in LASTING


WITH = [file for file in FILES if any(is_of_wires(it["kind"]) for it in faults(file))]


def planned(file: Path, mode: str) -> Plan:
    plans = [Plan(drawn(file, SEED), HOSTS)]
    while len(plans) < SEEDS and not (plans[-1].deeds and plans[-1].mode == mode):
        plans.append(Plan(drawn(file, SEED + len(plans)), HOSTS))
    # It may have but one mode, or nothing for wires.
    return next((plan for plan in [plans[-1], *plans] if plan.deeds), plans[0])


@pytest.fixture(scope="module")
def plans() -> dict[Path, Plan]:
    return {file: planned(file, ("push", "pull")[number % 2]) for number, file in enumerate(WITH)}


def test_each_kind_of_fault_is_played_or_has_a_reason_not_to_be():
    listed = subprocess.run([os.environ["KVFERRY_BIN"], "list", "faults"], check=True, capture_output=True, text=True)
    kinds = [line.split()[1] for line in listed.stdout.splitlines()]
    assert len(kinds) > 40
    assert {kind for kind in kinds if reason(kind) is None} == PACKETS.keys() | LASTING.keys()
    assert {kind for them in UNPLAYABLE.values() for kind in them} <= set(kinds)


def test_a_kind_that_nobody_knows_is_refused():
    run = {"seed": 1, "fault": [{"kind": "wire.tangled", "at": "1ms"}]}
    with pytest.raises(ValueError, match="wire.tangled: neither"):
        Plan(run, HOSTS)


def test_each_fault_of_each_file_is_played_or_says_why(plans, left):
    for file, plan in plans.items():
        assert plan.deeds or plan.left, file
        for line in plan.left:
            left(line)
    kinds = {deed.kind for plan in plans.values() for deed in plan.deeds}
    assert kinds == PACKETS.keys() | LASTING.keys()


@pytest.fixture(scope="module", params=["push", "pull"])
def fleet(request, tmp_path_factory):
    with served(HOSTS, request.param, tmp_path_factory.mktemp(request.param), SEED) as fleet:
        yield fleet


@pytest.mark.parametrize("file", WITH, ids=lambda file: str(file.relative_to(SCENARIOS)))
def test_what_a_file_does_to_wires_passes(fleet: Fleet, row, plans, file):
    plan = plans[file]
    if plan.mode != fleet.mode or not plan.deeds:
        pytest.skip("; ".join(plan.left) or f"is of {plan.mode}")
    play = Play(fleet, plan)
    outcome = suffer(fleet, play, 0.0)
    name = f"{file.relative_to(SCENARIOS)}: {sum(play.begun.values())} played, {len(plan.left)} not"
    row(outcome.cells(fleet.mode, name))
    judge(fleet, outcome)
    assert play.begun, "nothing was played"
    assert all(play.met[kind] for kind in play.begun if kind in PACKETS), f"rules that no packet met: {play.met}"
