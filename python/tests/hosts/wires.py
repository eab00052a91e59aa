"""Hosts of their own on one machine: network namespaces with an address each, whose cables lead into one switch, and what can
happen to these cables."""

import ctypes
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from started import line_of

# Of <sched.h>.
CLONE_NEWNET = 0x40000000
# Bytes of a packet, as in a network for storage.
MTU = 9000
# Packets that wait for a relay that is not running.
QUEUE = 10_000

libc = ctypes.CDLL(None, use_errno=True)


def ip(*words: str, commands: str | None = None) -> None:
    """What these words say, or with `-batch -` each line of `commands`."""
    done = subprocess.run(["ip", *words], input=commands, check=False, capture_output=True, text=True)
    assert done.returncode == 0, f"ip {' '.join(words)} {commands or ''}: {done.stderr}"


class Relay:
    """A relay in the cable of a host, and the rules that hold there."""

    def __init__(self, wires: "Wires", name: str):
        self.wires, self.name, self.cable = wires, name, f"{name}-cable"
        self.rules: dict[str, dict] = {}
        command = [sys.executable, str(Path(__file__).with_name("relay.py")), f"{name}-near", f"{name}-far"]
        command += [f"{wires.seed} {name} {next(wires.numbers)}"]
        pipe = subprocess.PIPE
        self.process = wires.start("switch", command, stdin=pipe, stdout=pipe, text=True)
        assert line_of(self.process) == "ready\n"
        # The switch knows the cable's end by the host's name: that is now the relay's.
        self._relink(f"""
            link set {name}-near mtu {MTU} txqueuelen {QUEUE}
            link set {name}-far mtu {MTU} txqueuelen {QUEUE} up
            link add {name}-relay mtu {MTU} type bridge
            link set {name}-relay up
            link set {name}-far master {name}-relay
            link set {name} nomaster
            link set {name} name {self.cable}
            link set {name}-near name {name}
            link set {self.cable} master {name}-relay
            link set {name} master lan up""")
        wires.cables[name] = self.cable

    def set(self) -> dict[str, int]:
        """Packets that met each rule so far, those of before included."""
        self.process.stdin.write(json.dumps(list(self.rules.values())) + "\n")
        self.process.stdin.flush()
        return json.loads(line_of(self.process))

    def close(self) -> None:
        # Its ends vanish with it.
        self.process.kill()
        self.process.wait()
        self._relink(f"""
            link set {self.cable} nomaster
            link delete {self.name}-relay
            link set {self.cable} name {self.name}
            link set {self.name} master lan""")
        self.wires.cables[self.name] = self.name

    def _relink(self, commands: str) -> None:
        ip("-n", self.wires.switch, "-batch", "-", commands=commands)


class Wires:
    """A switch, and hosts on it that have an address and a cable each."""

    def __init__(self, names: list[str], seed: int):
        """`seed` is of what relays draw."""
        self.names, self.seed = names, seed
        self.switch = self.namespace("switch")
        self.rules: list[str] = []
        # What the end of a host's cable in the switch's namespace is called.
        self.cables = {name: name for name in names}
        self.relays: dict[str, Relay] = {}
        self.numbers = itertools.count()
        try:
            self._lay()
        except BaseException:
            self.close()
            raise

    def namespace(self, name: str) -> str:
        return f"kvferry-{os.getpid()}-{name}"

    def address(self, name: str) -> str:
        return f"10.99.0.{1 + self.names.index(name)}"

    def _lay(self) -> None:
        ip("netns", "add", self.switch)
        ip("-n", self.switch, "link", "add", "lan", "mtu", str(MTU), "type", "bridge")
        ip("-n", self.switch, "link", "set", "lan", "up")
        for name in self.names:
            host = self.namespace(name)
            ip("netns", "add", host)
            ip("-n", host, "link", "set", "lo", "up")
            ip(
                *("-n", self.switch, "link", "add", name, "mtu", str(MTU)),
                *("type", "veth", "peer", "name", "eth0", "mtu", str(MTU), "netns", host),
            )
            ip("-n", self.switch, "link", "set", name, "master", "lan", "up")
            ip("-n", host, "address", "add", f"{self.address(name)}/24", "dev", "eth0")
            ip("-n", host, "link", "set", "eth0", "up")

    def close(self) -> None:
        for relay in self.relays.values():
            relay.process.kill()
            relay.process.wait()
        for name in ["switch", *self.names]:
            # It may not have come to that.
            subprocess.run(["ip", "netns", "delete", self.namespace(name)], capture_output=True, check=False)

    def start(self, name: str, command: list[str], **options: Any) -> subprocess.Popen:
        """A process on that host."""
        return subprocess.Popen(["ip", "netns", "exec", self.namespace(name), *command], **options)

    def on(self, name: str, work: Callable[[], Any]) -> Any:
        """What `work` returns, done on that host: the sockets that it makes are there."""

        def enter() -> Any:
            with Path("/run/netns", self.namespace(name)).open() as host:
                assert libc.setns(host.fileno(), CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
            return work()

        with ThreadPoolExecutor(1) as thread:
            return thread.submit(enter).result()

    def shown(self, name: str, *words: str) -> str:
        """What `ip` prints on that host."""
        return subprocess.check_output(["ip", "-n", self.namespace(name), *words], text=True)

    @contextmanager
    def dropping(self, *rules: str):
        """The switch drops what meets one of these rules of nft."""
        self.rules += rules
        self._filter()
        try:
            yield
        finally:
            for rule in rules:
                self.rules.remove(rule)
            self._filter()

    def _filter(self) -> None:
        drops = "\n".join(f"{rule} drop" for rule in self.rules)
        text = f"""
            add table bridge wires
            delete table bridge wires
            table bridge wires {{
                chain forward {{
                    type filter hook forward priority 0;
                    {drops}
                }}
            }}"""
        command = ["ip", "netns", "exec", self.switch, "nft", "-f", "-"]
        subprocess.run(command, input=text, check=True, capture_output=True, text=True)

    @contextmanager
    def pulled(self, name: str):
        """The cable of that host, so that both ends know."""
        ip("-n", self.switch, "link", "set", self.cables[name], "down")
        try:
            yield
        finally:
            ip("-n", self.switch, "link", "set", self.cables[name], "up")

    @contextmanager
    def slow(self, name: str, rate: str):
        """That host's cable, both ways."""
        ends = [(self.switch, self.cables[name]), (self.namespace(name), "eth0")]
        shape = ["root", "tbf", "rate", rate, "burst", "64k", "latency", "100ms"]
        for where, device in ends:
            subprocess.run(["tc", "-n", where, "qdisc", "add", "dev", device, *shape], check=True)
        try:
            yield
        finally:
            for where, device in ends:
                subprocess.run(["tc", "-n", where, "qdisc", "delete", "dev", device, "root"], check=True)

    @contextmanager
    def relayed(self, name: str, *rules: dict):
        """A relay in that host's cable does what these rules of relay.py say, beside those that it has. What it yields has how
        many packets each of them has met, once it is over."""
        relay = self.relays.get(name)
        if relay is None:
            relay = self.relays[name] = Relay(self, name)
        named = {str(next(self.numbers)): rule for rule in rules}
        met: list[int] = []
        try:
            relay.rules |= {id: rule | {"id": id} for id, rule in named.items()}
            relay.set()
            yield met
        finally:
            relay.rules = {id: rule for id, rule in relay.rules.items() if id not in named}
            now = relay.set()
            met += [now[id] for id in named]
            if not relay.rules:
                del self.relays[name]
                relay.close()

    @contextmanager
    def narrow(self, name: str, mtu: int):
        """The switch drops larger packets from and to that host, and says nothing."""
        # Packets are as large as on a wire; the kernel would split them behind the switch.
        ends = [(self.switch, cable) for cable in self.cables.values()]
        ends += [(self.namespace(other), "eth0") for other in self.names]
        for where, device in ends:
            ip("-n", where, "link", "set", device, "gso_max_segs", "1")
        try:
            with self.dropping(*(f'{way} "{name}" meta length > {mtu}' for way in ("iifname", "oifname"))):
                yield
        finally:
            for where, device in ends:
                ip("-n", where, "link", "set", device, "gso_max_segs", "65535")
