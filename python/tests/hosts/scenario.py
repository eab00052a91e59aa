"""Faults of scenario files, as far as wires can have them, played on the cables of a fleet while that serves.

Times are the file's own: those of the protocol, 7 s of silence above all, are the same on wires. What a file counts in frames is counted
in packets here. Wires see none of the events that a fault waits for: the Nth of them is here when clients have begun N requests. What
`kvferry draw` leaves to be drawn, at each use and for words that mean an instance, is drawn here."""

import os
import random
import re
import subprocess
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from faults import between, way
from fleet import Fleet
from wires import Wires

# At most, of a play, and how long what lasts for the whole run does.
PLAY_S, WHOLE_S = 20.0, 5.0
# What is for good: longer than a peer may be silent.
GOOD_S = 9.0
# Of the cables, that a slow one has a fraction of.
BYTES_PER_S = 125e6
UNITS_S = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}

# Kinds that are packets, with what a relay does, and the delay that scenarios/README.md has for each.
PACKETS: dict[str, tuple[dict, str | None]] = {
    "wire.loss": ({"does": "lose"}, None),
    "wire.duplicate": ({"does": "double"}, "1us..1s"),
    "wire.reorder": ({"overtaking": True}, "10us..2ms"),
    "wire.delay": ({}, "100us..100ms"),
    "wire.damage": ({"does": "damage"}, None),
}
# Kinds that last, and for how long.
LASTING = {
    "wire.partition": "50ms..2s",
    "wire.half_open": "50ms..2s",
    "wire.one_way_permanent": None,
    "fabric.slow_link": "10ms..1s",
    "fabric.port_down": "10ms..1s",
}
# Why others are not played.
UNPLAYABLE = {
    "only the sender puts bytes into a TCP stream": ["wire.foreign"],
    "wires do not know what a packet reports": ["wire.done_out_of_order", "fabric.notify_overtakes"],
    "of the data plane within a host, above TCP": [
        "fabric.qp_error",
        "fabric.ack_lost",
        "fabric.completion_lost",
        "fabric.queue_full",
        "fabric.reorder",
        "fabric.partial",
        "fabric.late_landing",
        "fabric.sibling_failure",
        "fabric.no_copy",
        "fabric.register_fails",
    ],
    "of a process": [
        "process.crash",
        "process.restart",
        "process.pause",
        "process.rank_lag",
        "process.rank_crash",
        "process.restart_other_geometry",
        "process.drain",
        "process.role_switch",
    ],
    "of clocks and leases": ["clock.back", "clock.expiry_race"],
    "of an engine's memory": [
        "memory.small_pool",
        "memory.immediate_reuse",
        "memory.preempt",
        "memory.prefix_hit_one_side",
    ],
    "of the router": [
        "router.stale_registration",
        "router.dispatched_twice",
        "router.decode_leg_lost",
        "router.legs_reordered",
        "router.siblings",
        "router.ids_differ",
        "router.leg_cut",
        "router.restart",
    ],
    "of clients": [
        "client.abort",
        "client.both_abort",
        "client.burst",
        "client.degenerate_prompts",
        "client.prompts_differ",
    ],
}


class NotPlayed(Exception):
    """Why a fault is not."""


@dataclass
class Deed:
    """A fault at the cables."""

    kind: str
    start: Callable[[Wires], AbstractContextManager]
    # Seconds, or None for good.
    lasts: float | None
    # When it begins: at seconds, or when so many requests were begun, or with a chance for each request, so often.
    at: float | None = None
    asked: int | None = None
    chance: float = 0.0
    times: int = 1
    # True when it is not to begin any more.
    begun: bool = False


def reason(kind: str) -> str | None:
    """Why wires cannot have a fault of this kind; None if they can."""
    if kind in PACKETS or kind in LASTING:
        return None
    for why, kinds in UNPLAYABLE.items():
        if kind in kinds:
            return why
    raise ValueError(f"{kind}: neither played on wires nor among what is not; say in scenario.py which of the two")


def drawn(file: Path, seed: int) -> dict:
    """The run that a seed draws of a file."""
    command = [os.environ["KVFERRY_BIN"], "draw", str(file), "--seed", str(seed)]
    return tomllib.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


class Plan:
    """The faults of a run, and why some are not played."""

    def __init__(self, run: dict, names: list[str]):
        self.names = [name for name in names if name != "r"]
        self.mode = run.get("workload", {}).get("mode", "push")
        self.deeds: list[Deed] = []
        self.left: list[str] = []
        for number, fault in enumerate(run.get("fault", [])):
            self.random = random.Random(f"{run['seed']} {number} {fault.get('decisions')}")
            try:
                self.deeds += self._deeds(fault)
            except NotPlayed as why:
                self.left.append(f"{fault['kind']}: {why}")

    def _deeds(self, fault: dict) -> list[Deed]:
        kind = fault["kind"]
        if why := reason(kind):
            raise NotPlayed(why)
        if "match" in fault or "message" in fault.get("on", {}):
            raise NotPlayed("wires do not know which packet has which message")
        words = {word: self._instances(fault.get(word)) for word in ("from", "to", "target")}
        if kind in PACKETS:
            return [self._packets(fault, words)]
        start = self._lasting(fault, words)
        lasts = fault.get("lasts", LASTING[kind])
        once = dict(kind=kind, start=start)
        # Without a number, of a chance: as many as there are requests.
        times = int(fault.get("times", 10**6 if "chance" in fault else 1))
        deeds = []
        if "chance" in fault:
            chance = float(fault["chance"])
            deeds = [Deed(**once, lasts=self._time(lasts), chance=chance, times=times)]
        elif "on" in fault:
            nth = int(fault["on"].get("nth", 1))
            deeds = [Deed(**once, lasts=self._time(lasts), asked=nth + more) for more in range(times)]
        else:
            at = self._time(fault["at"])
            for _ in range(times):
                deeds.append(Deed(**once, lasts=self._time(lasts), at=at))
                at += self._time(fault.get("every", "0s"))
        played = [deed for deed in deeds if deed.at is None or deed.at < PLAY_S]
        if not played:
            raise NotPlayed(f"begins after the {PLAY_S:g} s that are played")
        return played

    def _packets(self, fault: dict, words: dict[str, list[str]]) -> Deed:
        does, delay = PACKETS[fault["kind"]]
        rule: dict = dict(does)
        if delay := fault.get("delay", delay):
            rule["delay"] = self._range(delay)
        if "chance" in fault:
            rule["chance"] = float(fault["chance"])
        if "chance" not in fault or "times" in fault:
            rule["times"] = int(fault.get("times", 1))
        start = self._relays(words["from"], words["to"], rule)
        if "on" in fault:
            return Deed(fault["kind"], start, WHOLE_S, asked=int(fault["on"].get("nth", 1)))
        return Deed(fault["kind"], start, WHOLE_S, at=self._time(fault.get("at", "0s")))

    def _lasting(self, fault: dict, words: dict[str, list[str]]) -> Callable[[Wires], AbstractContextManager]:
        kind, pairs = fault["kind"], self._pairs(words["from"], words["to"])
        if kind == "fabric.port_down":
            return lambda wires: wires.pulled(words["target"][0])
        if kind == "fabric.slow_link":
            return self._relays(words["from"], words["to"], {"rate": BYTES_PER_S / float(fault.get("factor", 100))})
        direction = fault.get("direction", "symmetric") if kind == "wire.partition" else "one-way"
        if direction == "node":
            target = words["target"][0]
            return lambda wires: wires.dropping(f'iifname "{target}"', f'oifname "{target}"')
        cut = between if direction == "symmetric" else lambda one, other: [way(one, other)]
        return lambda wires: wires.dropping(*(rule for pair in pairs for rule in cut(*pair)))

    def _relays(self, senders: list[str], receivers: list[str], rule: dict):
        """A rule in the relays of the decodes of these pairs."""
        peers: dict[tuple[str, str], list[str]] = {}
        for sender, receiver in self._pairs(senders, receivers):
            decode, peer, side = (receiver, sender, "in") if receiver.startswith("d") else (sender, receiver, "out")
            peers.setdefault((decode, side), []).append(peer)

        def start(wires: Wires) -> AbstractContextManager:
            rules: dict[str, list[dict]] = {}
            for (decode, side), names in peers.items():
                given = rule | {"way": side, "peers": [wires.address(name) for name in names]}
                rules.setdefault(decode, []).append(given)
            return together([wires.relayed(decode, *given) for decode, given in rules.items()])

        return start

    def _pairs(self, senders: list[str], receivers: list[str]) -> list[tuple[str, str]]:
        """Of a prefill and a decode, or the other way round."""
        return [(one, other) for one in senders for other in receivers if one[0] != other[0]]

    def _instances(self, word: str | None) -> list[str]:
        """Those that a word of a file means: all if it is none, and one that is drawn for `prefill`, `decode` and `any`."""
        if word is None:
            names = list(self.names)
            self.random.shuffle(names)
            return names
        if word in ("prefill", "decode", "any"):
            names = [name for name in self.names if word == "any" or name[0] == word[0]]
            return [self.random.choice(names)]
        name = word.partition(".")[0]
        if name not in self.names:
            raise NotPlayed(f"there is no host {name}")
        return [name]

    def _range(self, text: str) -> list[float]:
        """Least and most seconds of a duration, of whose alternatives one is drawn."""
        ends = self.random.choice(text.split("|")).split("..")
        found = [re.fullmatch(r"([\d._]+)\s*([a-z]+)", end.strip()) for end in (ends[0], ends[-1])]
        return [float(end[1]) * UNITS_S[end[2]] for end in found]

    def _time(self, text: str | None) -> float | None:
        return None if text is None else self.random.uniform(*self._range(text))


@contextmanager
def together(them: list[AbstractContextManager]) -> Iterator[list[int]]:
    """Several at once; what they yield is one list when they are over."""
    met: list[int] = []
    with ExitStack() as stack:
        lists = [stack.enter_context(it) for it in them]
        yield met
    met += [number for numbers in lists for number in numbers]


class Play:
    """Plays a plan; what it yields is how many packets met the rules of relays, of which there may be several for a fault."""

    def __init__(self, fleet: Fleet, plan: Plan):
        self.fleet, self.plan = fleet, plan
        self.random = random.Random(f"{fleet.wires.seed} {len(plan.deeds)}")
        self.running: list[tuple[float, ExitStack]] = []
        # Of each kind, how often it began, and packets that met its rules.
        self.begun: dict[str, int] = Counter()
        self.met: dict[str, int] = Counter()

    def __enter__(self) -> "Play":
        begun, asked, seen = time.monotonic(), self.fleet.asked, 0
        try:
            while not self._is_over(now := time.monotonic() - begun):
                count = self.fleet.asked - asked
                for deed in self.plan.deeds:
                    if not deed.begun and self._is_due(deed, now, count, count - seen):
                        self._begin(deed, now)
                seen = count
                self._end([it for it in self.running if it[0] <= now])
                time.sleep(0.001)
        finally:
            self._end(list(self.running))
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def _is_due(self, deed: Deed, now: float, count: int, more: int) -> bool:
        if deed.at is not None:
            return now >= deed.at
        if deed.asked is not None:
            return count >= deed.asked
        return any(self.random.random() < deed.chance for _ in range(more))

    def _is_over(self, now: float) -> bool:
        waits = any(not deed.begun and not deed.chance for deed in self.plan.deeds)
        return now >= PLAY_S or (now >= WHOLE_S and not waits and not self.running)

    def _begin(self, deed: Deed, now: float) -> None:
        self.begun[deed.kind] += 1
        deed.times -= 1
        deed.begun = deed.times == 0
        stack = ExitStack()
        met: list[int] | None = None
        # What a relay has met is known when it is over.
        stack.callback(lambda: self.met.update({deed.kind: sum(met or [])}))
        met = stack.enter_context(deed.start(self.fleet.wires))
        self.running.append((now + (GOOD_S if deed.lasts is None else deed.lasts), stack))

    def _end(self, them: list[tuple[float, ExitStack]]) -> None:
        for it in them:
            self.running.remove(it)
            it[1].close()
