"""What a stage gets."""

import contextlib
import math
import threading
import time
from typing import Any

from kvferry._native import PayloadLink
from kvferry.omni import codec, settings
from kvferry.omni.buffer import PayloadBuffer
from kvferry.omni.channel import Channel, Channels, Claim
from kvferry.omni.keys import ChunksOf, PayloadKey, parsed, wrong_with
from kvferry.omni.outcomes import REMEMBERED_MAX, OutcomeCounts, PayloadLost

# A key whose payload is lost is asked for again, and the loss told again, so often.
AGAIN_S = 1.0

# Of a payload that may still come: how often is asked.
UNSURE_AGAIN_S = 0.02

# For how long what becomes of a payload is not taken for its outcome, if it may be, or is, that of an earlier request with the
# same id.
UNSURE_S = {"no": 0.0, "perhaps": 30.0, "yes": math.inf}

# For how long a payload that was not put, and is no chunk of a stream, may be put again: vLLM-Omni's manager of KV caches and
# its workers try three times within a second.
PUT_AGAIN_S = 1.0

# Characters in the name of a host.
NAME_MAX = 300

# From stage, to stage, key.
Place = tuple[str, str, str]


class Want:
    """A key that was asked for."""

    __slots__ = ("again", "channel", "engine", "is_chunk", "key", "metadata", "producer", "sender", "unsure")

    def __init__(self, key: PayloadKey, metadata: Any, is_chunk: bool):
        self.key = key
        self.is_chunk = is_chunk
        # Where it is wanted, if it is.
        self.channel: Channel | None = None
        # When it is to be wanted again, if it is not.
        self.again = 0.0
        # Since when its outcome is unsure, if it is.
        self.unsure: float | None = None
        self.learn(metadata)

    def learn(self, metadata: Any) -> bool:
        """What metadata says of where the payload is; metadata that makes no sense says nothing. True if that is news."""
        before = getattr(self, "producer", None), getattr(self, "engine", None), getattr(self, "sender", None)
        self.metadata = metadata
        given = metadata if isinstance(metadata, dict) else {}
        own = given.get(settings.NAME)
        own = own if isinstance(own, dict) else {}
        incarnation, client = _number(own.get("incarnation"), 64), _number(own.get("client"), 32)
        # Incarnation of its host, and number there of who put it.
        self.producer = (incarnation, client) if incarnation is not None else (None, None)
        # How other hosts call that one, if they reach it.
        self.engine = _name(own.get("engine"))
        # Where a stage with a connector of MoRI listens.
        host, port = _name(given.get("source_host")), _number(given.get("source_port"), 16)
        self.sender: tuple[str, int] | None = (host, port) if host and port and not own else None
        return before != (self.producer, self.engine, self.sender)


def _number(value: Any, bits: int) -> int | None:
    return value if type(value) is int and 0 <= value < 1 << bits else None


def _name(value: Any) -> str | None:
    """Of a host, perhaps with a port."""
    return value if isinstance(value, str) and value.isprintable() and 0 < len(value) <= NAME_MAX else None


class Receiver:
    """Looks for payloads, and says at once which ones do not come."""

    def __init__(self, channels: Channels, counts: OutcomeCounts, chunks_of: ChunksOf):
        self.channels = channels
        self.counts = counts
        self.chunks_of = chunks_of
        self.wants: dict[Place, Want] = {}
        # Where the stage before this one listens, if it was told; with a connector of MoRI.
        self.sender: tuple[str, int] | None = None
        # What was raised last in a thread, in words: the exception would keep the channel.
        self.raised = threading.local()

    def poll(self, want: Want, metadata: Any) -> tuple[Any, int] | None:
        if metadata is not None and metadata is not want.metadata:
            self._learn(want, metadata)
        if want.channel is None and not self._ask(want):
            return None
        return self._heard(want, 0.0)

    def first(self, place: Place, metadata: Any, wait: float) -> tuple[Any, int] | None:
        """The first call for a key, which waits so long."""
        self.channels.of_stage(place[1])
        key = parsed(*place)
        with self.channels.lock:
            want = self.wants.setdefault(place, Want(key, metadata, self.chunks_of.has(key)))
            if len(self.wants) > REMEMBERED_MAX:
                self.abandon(next(iter(self.wants)))
        if want.channel is None and not self._ask(want):
            return None
        return self._heard(want, wait)

    def wait(self, place: Place, metadata: Any, deadline: float) -> tuple[Any, int] | None:
        want = self.wants.get(place)
        if want is None:
            got = self.first(place, metadata, max(0.0, deadline - time.monotonic()))
            want = self.wants.get(place)
            if got is not None or want is None:
                return got
        elif metadata is not None and metadata is not want.metadata:
            self._learn(want, metadata)
        while True:
            if want.channel is not None or self._ask(want):
                got = self._heard(want, deadline - time.monotonic())
                if got is not None:
                    return got
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            # Until it may be asked again.
            time.sleep(max(0.0, min(left, want.again - time.monotonic())))

    def _learn(self, want: Want, metadata: Any) -> None:
        """What a later call says of where the payload is counts as well: it is asked for there."""
        with self.channels.lock:
            if want.learn(metadata) and (channel := want.channel) is not None:
                want.channel, want.again = None, 0.0
                with self.channels.at(channel):
                    channel.link.abandon(want.key)

    def _ask(self, want: Want) -> bool:
        """Whether the host knows that it is wanted."""
        if want.again and time.monotonic() < want.again:
            self.counts.not_ready += 1
            return False
        if (why := wrong_with(want.key)) is not None:
            raise self._lost(want, "bad-key", why)
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
        at, (incarnation, client), engine = self.channels.settings, want.producer, want.engine
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
        with self.channels.lock:
            for place in [place for place, its in self.wants.items() if its is want]:
                del self.wants[place]
        try:
            memory, header_max = channel.pool[offset : offset + nbytes], self.channels.settings.object_bytes
            obj, whole = codec.decode_either(memory, claim, header_max)
        except codec.PayloadError as error:
            raise self._lost(want, "corrupt", str(error)) from error
        # Who dies before this has not had it.
        with contextlib.suppress(ConnectionError):
            channel.link.take(number)
        self.counts.moved("gets", whole)
        if isinstance(obj, codec.Raw):
            return PayloadBuffer(obj), obj.tensor.nbytes
        return obj, whole

    def _missing(self, want: Want, kind: str, why: str, former: str) -> None:
        """Raises, unless the payload may still come: what is said may be of an earlier request with the same id, and what is no
        chunk may be put again."""
        now = time.monotonic()
        unsure_s = UNSURE_S[former]
        if kind == "given-up" and not want.is_chunk:
            unsure_s = max(unsure_s, PUT_AGAIN_S)
        since = want.unsure if want.unsure is not None else now
        if now - since < unsure_s:
            want.channel, want.again, want.unsure = None, now + UNSURE_AGAIN_S, since
            self.counts.not_ready += 1
            return
        raise self._lost(want, kind, why)

    def _gone(self, want: Want, channel: Channel, error: ConnectionError) -> PayloadLost:
        self.channels.broke(channel, error)
        return self._lost(want, "host-gone", str(error))

    def _lost(self, want: Want, kind: str, why: str) -> PayloadLost:
        """To be raised. It is wanted again a little later: the next request may have the same id."""
        want.channel, want.again = None, time.monotonic() + AGAIN_S
        want.producer, want.engine, want.unsure = (None, None), None, None
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
            channel = self.channels.current()
            if channel is not None and not is_whole:
                with self.channels.at(channel):
                    channel.link.clean_up(*stream, True)

    def close(self) -> None:
        for place in list(self.wants):
            self.abandon(place)
