"""The connection to the host of a pipeline, and the pool of it in this process."""

import contextlib
import mmap
import os
import threading
import weakref
from collections.abc import Callable

import numpy as np

from kvferry._native import PayloadLink
from kvferry.line import Line
from kvferry.omni.settings import OmniSettings
from kvferry.start import START_S, connect

# For a host that is to be there already.
CONNECT_S = 1.5

# A host that was started ends when no process of the pipeline has been there for so long.
IDLE_S = 10

# By device and inode of the memory file: each is mapped once in a process.
_pools: weakref.WeakValueDictionary[tuple[int, int], np.ndarray] = weakref.WeakValueDictionary()
_mapping = threading.Lock()


def mapped(descriptor: int, nbytes: int) -> np.ndarray:
    """The bytes of a memory file, for as long as somebody has a part of them."""
    file = os.fstat(descriptor)
    with _mapping:
        pool = _pools.get((file.st_dev, file.st_ino))
        if pool is None:
            pool = np.frombuffer(mmap.mmap(descriptor, nbytes), np.uint8)
            _pools[file.st_dev, file.st_ino] = pool
        return pool


class Channel:
    """Stays open as long as somebody has it: a connector, a put that is under way, or a payload that is read."""

    def __init__(self, link: PayloadLink):
        self.process = os.getpid()
        # It ends with this.
        self.link = link
        self.pool = mapped(link.pool_fd, link.pool_bytes)

    def address(self, otherwise: tuple[str, int]) -> tuple[str, int]:
        """Where other hosts reach the one of this channel."""
        if self.link.engine is None:
            return otherwise
        host, _, port = self.link.engine.rpartition(":")
        return host, int(port)

    def fileno(self) -> int:
        return self.link.fileno()

    def close(self) -> None:
        """Does nothing: with the connection a host takes what this process reads and writes for free, and who has this may
        read or write."""


class Claim:
    """Of a payload that arrived. It is not read any more when nobody has this."""

    __slots__ = ("channel", "number")

    def __init__(self, channel: Channel, number: int):
        self.channel = channel
        self.number = number

    def __del__(self):
        # Who is gone holds nothing.
        with contextlib.suppress(Exception):
            if self.channel.process == os.getpid():
                self.channel.link.release(self.number)


def opened(settings: OmniSettings, stage: str) -> Channel:
    """With a host that is started if the settings say so and there is none."""
    options = ("--payload-pool", str(settings.pool_bytes), "--idle-s", str(IDLE_S))

    def make(path) -> PayloadLink:
        link = PayloadLink.connect(str(path), settings.deployment, stage, settings.pool_bytes if settings.spawn else None)
        link.wait_ready(START_S)
        return link

    seconds = START_S if settings.spawn else CONNECT_S
    return Channel(connect(settings.socket, make, settings.spawn, options, seconds))


class Channels:
    """The channel of a connector, and the next one when the host is lost. `changed` is told of that."""

    def __init__(self, settings: OmniSettings):
        self.settings = settings
        # The first payload says which one this is, if the configuration does not.
        self.stage = settings.stage
        self.changed: Callable[[Channel], None] = lambda channel: None
        # What each change of all that belongs to the connector is made under.
        self.lock = threading.RLock()
        self._line: Line | None = None
        self._open()

    def _open(self) -> None:
        settings, stage = self.settings, self.stage or ""
        channel = opened(settings, stage)
        # Its threads are not to keep the connector.
        self._line = Line(channel, lambda: opened(settings, stage))
        self._is(channel)

    def _is(self, channel: Channel) -> None:
        # The last one that there was, which may be gone.
        self.last = weakref.ref(channel)
        self.pool_bytes = channel.link.pool_bytes
        self.name = f"kvferry-{channel.link.incarnation}-{channel.link.client}"

    def of_stage(self, stage: str) -> None:
        """The stage that this process is, from the first payload on."""
        if self.stage is not None:
            return
        with self.lock:
            if self.stage is None:
                self.stage, unknown = str(stage), self._line
                self._open()
                unknown.end()

    def current(self) -> Channel | None:
        """Where payloads go now; none while there is no host."""
        line = self._line
        channel = line.current() if line is not None else None
        if channel is not None and channel is not self.last():
            with self.lock:
                if channel is not self.last():
                    self._is(channel)
                    self.changed(channel)
        return channel

    def broke(self, channel: Channel, error: Exception) -> None:
        """Its host is gone."""
        if (line := self._line) is not None:
            line.lost(error, channel)

    @contextlib.contextmanager
    def at(self, channel: Channel):
        """What is done in it is left out if the host is gone."""
        try:
            yield
        except ConnectionError as error:
            self.broke(channel, error)

    def end(self) -> None:
        line, self._line = self._line, None
        if line is not None:
            line.end()
