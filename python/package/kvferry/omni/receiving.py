"""What a stage gets."""

import contextlib
import threading
import time
from typing import Any

from kvferry._native import PayloadLink
from kvferry.omni import codec, settings
from kvferry.omni.buffer import PayloadBuffer
from kvferry.omni.channel import Channel, Channels, Claim
from kvferry.omni.keys import PayloadKey, parsed
from kvferry.omni.outcomes import REMEMBERED_MAX, OutcomeCounts, PayloadLost, Remembered

# A key whose payload is lost is asked for again, and the loss told again, so often.
AGAIN_S = 1.0

# Of a request whose id was used before: how often is asked, and for how long what became of the earlier one is taken for that.
REUSED_AGAIN_S = 0.02
REUSED_S = 30.0

# From stage, to stage, key.
Place = tuple[str, str, str]


class Want:
    """A key that was asked for."""

    __slots__ = ("again", "channel", "key", "producer", "sender", "since")

    def __init__(self, key: PayloadKey, metadata: dict[str, Any] | None):
        self.key = key
        own = metadata.get(settings.NAME) if metadata else None
        own = own if isinstance(own, dict) else {}
        # Incarnation of its host, number there of who put it, and how other hosts call that one, if they reach it.
        self.producer = own.get("incarnation"), own.get("client"), own.get("engine")
        # Where a stage with a connector of MoRI listens.
        source = metadata or {}
        host, port = source.get("source_host"), source.get("source_port")
        self.sender: tuple[str, int] | None = (host, port) if host and port and not own else None
        # Where it is wanted, if it is.
        self.channel: Channel | None = None
        # When it is to be wanted again, if it is not.
        self.again = 0.0
        self.since = time.monotonic()


class Receiver:
    """Looks for payloads, and says at once which ones do not come."""

    def __init__(self, channels: Channels, counts: OutcomeCounts):
        self.channels = channels
        self.counts = counts
        self.wants: dict[Place, Want] = {}
        # Where the stage before this one listens, if it was told; with a connector of MoRI.
        self.sender: tuple[str, int] | None = None
        # Keys that were taken here.
        self._taken: Remembered = Remembered()
        # Streams of which no more is wanted, of requests that are over.
        self._over: Remembered = Remembered()
        # What was raised last in a thread, in words: the exception would keep the channel.
        self.raised = threading.local()

    def poll(self, want: Want) -> tuple[Any, int] | None:
        if want.channel is None and not self._ask(want):
            return None
        return self._heard(want, 0.0)

    def first(self, place: Place, metadata: dict[str, Any] | None, wait: float) -> tuple[Any, int] | None:
        """The first call for a key, which waits so long."""
        self.channels.of_stage(place[1])
        with self.channels.lock:
            want = self.wants.setdefault(place, Want(parsed(*place), metadata))
            if len(self.wants) > REMEMBERED_MAX:
                self.abandon(next(iter(self.wants)))
        if want.channel is None and not self._ask(want):
            return None
        return self._heard(want, wait)

    def wait(self, place: Place, metadata: dict[str, Any] | None, deadline: float) -> tuple[Any, int] | None:
        want = self.wants.get(place)
        if want is None:
            return self.first(place, metadata, deadline - time.monotonic())
        while True:
            if want.channel is not None or self._ask(want):
                return self._heard(want, deadline - time.monotonic())
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            # Until it may be asked again.
            time.sleep(max(0.0, min(left, want.again - time.monotonic())))

    def _ask(self, want: Want) -> bool:
        """Whether the host knows that it is wanted."""
        if want.again and time.monotonic() < want.again:
            self.counts.not_ready += 1
            return False
        channel = self.channels.current()
        if channel is None:
            raise self._lost(want, "host-gone", "the host is gone, and there is no other one yet")
        try:
            self._want(want, channel.link)
        except ConnectionError as error:
            raise self._gone(want, channel, error) from error
        want.channel = channel
        return True

    def _want(self, want: Want, link: PayloadLink) -> None:
        at, (incarnation, client, engine) = self.channels.settings, want.producer
        if want.key.stream[0] in at.mori_stages:
            sender = want.sender or self.sender or at.mori_sender
            if sender is None:
                why = "nothing says where its stage listens: give sender_host and sender_zmq_port"
                raise self._lost(want, "peer-gone", why)
            link.fetch(want.key, *sender)
        elif engine not in (None, link.engine):
            link.want(want.key, host=engine)
        elif incarnation not in (None, link.incarnation):
            raise self._lost(want, "host-gone", "the host that had it was lost")
        else:
            link.want(want.key, client)

    def _heard(self, want: Want, wait: float) -> tuple[Any, int] | None:
        channel = want.channel
        # Another thread has it.
        if channel is None:
            return None
        try:
            outcome = channel.link.wait(want.key, wait) if wait > 0 else channel.link.poll(want.key)
        except ConnectionError as error:
            raise self._gone(want, channel, error) from error
        if outcome is None:
            self.counts.not_ready += 1
            return None
        if outcome[0] == "arrived":
            return self._arrived(want, channel, *outcome[1:])
        return self._missing(want, *outcome[1:])

    def _arrived(
        self, want: Want, channel: Channel, number: int, offset: int, nbytes: int, _generation: int
    ) -> tuple[Any, int]:
        claim = Claim(channel, number)
        key = want.key
        with self.channels.lock:
            for place in [place for place, its in self.wants.items() if its is want]:
                del self.wants[place]
            self._taken[key] = None
            self._over.pop(key.stream, None)
        try:
            obj, whole = codec.decode_either(channel.pool[offset : offset + nbytes], claim)
        except codec.PayloadError as error:
            raise self._lost(want, "corrupt", str(error)) from error
        # Who dies before this has not had it.
        with contextlib.suppress(ConnectionError):
            channel.link.take(number)
        self.counts.moved("gets", whole)
        if isinstance(obj, codec.Raw):
            return PayloadBuffer(obj), obj.tensor.nbytes
        return obj, whole

    def _missing(self, want: Want, kind: str, why: str) -> None:
        """Raises, unless it is said of an earlier request with the same id."""
        now = time.monotonic()
        is_reused = want.key in self._taken if kind == "taken" else want.key.stream in self._over
        if is_reused and (kind == "taken" or now - want.since < REUSED_S):
            want.channel, want.again = None, now + REUSED_AGAIN_S
            self.counts.not_ready += 1
            return
        raise self._lost(want, kind, why)

    def _gone(self, want: Want, channel: Channel, error: ConnectionError) -> PayloadLost:
        self.channels.broke(channel, error)
        return self._lost(want, "host-gone", str(error))

    def _lost(self, want: Want, kind: str, why: str) -> PayloadLost:
        """To be raised. It is wanted again a little later: the next request may have the same id."""
        want.channel, want.again = None, time.monotonic() + AGAIN_S
        want.producer = None, None, None
        error = PayloadLost(want.key, kind, why)
        self.counts.failed(kind, str(error))
        self.raised.error = str(error)
        return error

    def abandon(self, place: Place) -> None:
        """It is not wanted any more. What arrived for it is for who asks next."""
        want = self.wants.pop(place, None)
        if want is not None and (channel := want.channel) is not None:
            with self.channels.at(channel):
                channel.link.abandon(want.key)

    def ended(self, stream: tuple[str, str, str], is_whole: bool) -> None:
        """No more of a stream is wanted: all of it was got, or the rest is not needed."""
        with self.channels.lock:
            for place in [place for place, want in self.wants.items() if want.key.stream == stream]:
                self.abandon(place)
            self._over[stream] = None
            channel = self.channels.current()
            if channel is not None and not is_whole:
                with self.channels.at(channel):
                    channel.link.clean_up(*stream)

    def close(self) -> None:
        for place in list(self.wants):
            self.abandon(place)
