"""One reference server for all tests, one pair of servers per mode, each made while the tests of the
one before run; and the drills that have to come before any other request of a pair, because fault files
count operations from the start."""

import os
import re
import tempfile
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import model as tiny
import pytest
from client import Refused
from pair import MORIIO, ROLES, Pair, prompt, request, served, tokens
from ports import free_ports
from server import BATCHED_TOKENS, Server

MODES = ["WRITE", "READ"]
# What makes the servers of each group of tests, and for what, in the order of the groups.
GROUPS = pytest.StashKey[list]()
# Such as 2/3, with which of three groups of servers that follow each other only the second one is there.
PART = "KVFERRY_VLLM_PART"
RESTARTS = pytest.StashKey[list[list[str]]]()
RESTART_HEADER = ["mode", "policy", "fault", "requests", "failed", "wrong", "longest s", "all s"]

# The first request (one operation per layer) is answered without a copy. A queue that is full
# while the second is posted and a failure in the third only READ survives: in WRITE the connector
# neither tries again nor tells decode, which then waits for ever.
FAULTS = f"""
[[fault]]
kind = "fabric.no_copy"
on = {{ event = "op.posted" }}
times = {tiny.LAYERS}
"""
READ_FAULTS = f"""
[[fault]]
kind = "fabric.queue_full"
on = {{ event = "op.posted", nth = {tiny.LAYERS + 1} }}
lasts = "20ms"
[[fault]]
kind = "fabric.sibling_failure"
on = {{ event = "op.posted", nth = {2 * tiny.LAYERS + 1} }}
"""


def wide(params, narrow: int = 1) -> list:
    """All but the first are more of the same, which `.ci/run` leaves out."""
    params = list(params)
    return params[:narrow] + [pytest.param(it, marks=pytest.mark.wide) for it in params[narrow:]]


def at_once(pair, reference, seed: str, shared: bool = True) -> tuple[list, list]:
    """Tokens of prompts that are sent eight at a time, and what they have to be; some of them with a common
    prefix."""
    prompts = _at_once(seed) if shared else _at_once(seed)[:APART]
    expected = [reference(ids) for ids in prompts]
    with ThreadPoolExecutor(8) as pool:
        answers = pool.map(lambda ids: tokens(pair.router.complete(request(ids))), prompts)
        return list(answers), expected


# Of the prompts below those that have nothing in common.
APART = 8


def _at_once(seed: str) -> list[list[int]]:
    """One of them is longer than what is computed in a step."""
    prompts = [prompt(length, seed) for length in (33, 2500, 700, 1, 2200, 257, 1500, 64)]
    assert any(len(ids) > BATCHED_TOKENS for ids in prompts)
    # The same again, and with a common prefix: cached on one side or on both.
    return [*prompts, prompts[2], prompts[2][:600] + prompt(100, "tail"), prompts[4], prompts[0]]


class Reference:
    """A server without a connector: what the answers have to be."""

    def __init__(self, server: Server):
        self.server = server
        self.known: dict[tuple, list[int]] = {}

    def __call__(self, ids: list[int]) -> list[int]:
        key = tuple(ids)
        if key not in self.known:
            self.known[key] = tokens(self.server.complete(request(ids)))
        return self.known[key]


@dataclass
class Drills:
    """Answers to the first requests of a pair, which met faults."""

    suppressed: list[int]
    queue_full: list[int] | None = None
    failed: str | None = None


@dataclass
class Place:
    """What servers are made with."""

    model: Path
    logs: Path
    reference: Reference
    folder: Callable[[str], Path]
    # What servers are told for a secret of the fleet.
    secret: dict[str, str]


class Ahead:
    """Servers take longer to start than most tests of them, and the tests mostly wait: so the next pair
    starts while the tests of one run."""

    def __init__(self, groups: list, place: Place):
        self._groups = groups
        self._place = place
        self._pool = ThreadPoolExecutor(1)
        self._made: dict[tuple, Future] = {}

    @contextmanager
    def servers(self, make: Callable, param):
        """What `make(param, place)` yields; `make` is the module's `servers`."""
        group = make, param
        self._start(group)
        stack, pair = self._made.pop(group).result()
        with stack:
            after = self._groups.index(group) + 1
            for following in self._groups[after : after + 1]:
                self._start(following)
            yield pair

    def _start(self, group: tuple) -> None:
        if group not in self._made:
            self._made[group] = self._pool.submit(self._make, *group)

    def _make(self, make: Callable, param) -> tuple[ExitStack, Pair]:
        stack = ExitStack()
        return stack, stack.enter_context(make(param, self._place))

    def close(self) -> None:
        for made in self._made.values():
            made.result()[0].close()


def servers_of(item) -> tuple | None:
    """What makes the servers of a test, and for what."""
    params = item.callspec.params if hasattr(item, "callspec") else {}
    if "pair" in params:
        return servers, params["pair"]
    make = getattr(item.module, "servers", None)
    own = [params[name] for name in ("own", "mixed") if name in params]
    return (make, own[0]) if make and own else None


def pytest_configure(config):
    config.stash[RESTARTS] = []


@pytest.fixture
def restarts(request):
    """Takes a row of the table of hosts that were lost."""
    return request.config.stash[RESTARTS].append


def pytest_terminal_summary(terminalreporter, config):
    rows = config.stash[RESTARTS]
    if not rows:
        return
    terminalreporter.section("hosts that were lost")
    for cells in [RESTART_HEADER, *rows]:
        terminalreporter.line("| " + " | ".join(cells) + " |")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    """Servers after servers, and last for each what ends them."""
    groups = {}

    def place(item):
        params = item.callspec.params if hasattr(item, "callspec") else {}
        shared = [(item.module.__name__, params[name]) for name in ("own", "mixed") if name in params]
        group = shared[0] if shared else params.get("pair")
        at = groups.setdefault(group, len(groups))
        return at, bool(item.get_closest_marker("last"))

    items.sort(key=place)
    made = list(dict.fromkeys(group for group in map(servers_of, items) if group is not None))
    if part := os.environ.get(PART):
        named = re.fullmatch(r"([1-9])/([1-9])", part)
        if not named or named[1] > named[2]:
            raise pytest.UsageError(f"{PART}={part}: give which one of how many, such as 2/3")
        which, of = int(named[1]) - 1, int(named[2])
        others = [group for at, group in enumerate(made) if at % of != which]
        config.hook.pytest_deselected(items=[item for item in items if servers_of(item) in others])
        items[:] = [item for item in items if servers_of(item) not in others]
        made = [group for group in made if group not in others]
    config.stash[GROUPS] = made


@pytest.fixture(scope="session")
def logs() -> Path:
    """A folder that is kept, named in errors."""
    folder = os.environ.get("KVFERRY_VLLM_LOGS")
    return Path(folder or tempfile.mkdtemp(prefix="kvferry-vllm-"))


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session", autouse=True)
def _early(request):
    """The reference starts while others are made; not for tests that need no server."""
    if any("reference" in item.fixturenames for item in request.session.items):
        request.getfixturevalue("reference")


@pytest.fixture(scope="session")
def reference(model, logs):
    server = Server("reference", model, free_ports(1)[0], logs / "reference.log", None, {})
    reference = Reference(server)
    yield reference
    server.stop()


@pytest.fixture(scope="session")
def ahead(request, model, logs, reference, tmp_path_factory):
    secret = tmp_path_factory.mktemp("fleet") / "secret"
    secret.touch(0o600)
    secret.write_text(os.urandom(32).hex())
    fleet = {"KVFERRY_SECRET_FILE": str(secret)}
    place = Place(model, logs, reference, tmp_path_factory.mktemp, fleet)
    ahead = Ahead(request.config.stash[GROUPS], place)
    yield ahead
    ahead.close()


@contextmanager
def servers(mode: str, place: Place):
    """vLLM's own connector on both sides."""
    folder = place.folder(mode)
    faults = folder / "faults.toml"
    faults.write_text(FAULTS + (READ_FAULTS if mode == "READ" else ""))
    audit = folder / "audit.jsonl"
    env = {"KVFERRY_FAULTS": str(faults), "KVFERRY_AUDIT": str(audit)}
    with served(mode.lower(), place, mode, dict.fromkeys(ROLES, MORIIO), env) as made:
        made.audit, made.drills = audit, drill(made)
        yield made


@pytest.fixture(scope="session", params=MODES)
def pair(request, ahead):
    with ahead.servers(servers, request.param) as made:
        yield made


def drill(pair: Pair) -> Drills:
    drills = Drills(pair.complete(prompt(100, "suppressed")))
    if pair.mode == "READ":
        drills.queue_full = pair.complete(prompt(100, "queue full"))
        with pytest.raises(Refused) as refused:
            pair.complete(prompt(100, "failed"))
        drills.failed = str(refused.value)
    return drills
