"""What a stage puts."""

from typing import Any

from kvferry.log import logger_of
from kvferry.omni import codec, device, settings
from kvferry.omni.buffer import PayloadBuffer
from kvferry.omni.channel import Channel, Channels
from kvferry.omni.keys import ChunksOf, PayloadKey, wrong_with
from kvferry.omni.outcomes import OutcomeCounts, Remembered

logger = logger_of(__name__)

HOST_LOST = "the host that had chunks of it was lost"

Stream = tuple[str, str, str]


class Sender:
    """A payload that is not put is missed by somebody: who gets it is told, and so is who gets what would follow."""

    def __init__(self, channels: Channels, counts: OutcomeCounts, chunks_of: ChunksOf):
        self.channels = channels
        self.counts = counts
        self.chunks_of = chunks_of
        # Streams that were put into: incarnation of the host that has it, and the life of its request.
        self._open: Remembered = Remembered()
        # Streams of which nothing is put any more: the life of the request, and why.
        self._given_up: Remembered = Remembered()
        # Streams and single payloads that are given up, and why, of which no host has been told yet.
        self._untold: Remembered = Remembered()
        channels.changed = self._changed

    def put(self, key: PayloadKey, data: Any) -> tuple[bool, int, dict[str, Any] | None]:
        if (why := wrong_with(key)) is not None:
            # Nobody can ask for it either.
            self.counts.failed("bad-key", f"{key}: {why}")
            logger.error("%s is not put (bad-key): %s", key, why)
            return False, 0, None
        is_chunk = self.chunks_of.has(key)
        channel = self.channels.current()
        if is_chunk and (known := self._given_up.get(key.stream)) is not None:
            life, why = known
            if life is self.chunks_of.life:
                self.counts.failed("given-up", f"{key}: {why}")
                return False, 0, None
        if channel is None:
            return self._not_put(key, is_chunk, "host-gone", "the host is gone, and there is no other one yet")
        try:
            # Whether the stage that gets it has vLLM-Omni's connector for MoRI.
            is_foreign = key.to_stage in self.channels.settings.mori_stages
            plain, header_max = _plain(data), self.channels.settings.object_bytes
            encoded = codec.encode_foreign(plain) if is_foreign else codec.encode(plain, header_max)
            return self._put(channel, (key, is_chunk), encoded, is_foreign)
        except ConnectionError as error:
            self.channels.broke(channel, error)
            return self._not_put(key, is_chunk, "host-gone", str(error))
        except TimeoutError as error:
            return self._not_put(key, is_chunk, "host-silent", str(error))
        except Exception as error:
            return self._not_put(key, is_chunk, "unencodable", f"{type(error).__name__}: {error}")

    def _put(
        self, channel: Channel, named: tuple[PayloadKey, bool], encoded: codec.Encoded, is_foreign: bool
    ) -> tuple[bool, int, dict[str, Any] | None]:
        key, is_chunk = named
        nbytes, link, at = encoded.nbytes, channel.link, self.channels.settings
        slot, *place = link.reserve(nbytes, at.put_wait_s)
        if slot is None:
            return self._not_put(key, is_chunk, *place)
        try:
            (offset,) = place
            if encoded.is_on_device():
                device.pin(channel.pool)
            encoded.write(channel.pool[offset : offset + nbytes])
        except BaseException:
            link.give_back(slot)
            raise
        refused = link.put(slot, key, is_chunk)
        # Whose stream was cleaned up needs no more of it, and its producer may go on with something else.
        if refused is not None and refused[0] != "cleaned-up":
            return self._not_put(key, is_chunk, *refused)
        if is_chunk:
            with self.channels.lock:
                self._open[key.stream] = link.incarnation, self.chunks_of.life
                self._given_up.pop(key.stream, None)
        self.counts.moved("puts", nbytes)
        host, port = at.address if is_foreign else channel.address(at.address)
        metadata = {
            "source_host": host,
            "source_port": port,
            "data_size": encoded.payload_bytes if is_foreign else nbytes,
            "is_fast_path": encoded.is_raw,
            settings.NAME: {"incarnation": link.incarnation, "client": link.client, "engine": link.engine},
        }
        return True, encoded.payload_bytes, metadata

    def _not_put(self, key: PayloadKey, is_chunk: bool, kind: str, why: str) -> tuple[bool, int, None]:
        self.counts.failed(kind, f"{key}: {why}")
        logger.error("%s is not put (%s): %s", key, kind, why)
        if kind == "superseded":
            # Whoever waits, waits for what the other process puts.
            self._given_up[key.stream] = self.chunks_of.life, why
            return False, 0, None
        with self.channels.lock:
            # It may be put again, unless it is a chunk.
            self._tell(key, is_chunk, why)
            if is_chunk:
                self._give_up(key.stream, self.chunks_of.life, why)
        return False, 0, None

    def _changed(self, channel: Channel) -> None:
        """There is another host: of the streams that were put into before it, chunks may be lost."""
        for stream, (of, life) in list(self._open.items()):
            if of != channel.link.incarnation:
                self._give_up(stream, life, HOST_LOST)
        for (what, is_chunk), why in list(self._untold.items()):
            self._tell(what, is_chunk, why)

    def _give_up(self, stream: Stream, life: Any, why: str) -> None:
        """Of a request nothing is put any more."""
        with self.channels.lock:
            self._given_up[stream] = life, why
            self._open.pop(stream, None)
            self._tell(stream, True, why)

    def _tell(self, what: PayloadKey | Stream, is_chunk: bool, why: str) -> None:
        """Who gets what is not put is told, as soon as there is a host: of one payload, or of all that comes of a stream."""
        with self.channels.lock:
            self._untold[what, is_chunk] = why
            if (channel := self.channels.current()) is not None:
                with self.channels.at(channel):
                    if isinstance(what, PayloadKey):
                        channel.link.give_up(what, is_chunk, why)
                    else:
                        channel.link.end(*what, why)
                    self._untold.pop((what, is_chunk), None)

    def cleaned_up(self, stream: Stream) -> None:
        with self.channels.lock:
            self._given_up.pop(stream, None)
            self._open.pop(stream, None)

    def ended(self, stream: Stream, is_whole: bool) -> None:
        """No more of a stream is put: all of it was, or it was given up."""
        with self.channels.lock:
            channel = self.channels.current()
            has_failed = self._given_up.pop(stream, None) is not None
            of, _ = self._open.pop(stream, (None, None))
            if has_failed:
                return
            if channel is None or of not in (None, channel.link.incarnation):
                self._tell(stream, True, HOST_LOST)
                return
            with self.channels.at(channel):
                if is_whole:
                    channel.link.end(*stream)
                else:
                    channel.link.end(*stream, f"stage {stream[0]} ended the request before its last chunk")
                    channel.link.clean_up(*stream, True)


def _plain(data: Any) -> Any:
    """What is in a pool's buffer, ours or another one's."""
    if isinstance(data, PayloadBuffer):
        return data.object()
    if hasattr(data, "tensor") and hasattr(data, "release"):
        return data.tensor
    return data
