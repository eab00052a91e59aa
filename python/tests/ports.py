"""Ports for programs that take no free ones of their own choice."""

import random
import socket

# Below those that Linux gives to outgoing connections, which would take one before it is used.
PORTS = range(15_000, 32_000)


def free_ports(count: int, run: int = 1) -> list[int]:
    """Ports that were free a moment ago, each with as many behind it as are missing to a `run`."""
    ports, sockets = [], []
    while len(ports) < count:
        first = random.choice(PORTS)
        try:
            sockets += [socket.create_server(("127.0.0.1", port)) for port in range(first, first + run)]
        except OSError:
            continue
        ports.append(first)
    for one in sockets:
        one.close()
    return ports
