"""A relay between two TAP devices, which are the ends of a cable: packets are late, overtaken, lost, doubled, damaged or slow as the
rules say that it is given while it runs.

`relay.py NEAR FAR SEED` makes the devices in its own network namespace and says `ready`. NEAR is in the switch, FAR leads to the host. Each
line of its input is the list of all rules from now on, in JSON; the answer is a line with how many packets each rule has met. A rule:

    id       names it, so that its count and what is left of `times` outlast a change of the others
    way      "in", to the host, or "out"
    peers    IPv4 addresses; only packets from (in) or to (out) these. All packets without it
    chance   of a packet to meet it, 1 without it
    times    packets that it may meet at most
    delay    [least, most] seconds, uniform; packets behind wait as well, unless `overtaking`
    rate     bytes per second; what would wait for longer than QUEUE_S is lost
    does     "lose", "double" (the second one comes after `delay`) or "damage" (a bit behind the IPv4 header is flipped)
"""

import fcntl
import heapq
import json
import os
import random
import select
import socket
import struct
import sys
import time
from typing import Any

# Of <linux/if_tun.h>.
TUNSETIFF = 0x400454CA
IFF_TAP, IFF_NO_PI = 0x0002, 0x1000
LARGEST = 65536
# Read from one device before the other has its turn.
BATCH = 64
QUEUE_S = 1.0
# Of an Ethernet frame with IPv4 and no options: where that is said, where addresses begin, and what is behind the header.
TYPE, IPV4 = slice(12, 14), b"\x08\x00"
SOURCE, DESTINATION, BEHIND = slice(26, 30), slice(30, 34), 34


def tap(name: str) -> int:
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TAP | IFF_NO_PI))
    return device


class Rule:
    def __init__(self, given: dict[str, Any], before: "Rule | None"):
        self.given = given
        self.way = given["way"]
        self.peers = {socket.inet_aton(peer) for peer in given.get("peers", [])}
        self.chance = given.get("chance", 1.0)
        self.delay = given.get("delay")
        self.overtaking = given.get("overtaking", False)
        self.rate = given.get("rate")
        self.does = given.get("does")
        self.met = before.met if before else 0
        # No packet that keeps its place goes before this time.
        self.free = before.free if before else 0.0

    def meets(self, packet: bytes, peer: bytes, random_: random.Random) -> bool:
        if self.peers and peer not in self.peers:
            return False
        if self.met >= self.given.get("times", self.met + 1) or random_.random() >= self.chance:
            return False
        self.met += 1
        return True


class Relay:
    def __init__(self, near: str, far: str, seed: str):
        self.random = random.Random(seed)
        self.near, self.far = tap(near), tap(far)
        self.rules: list[Rule] = []
        # Of each way and peer, until when the last packet waits that keeps its place.
        self.last: dict[tuple[str, bytes], float] = {}
        self.waiting: list[tuple[float, int, int, bytes]] = []
        self.number = 0

    def set(self, line: str) -> dict[str, int]:
        before = {rule.given["id"]: rule for rule in self.rules}
        self.rules = [Rule(given, before.get(given["id"])) for given in json.loads(line)]
        return {rule.given["id"]: rule.met for rule in [*before.values(), *self.rules]}

    def serve(self) -> None:
        commands = sys.stdin.fileno()
        while True:
            patience = None
            if self.waiting:
                patience = max(0.0, self.waiting[0][0] - time.monotonic())
            ready, _, _ = select.select([self.near, self.far, commands], [], [], patience)
            if commands in ready:
                line = sys.stdin.readline()
                if not line:
                    return
                print(json.dumps(self.set(line)), flush=True)
            for device, other, way in ((self.near, self.far, "in"), (self.far, self.near, "out")):
                if device in ready:
                    self.take(device, other, way)
            now = time.monotonic()
            while self.waiting and self.waiting[0][0] <= now:
                _, _, device, packet = heapq.heappop(self.waiting)
                self.put(device, packet)

    def take(self, device: int, other: int, way: str) -> None:
        rules = [rule for rule in self.rules if rule.way == way]
        for _ in range(BATCH):
            try:
                packet = os.read(device, LARGEST)
            except OSError:
                # There is none, or the device is down.
                return
            self.forward(packet, other, way, rules)

    def forward(self, packet: bytes, device: int, way: str, rules: list[Rule]) -> None:
        now = due = time.monotonic()
        peer = packet[SOURCE if way == "in" else DESTINATION] if packet[TYPE] == IPV4 else b""
        stays = True
        for rule in rules:
            if not rule.meets(packet, peer, self.random):
                continue
            late = self.random.uniform(*rule.delay) if rule.delay else 0.0
            if rule.does == "lose":
                return
            if rule.does == "double":
                self.later(now + late, device, packet)
            elif rule.does == "damage":
                packet = self.damaged(packet)
            elif rule.rate:
                rule.free = max(rule.free, now) + len(packet) / rule.rate
                if rule.free - now > max(QUEUE_S, 2 * len(packet) / rule.rate):
                    rule.free -= len(packet) / rule.rate
                    return
                due = max(due, rule.free)
            else:
                due += late
                stays = stays and not rule.overtaking
        if stays:
            due = self.last[way, peer] = max(due, self.last.get((way, peer), now))
        if due <= now and not self.waiting:
            self.put(device, packet)
        else:
            self.later(due, device, packet)

    def damaged(self, packet: bytes) -> bytes:
        if packet[TYPE] != IPV4 or len(packet) <= BEHIND:
            return packet
        bad = bytearray(packet)
        bad[self.random.randrange(BEHIND, len(bad))] ^= 1 << self.random.randrange(8)
        return bytes(bad)

    def later(self, due: float, device: int, packet: bytes) -> None:
        self.number += 1
        heapq.heappush(self.waiting, (due, self.number, device, packet))

    @staticmethod
    def put(device: int, packet: bytes) -> None:
        try:
            os.write(device, packet)
        except OSError:
            # It is down, or has no room: a wire loses what it cannot carry.
            pass


if __name__ == "__main__":
    relay = Relay(*sys.argv[1:])
    print("ready", flush=True)
    relay.serve()
