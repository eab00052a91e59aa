"""The host beside a process: where its socket is, how it is started and how it is ended."""

import contextlib
import os
import select
import signal
import socket as sockets
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from kvferry._native import socket_folder
from kvferry.log import logger_of

logger = logger_of(__name__)

# Time for a host to start.
START_S = 60

# Time for a host whose engine has left to end by itself.
EXIT_S = 1

# One that is started beside another one ends, and that one may end meanwhile, too.
STARTS_MAX = 2

# The command of this Python, with the working directory excluded from imports.
PYTHON = [sys.executable, *(["-P"] if sys.version_info >= (3, 11) else [])]

# Starts a program that is no child of this process: vLLM kills those before they can clear up. It has the descriptor whose
# number comes first, which closes when it ends.
ORPHAN = (
    "import subprocess, sys; "
    "subprocess.Popen(sys.argv[2:], stdin=subprocess.DEVNULL, start_new_session=True, pass_fds=[int(sys.argv[1])])"
)

# By which vLLM's CPU backend has the OpenMP runtime bind a worker. It is loaded before anything else (LD_PRELOAD),
# and binds the main thread of each process that has them in its environment.
BINDING = ("GOMP_CPU_AFFINITY", "KMP_AFFINITY", "OMP_PLACES", "OMP_PROC_BIND")

Made = TypeVar("Made")


def socket_at(name: str) -> Path:
    """Where a host of this user with that name listens; raises PermissionError if the folder of it is not this user's
    alone."""
    folder = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    folder = Path(folder) / f"kvferry-{os.getuid()}"
    socket_folder(folder)
    return folder / f"{name}.sock"


@contextlib.contextmanager
def unbound():
    """What is started in it, with the environment that it gives, runs wherever this server may. vLLM binds a worker to
    the cores that it computes on: whatever the worker starts would be bound to them as well, and wait for them."""
    bound = os.sched_getaffinity(0)
    # The process that started this one is not bound.
    os.sched_setaffinity(0, bound | os.sched_getaffinity(os.getppid()))
    try:
        yield {name: value for name, value in os.environ.items() if name not in BINDING}
    finally:
        os.sched_setaffinity(0, bound)


class _Started:
    """A host that was started, until it is known to have ended."""

    def __init__(self, socket: Path, options: Sequence[str]):
        self.alive, held = os.pipe()
        command = [*PYTHON, "-m", "kvferry.host", "--socket", str(socket), *options]
        try:
            with unbound() as environment:
                subprocess.run(
                    [*PYTHON, "-c", ORPHAN, str(held), *command], check=True, env=environment, pass_fds=[held]
                )
        except BaseException:
            os.close(self.alive)
            raise
        finally:
            os.close(held)

    def has_ended(self) -> bool:
        ended = select.poll()
        ended.register(self.alive, select.POLLHUP)
        return bool(ended.poll(0))

    def close(self) -> None:
        os.close(self.alive)


class HostProcess:
    """The process at the other end of a connection, to be ended: what it moves for an engine that has given
    it up lands in blocks that are used for something else, or comes out of them."""

    def __init__(self, connection: int):
        """Raises ConnectionError if the process cannot be seen."""
        with sockets.socket(fileno=os.dup(connection)) as open_:
            said = open_.getsockopt(sockets.SOL_SOCKET, sockets.SO_PEERCRED, struct.calcsize("3i"))
        self.pid = struct.unpack("3i", said)[0]
        if self.pid == 0:
            raise ConnectionError(
                "the kvferry host is in another PID namespace, where this engine cannot end it if it stands"
                " still: run both in one"
            )
        try:
            self._process = os.pidfd_open(self.pid)
        except ProcessLookupError:
            self._process = None
        except OSError as why:
            said = f"the end of the kvferry host cannot be waited for: pidfd_open: {why}"
            raise ConnectionError(said) from why

    def end(self) -> None:
        """Returns when the process has ended. One that does not by itself, as a host does whose engine has
        left, is killed."""
        if self._process is None:
            return
        process, self._process = self._process, None
        ended = select.poll()
        ended.register(process, select.POLLIN)
        try:
            if ended.poll(EXIT_S * 1000):
                return
            logger.error("the kvferry host does not end by itself: process %d is killed", self.pid)
            # It may have ended meanwhile.
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(process, signal.SIGKILL)
            ended.poll()
        finally:
            os.close(process)


def connect(
    socket: Path,
    make: Callable[[Path], Made],
    spawn: bool,
    options: Sequence[str] = (),
    seconds: float = START_S,
) -> Made:
    """`make(socket)`, with a host that is started with these options unless there is one. Whoever binds the path serves;
    a second host ends at once. Raises ConnectionError after so many seconds, or when the one that was started has ended and
    there is no other."""
    deadline = time.monotonic() + seconds
    starts, started = 0, None
    try:
        while True:
            try:
                return make(socket)
            except ConnectionError as error:
                if time.monotonic() > deadline:
                    raise ConnectionError(f"{error}, for {seconds} s") from error
                if started is not None and started.has_ended():
                    started.close()
                    started = None
                    if starts == STARTS_MAX:
                        said = "the one that was started ended at once, and says why in the lines before this one"
                        raise ConnectionError(f"{error}; {said}") from error
            if spawn and started is None:
                started = _Started(socket, options)
                starts += 1
            time.sleep(0.02)
    finally:
        if started is not None:
            started.close()
