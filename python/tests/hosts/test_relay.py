"""What the relay does to numbered packets on their way to the decode."""

import socket
import time
from contextlib import AbstractContextManager, closing

import pytest
from wires import Wires

PORT = 9
PACKETS = 300
BYTES = 1000
LATE_S = 0.02


def laid(seed: int = 1) -> AbstractContextManager[Wires]:
    return closing(Wires(["p0", "d0"], seed))


@pytest.fixture
def wires():
    with laid() as wires:
        yield wires


def bound(wires: Wires, name: str) -> socket.socket:
    def make() -> socket.socket:
        it = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        it.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
        it.bind((wires.address(name), PORT))
        it.settimeout(2.0)
        return it

    return wires.on(name, make)


def arrived(wires: Wires, **rule) -> tuple[list[int], list[float], int]:
    """Numbers of the packets in the order in which they came, the seconds that each was on its way, and how many the rule met."""
    rule |= {"way": "in", "peers": [wires.address("p0")]}
    to = wires.address("d0"), PORT
    sent: list[float] = []
    came: list[tuple[int, float]] = []
    with bound(wires, "p0") as sender, bound(wires, "d0") as receiver:
        # After which both know where the other one is.
        sender.sendto(b"", to)
        receiver.recv(BYTES)
        with wires.relayed("d0", rule) as met:
            for number in range(PACKETS):
                sent.append(time.monotonic())
                sender.sendto(number.to_bytes(8, "big").ljust(BYTES), to)
            try:
                while True:
                    packet = receiver.recv(BYTES)
                    came.append((int.from_bytes(packet[:8], "big"), time.monotonic()))
            except TimeoutError:
                pass
    return [number for number, _ in came], [at - sent[number] for number, at in came], met[0]


def test_packets_that_are_late_keep_their_order(wires):
    numbers, late, met = arrived(wires, delay=[LATE_S, 2 * LATE_S])
    assert numbers == list(range(PACKETS))
    assert min(late) >= LATE_S
    assert met == PACKETS


def test_packets_that_overtake_come_in_another_order(wires):
    numbers, late, _ = arrived(wires, delay=[LATE_S, 2 * LATE_S], overtaking=True)
    assert numbers != sorted(numbers) == list(range(PACKETS))
    assert min(late) >= LATE_S


def test_a_slow_cable_takes_its_time(wires):
    numbers, late, _ = arrived(wires, rate=PACKETS * BYTES * 2.0)
    assert numbers == list(range(PACKETS))
    assert late[-1] >= 0.4


@pytest.mark.parametrize("does", ["lose", "damage"])
def test_packets_that_are_lost_are_drawn_by_the_seed(does):
    lost = []
    for seed in (1, 1, 2):
        with laid(seed) as wires:
            numbers, _, met = arrived(wires, does=does, chance=0.2)
        assert numbers == sorted(numbers)
        assert met == PACKETS - len(numbers) > 0
        lost.append(set(range(PACKETS)) - set(numbers))
    assert lost[0] == lost[1] != lost[2]


def test_packets_come_twice_as_often_as_the_rule_may(wires):
    numbers, _, met = arrived(wires, does="double", delay=[0.0, LATE_S], times=10)
    assert sorted(numbers) == sorted([*range(PACKETS), *range(10)])
    assert met == 10
