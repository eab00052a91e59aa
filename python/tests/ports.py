"""Ports for programs that take no free ones of their own choice."""

import random
import socket

# Below those that Linux gives to outgoing connections, which would take one before it is used.
PORTS = range(15_000, 32_000)


def free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago."""
    sockets = []
    while len(sockets) < count:
        try:
            sockets.append(socket.create_server(("127.0.0.1", random.choice(PORTS))))
        except OSError:
            continue
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports
