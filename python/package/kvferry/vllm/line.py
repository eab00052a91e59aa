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
from collections.abc import Callable

from kvferry._native import Link
from kvferry.vllm.log import logger_of

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


class Line:
    """`link` is of the thread that calls the hooks; another thread waits for its end and makes the next.

    `on_lost` gives up what the lost host knew, on the thread of the hooks, before the next link is taken;
    it is told the link to it.
    """

    def __init__(
        self,
        link: Link,
        make: Callable[[], Link],
        on_lost: Callable[[Link], None] = lambda link: None,
    ):
        self.link: Link | None = link
        self._next: Link | None = None
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
        threading.Thread(target=self._watch_server, daemon=True).start()

    def current(self) -> Link | None:
        """The link, or the next one if it is there."""
        if self._next is not None:
            self._give_up()
            self.link, self._next = self._next, None
        return self.link

    def lost(self, error: Exception) -> None:
        """The link does not work any more, or what was said by it cannot be trusted."""
        logger.error("%s", error)
        self._give_up()

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
            descriptor = os.dup(link.fileno())
            self._next = link

    def _watch_server(self) -> None:
        """An engine outlives the server that started it if that is killed, and gets no requests any
        more. Its host has to end, or routers go on sending decodes to it."""
        parent = multiprocessing.parent_process()
        if parent is None:
            return
        try:
            server = os.pidfd_open(parent.pid)
        except ProcessLookupError:
            server = -1
        if server >= 0:
            ended = select.poll()
            ended.register(server, select.POLLIN)
            ended.poll()
            os.close(server)
        logger.error("the server that started this engine has ended: its kvferry host ends, too")
        with self._shutting:
            self._orphaned = True
            if self._socket >= 0:
                _shut(self._socket)

    def _again(self) -> Link:
        pause = PAUSE_S
        while True:
            time.sleep(pause)
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
