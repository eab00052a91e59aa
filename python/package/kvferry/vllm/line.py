"""The link to the host, and another one when it is lost."""

import logging
import os
import select
import threading
import time
from collections.abc import Callable

from kvferry._native import Link

logger = logging.getLogger(__name__)

# Before a lost host is looked for: an engine that ends is not to start another one.
PAUSE_S = 1.0
PAUSE_MAX_S = 30.0


class Line:
    """`link` is of the thread that calls the hooks; another thread waits for its end and makes the next.

    `on_lost` gives up what the lost host knew, on the thread of the hooks, before the next link is taken.
    """

    def __init__(
        self, link: Link, make: Callable[[], Link], on_lost: Callable[[], None] = lambda: None
    ):
        self.link: Link | None = link
        self._next: Link | None = None
        self._make = make
        self._on_lost = on_lost
        # A descriptor of its own: the hooks may drop a link at any time.
        watch = threading.Thread(target=self._watch, args=(os.dup(link.fileno()),), daemon=True)
        watch.start()

    def current(self) -> Link | None:
        """The link, or the next one if it is there."""
        if self._next is not None:
            self._give_up()
            self.link, self._next = self._next, None
        return self.link

    def lost(self, error: ConnectionError) -> None:
        """The link does not work any more."""
        logger.error("%s", error)
        self._give_up()

    def _give_up(self) -> None:
        if self.link is not None:
            self.link = None
            self._on_lost()

    def _watch(self, socket: int) -> None:
        while True:
            ended = select.poll()
            ended.register(socket, select.POLLRDHUP)
            ended.poll()
            os.close(socket)
            link = self._again()
            socket = os.dup(link.fileno())
            self._next = link

    def _again(self) -> Link:
        pause = PAUSE_S
        while True:
            time.sleep(pause)
            try:
                link = self._make()
                logger.info("the kvferry host is there again")
                return link
            # The engine lives on without it, whatever it is.
            except Exception as error:
                pause = min(2 * pause, PAUSE_MAX_S)
                logger.warning("%s; again in %.0f s", error, pause)
