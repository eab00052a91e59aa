"""The link to the host, and another one when it is lost."""

import contextlib
import functools
import multiprocessing
import os
import select
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Protocol

from kvferry.log import logger_of

logger = logger_of(__name__)

# Before a lost host is looked for: an engine that ends is not to start another one.
PAUSE_S = 1.0
PAUSE_MAX_S = 30.0


def guarded(otherwise: Callable):
    """A hook that never raises into vLLM. A mistake costs the host, and with it what was under way, but
    not the engine; the answer then is what `otherwise` says."""

    def wrap(hook):
        @functools.wraps(hook)
        def guard(self, *args):
            try:
                return hook(self, *args)
            except Exception as error:
                logger.exception("%s failed; the host is given up", hook.__name__)
                self.line.lost(error)
                return otherwise(self, *args)

        return guard

    return wrap


def _shut(descriptor: int) -> None:
    """Ends a connection for all who have it."""
    with socket.socket(fileno=os.dup(descriptor)) as connection:
        # The other side may have ended it before.
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)


def nothing(*_) -> None:
    """The answer of a hook that has none."""


class HostLink(Protocol):
    """To a host."""

    def fileno(self) -> int: ...

    def close(self) -> None: ...


class Line:
    """`link` is of the threads that call the hooks; another one waits for its end and makes the next.

    `on_lost` gives up what the lost host knew, on a thread of the hooks, before the next link is taken;
    it is told the link to it.
    """

    def __init__(
        self,
        link: HostLink,
        make: Callable[[], HostLink],
        on_lost: Callable[[HostLink], None] = lambda link: None,
    ):
        self.link: HostLink | None = link
        self._next: HostLink | None = None
        # Who changes the link.
        self._changing = threading.RLock()
        self._is_over = False
        # The server that this engine was started by has ended.
        self._orphaned = False
        # What is watched of the link, and who may shut it.
        self._socket = -1
        self._shutting = threading.Lock()
        self._make = make
        self._on_lost = on_lost
        # A descriptor of its own: the hooks may drop a link at any time.
        watch = threading.Thread(target=self._watch, args=(os.dup(link.fileno()),), daemon=True)
        watch.start()
        _orphaned_with_server(self)

    def current(self) -> HostLink | None:
        """The link, or the next one if it is there."""
        if self._next is not None:
            with self._changing:
                if self._next is not None:
                    self._give_up()
                    self.link, self._next = self._next, None
        return self.link

    def lost(self, error: Exception, link: HostLink | None = None) -> None:
        """The link does not work any more, or what was said by it cannot be trusted. With `link` only if it is that one,
        and no other thread has said it."""
        with self._changing:
            if link is None or link is self.link:
                logger.error("%s", error)
                self._give_up()

    def end(self) -> None:
        """No link is needed any more. The last one stays open as long as somebody has it."""
        with self._changing:
            self._is_over = True
            self.link = self._next = None

    def _give_up(self) -> None:
        link, self.link = self.link, None
        if link is not None:
            link.close()
            self._on_lost(link)

    def _watch(self, descriptor: int) -> None:
        while True:
            with self._shutting:
                self._socket = descriptor
                if self._orphaned:
                    _shut(descriptor)
            ended = select.poll()
            ended.register(descriptor, select.POLLRDHUP)
            ended.poll()
            with self._shutting:
                self._socket = -1
                os.close(descriptor)
                if self._orphaned:
                    return
            link = self._again()
            if link is None:
                return
            descriptor = os.dup(link.fileno())
            with self._changing:
                if self._is_over:
                    os.close(descriptor)
                    return link.close()
                self._next = link
            del link

    def orphan(self) -> None:
        """The server that started this engine has ended: the host ends, too."""
        if self._is_over:
            return
        logger.error("the server that started this engine has ended: its kvferry host ends, too")
        with self._shutting:
            self._orphaned = True
            if self._socket >= 0:
                _shut(self._socket)

    def _again(self) -> HostLink | None:
        pause = PAUSE_S
        while True:
            if self._is_over:
                return None
            time.sleep(pause)
            if self._is_over:
                return None
            if self._orphaned:
                sys.exit()
            try:
                link = self._make()
                logger.info("the kvferry host is there again")
                return link
            # The engine lives on without it, whatever it is.
            except Exception as error:
                pause = min(2 * pause, PAUSE_MAX_S)
                logger.warning("%s; again in %.0f s", error, pause)


# Those of a process, which is named, and whether its server has ended.
_lines: weakref.WeakSet[Line] = weakref.WeakSet()
_watching = threading.Lock()
_watched: int | None = None
_is_orphan = False


def _orphaned_with_server(line: Line) -> None:
    """An engine outlives the server that started it if that is killed, and gets no requests any
    more. Its host has to end, or routers go on sending decodes to it."""
    global _watched, _is_orphan
    if multiprocessing.parent_process() is None:
        return
    with _watching:
        if _watched != os.getpid():
            # Not those of the process that this one is a fork of.
            _lines.clear()
            _watched, _is_orphan = os.getpid(), False
            threading.Thread(target=_watch_server, daemon=True).start()
        _lines.add(line)
        is_orphan = _is_orphan
    if is_orphan:
        line.orphan()


def _watch_server() -> None:
    global _is_orphan
    try:
        server = os.pidfd_open(multiprocessing.parent_process().pid)
    except ProcessLookupError:
        server = -1
    if server >= 0:
        ended = select.poll()
        ended.register(server, select.POLLIN)
        ended.poll()
        os.close(server)
    with _watching:
        _is_orphan = True
        lines = list(_lines)
    for line in lines:
        line.orphan()
