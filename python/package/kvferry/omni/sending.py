"""What a stage puts."""

import time
from typing import Any

from kvferry.log import logger_of
from kvferry.omni import codec, device, settings
from kvferry.omni.buffer import PayloadBuffer
from kvferry.omni.channel import Channel, Channels
from kvferry.omni.keys import PayloadKey
from kvferry.omni.outcomes import OutcomeCounts, Remembered

logger = logger_of(__name__)

# A stream whose first chunk was not put: whether what comes next under its key is the second one, as vLLM-Omni has it, or the
# first one of a request with the same id, cannot be seen. Requests whose chunk was not put are over by then.
FIRST_GIVEN_UP_S = 60.0

HOST_LOST = "the host that had chunks of it was lost"

Stream = tuple[str, str, str]


class Sender:
    """A payload that is not put is missed by somebody: who gets it is told, and so is who gets what would follow."""

    def __init__(self, channels: Channels, counts: OutcomeCounts):
        self.channels = channels
        self.counts = counts
        # Streams that were put into, and incarnation of the host that has it.
        self._open: Remembered = Remembered()
        # Streams of which nothing is put any more: from which chunk on, why, and since when.
        self._given_up: Remembered = Remembered()
        # Those of which no host has been told yet.
        self._untold: Remembered = Remembered()
        channels.changed = self._changed

    def put(self, key: PayloadKey, data: Any) -> tuple[bool, int, dict[str, Any] | None]:
        channel = self.channels.current()
        if key.chunk is not None and (known := self._given_up.get(key.stream)) is not None:
            since, why, at = known
            # One that begins anew is of another request with the same id.
            if key.chunk or not since and time.monotonic() - at < FIRST_GIVEN_UP_S:
                self.counts.failed("given-up", f"{key}: {why}")
                return False, 0, None
        if channel is None:
            return self._not_put(key, "host-gone", "the host is gone, and there is no other one yet")
        try:
            # Whether the stage that gets it has vLLM-Omni's connector for MoRI.
            is_foreign = key.stream[1] in self.channels.settings.mori_stages
            encode = codec.encode_foreign if is_foreign else codec.encode
            return self._put(channel, key, encode(_plain(data)), is_foreign)
        except ConnectionError as error:
            self.channels.broke(channel, error)
            return self._not_put(key, "host-gone", str(error))
        except TimeoutError as error:
            return self._not_put(key, "host-silent", str(error))
        except Exception as error:
            return self._not_put(key, "unencodable", f"{type(error).__name__}: {error}")

    def _put(
        self, channel: Channel, key: PayloadKey, encoded: codec.Encoded, is_foreign: bool
    ) -> tuple[bool, int, dict[str, Any] | None]:
        nbytes, link, at = encoded.nbytes, channel.link, self.channels.settings
        slot, *place = link.reserve(nbytes, at.put_wait_s)
        if slot is None:
            return self._not_put(key, *place)
        try:
            (offset,) = place
            if encoded.is_on_device():
                device.pin(channel.pool)
            encoded.write(channel.pool[offset : offset + nbytes])
        except BaseException:
            link.give_back(slot)
            raise
        link.put(slot, key)
        if key.chunk is not None:
            with self.channels.lock:
                self._open[key.stream] = link.incarnation
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

    def _not_put(self, key: PayloadKey, kind: str, why: str) -> tuple[bool, int, None]:
        self.counts.failed(kind, f"{key}: {why}")
        logger.error("%s is not put (%s): %s", key, kind, why)
        if key.chunk is None:
            # It may be put again.
            self._end(key.stream, why)
        else:
            self._give_up(key.stream, key.chunk, why)
        return False, 0, None

    def _changed(self, channel: Channel) -> None:
        """There is another host: of the streams that were put into before it, chunks may be lost."""
        for stream in [stream for stream, of in self._open.items() if of != channel.link.incarnation]:
            self._give_up(stream, 1, HOST_LOST)
        for stream in list(self._untold):
            self._end(stream, self._untold[stream])

    def _give_up(self, stream: Stream, chunk: int, why: str) -> None:
        """Of a stream nothing is put any more from this chunk on."""
        with self.channels.lock:
            self._given_up[stream] = chunk, why, time.monotonic()
            self._open.pop(stream, None)
            self._end(stream, why)

    def _end(self, stream: Stream, why: str) -> None:
        """Who gets what is not put is told, as soon as there is a host."""
        with self.channels.lock:
            self._untold[stream] = why
            if (channel := self.channels.current()) is not None:
                with self.channels.at(channel):
                    channel.link.end(*stream, why)
                    self._untold.pop(stream, None)

    def cleaned_up(self, stream: Stream) -> None:
        with self.channels.lock:
            self._given_up.pop(stream, None)
            self._open.pop(stream, None)

    def ended(self, stream: Stream, is_whole: bool) -> None:
        """No more of a stream is put: all of it was, or it was given up."""
        with self.channels.lock:
            channel = self.channels.current()
            has_failed = self._given_up.pop(stream, None) is not None
            of = self._open.pop(stream, None)
            if has_failed:
                return
            if channel is None or of not in (None, channel.link.incarnation):
                self._end(stream, HOST_LOST)
                return
            with self.channels.at(channel):
                if is_whole:
                    channel.link.end(*stream)
                else:
                    channel.link.end(*stream, f"stage {stream[0]} ended the request before its last chunk")
                    channel.link.clean_up(*stream)


def _plain(data: Any) -> Any:
    """What is in a pool's buffer, ours or another one's."""
    if isinstance(data, PayloadBuffer):
        return data.object()
    if hasattr(data, "tensor") and hasattr(data, "release"):
        return data.tensor
    return data
