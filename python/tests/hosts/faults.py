"""What can happen to the cables of a fleet of a router `r`, a prefill `p0` and a decode `d0` at least."""

import os
import random
import time
from contextlib import ExitStack

from fleet import Fleet

SEED = int(os.environ.get("KVFERRY_HOSTS_SEED", "1"))


def between(one: str, other: str) -> list[str]:
    return [way(one, other), way(other, one)]


def way(one: str, other: str) -> str:
    return f'iifname "{one}" oifname "{other}"'


def late(least: float, most: float, ways: tuple[str, ...] = ("in", "out"), **more):
    """So many milliseconds, drawn for each packet to the decode and from it."""
    rules = [{"way": way, "delay": [least / 1e3, most / 1e3], **more} for way in ways]
    return lambda wires: wires.relayed("d0", *rules)


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
    "a relay at the decode": late(0, 0),
    "20 ms each way at the decode": late(20, 20),
    "10 to 30 ms each way, in order": late(10, 30),
    "10 to 30 ms each way, overtaking": late(10, 30, overtaking=True),
    "200 ms each way at the decode": late(200, 200),
    "200 ms to the decode": late(200, 200, ("in",)),
    "200 ms from the decode": late(200, 200, ("out",)),
    "5 % of packets overtaken, up to 5 ms": late(0, 5, chance=0.05, overtaking=True),
}


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
