"""Hosts of their own on one machine: network namespaces with an address each, whose cables lead into one switch, and what can
happen to these cables."""

import ctypes
import os
import subprocess
import threading
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# Of <sched.h>.
CLONE_NEWNET = 0x40000000
# Bytes of a packet, as in a network for storage.
MTU = 9000

libc = ctypes.CDLL(None, use_errno=True)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


class Wires:
    """A switch, and hosts on it that have an address and a cable each."""

    def __init__(self, names: list[str]):
        self.names = names
        self.switch = self.namespace("switch")
        self.rules: list[str] = []
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
        for name in ["switch", *self.names]:
            # It may not have come to that.
            subprocess.run(["ip", "netns", "delete", self.namespace(name)], capture_output=True, check=False)

    def start(self, name: str, command: list[str], **options: Any) -> subprocess.Popen:
        """A process on that host."""
        return subprocess.Popen(["ip", "netns", "exec", self.namespace(name), *command], **options)

    def on(self, name: str, work: Callable[[], Any]) -> Any:
        """What `work` returns, done on that host: the sockets that it makes are there."""
        found: list[Any] = []

        def enter() -> None:
            with Path("/run/netns", self.namespace(name)).open() as host:
                assert libc.setns(host.fileno(), CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
            found.append(work())

        thread = threading.Thread(target=enter)
        thread.start()
        thread.join()
        return found[0]

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
        ip("-n", self.switch, "link", "set", name, "down")
        try:
            yield
        finally:
            ip("-n", self.switch, "link", "set", name, "up")

    @contextmanager
    def slow(self, name: str, rate: str):
        """That host's cable, both ways."""
        ends = [(self.switch, name), (self.namespace(name), "eth0")]
        shape = ["root", "tbf", "rate", rate, "burst", "64k", "latency", "100ms"]
        for where, device in ends:
            subprocess.run(["tc", "-n", where, "qdisc", "add", "dev", device, *shape], check=True)
        try:
            yield
        finally:
            for where, device in ends:
                subprocess.run(["tc", "-n", where, "qdisc", "delete", "dev", device, "root"], check=True)

    @contextmanager
    def narrow(self, name: str, mtu: int):
        """The switch drops larger packets from and to that host, and says nothing."""
        # Packets are as large as on a wire; the kernel would split them behind the switch.
        ends = [(self.switch, other) for other in self.names]
        ends += [(self.namespace(other), "eth0") for other in self.names]
        for where, device in ends:
            ip("-n", where, "link", "set", device, "gso_max_segs", "1")
        try:
            with self.dropping(*(f'{way} "{name}" meta length > {mtu}' for way in ("iifname", "oifname"))):
                yield
        finally:
            for where, device in ends:
                ip("-n", where, "link", "set", device, "gso_max_segs", "65535")
