"""An engine that outlives the server that started it gives up its host."""

import multiprocessing
import os
import signal
import socket
import time

import pytest
from kvferry.line import Line


class Connection:
    """In place of a link to a host."""

    def __init__(self, end):
        self.end = end

    def fileno(self):
        return self.end.fileno()

    def close(self):
        self.end.close()


def engine(end, said):
    def make():
        said.send("again")
        raise ConnectionError("no host")

    Line(Connection(end), make)
    said.send("up")
    time.sleep(600)


def server(method, end, said):
    started = multiprocessing.get_context(method).Process(target=engine, args=(end, said))
    started.start()
    said.send(started.pid)
    started.join()


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_the_host_of_an_engine_ends_with_its_server(method):
    context = multiprocessing.get_context("spawn")
    host, end = socket.socketpair()
    hears, said = context.Pipe()
    started = context.Process(target=server, args=(method, end, said))
    started.start()
    end.close()
    said.close()
    pid = hears.recv()
    try:
        assert hears.recv() == "up"
        started.kill()
        host.settimeout(60)
        assert host.recv(1) == b"", "the host hears that its engine has left"
        # Who makes the next one is told by the engine before it ends, which it does now.
    finally:
        os.kill(pid, signal.SIGKILL)
        started.join()
    with pytest.raises(EOFError):
        assert hears.recv() != "again"
