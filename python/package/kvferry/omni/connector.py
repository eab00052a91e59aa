"""The connector: vLLM-Omni's `put` and `get` over the pool of a host."""

import os
import weakref
from typing import Any

from vllm_omni.distributed.omni_connectors.connectors.base import OmniConnectorBase

from kvferry.log import logger_of
from kvferry.omni import hooks, settings
from kvferry.omni.channel import Channels
from kvferry.omni.keys import ChunksOf, PayloadKey, of_internal, parsed, wrong_with
from kvferry.omni.outcomes import OutcomeCounts, PayloadLost
from kvferry.omni.receiving import Receiver
from kvferry.omni.sending import Sender

__all__ = ["KvferryOmniConnector", "PayloadLost"]

logger = logger_of(__name__)

# A key that nobody asks for.
NOTHING = PayloadKey("", "", "", None)


class KvferryOmniConnector(OmniConnectorBase):
    """Both directions of a stage. Its methods may be called by any thread, also at the same time."""

    supports_raw_data = True

    # For the wrapped methods of vLLM-Omni.
    of_kvferry = True

    def __init__(self, extra: dict[str, Any]):
        # Why nothing is put or got any more; a half-built connector has nothing to close.
        self.refusal: str | None = "this KvferryOmniConnector was not made"
        self.process = os.getpid()
        self.stage_id = (extra or {}).get("stage_id", -1)
        self.settings = settings.read(extra)
        self._counts = OutcomeCounts()
        self._channels = Channels(self.settings)
        # For the wrapped methods of vLLM-Omni: what a thread puts and gets in it are chunks of a stream.
        self.chunks_of = ChunksOf()
        self._sender = Sender(self._channels, self._counts, self.chunks_of)
        self._receiver = Receiver(self._channels, self._counts, self.chunks_of)
        self._wants = self._receiver.wants
        # For the wrapped methods of vLLM-Omni: what `get` raised last in a thread, and requests that are to fail.
        self.raised = self._receiver.raised
        self.failing: set[str] = set()
        self.refusal = None
        _connectors.add(self)
        self._say()

    def _say(self) -> None:
        pool, at = self._channels.pool_bytes, self.settings
        logger.info(
            "KvferryOmniConnector of stage %s: fabric %s%s, pool of %d bytes in host memory, deployment %s, host at %s",
            at.stage or "(not known yet)",
            settings.FABRIC,
            f" ({', '.join(at.instead)} is not available)" if at.instead else "",
            pool,
            at.deployment,
            at.socket,
        )
        if pool != at.pool_bytes:
            logger.warning("the pool has %d bytes, not %d: its host was there before", pool, at.pool_bytes)
        if hooks.unwrapped is not None:
            logger.warning("a request whose chunk is lost fails only after waiting for too long: %s", hooks.unwrapped)
        elif hooks.wait_limit() == 0:
            logger.warning("VLLM_OMNI_INPUT_WAIT_TIMEOUT_S is 0: no request fails, whatever is lost")

    def _check(self) -> None:
        if self.refusal is not None:
            self._counts.failed("closed", self.refusal)
            raise RuntimeError(self.refusal)

    def put(self, from_stage: str, to_stage: str, put_key: str, data: Any) -> tuple[bool, int, dict[str, Any] | None]:
        """False if the payload does not come to who gets it, who is told; the log has the reason, and so has `health`. Of its
        stream nothing is put any more then: what followed would come in its place."""
        self._check()
        self._channels.of_stage(from_stage)
        return self._sender.put(parsed(from_stage, to_stage, put_key), data)

    def get(
        self, from_stage: str, to_stage: str, get_key: str, metadata: dict[str, Any] | None = None
    ) -> tuple[Any, int] | None:
        """None: not there yet. Raises PayloadLost if it does not come, and then at most once a second; None in between.
        Waits only in the first call for a key, at most for `get_wait_ms`, and only if `metadata` says that it is there."""
        if self.refusal is not None:
            self._check()
        place = (from_stage, to_stage, get_key)
        want = self._wants.get(place)
        if want is not None:
            return self._receiver.poll(want, metadata)
        is_there = isinstance(metadata, dict) and "data_size" in metadata
        return self._receiver.first(place, metadata, self.settings.get_wait if is_there else 0.0)

    def get_with_deadline(
        self,
        from_stage: str,
        to_stage: str,
        get_key: str,
        metadata: dict[str, Any] | None = None,
        *,
        deadline: float,
    ) -> tuple[Any, int] | None:
        """As `get`, but waits until the deadline, which `time.monotonic` reaches."""
        self._check()
        return self._receiver.wait((from_stage, to_stage, get_key), metadata, deadline)

    def abandon_get(self, get_key: str) -> None:
        """What arrived for it is for who asks next."""
        for place in [place for place in list(self._wants) if place[2] == get_key]:
            self._receiver.abandon(place)

    def cleanup(self, request_id: str, from_stage: str | None = None, to_stage: str | None = None) -> None:
        """Nobody gets what is there and was not taken: the payload with this key, and of a request's id all chunks of its
        stream."""
        if (from_stage is None) != (to_stage is None):
            raise ValueError("cleanup takes from_stage and to_stage, or neither")
        if from_stage is None:
            from_stage, to_stage, request_id = of_internal(request_id)
        self._check()
        key = parsed(from_stage, to_stage, request_id)
        channel = self._channels.current()
        if channel is None or wrong_with(key) is not None:
            return
        # What has arrived here and was not taken goes as well; a later call asks anew.
        self._receiver.abandon((from_stage, to_stage, request_id))
        stream = (str(from_stage), str(to_stage), str(request_id))
        self._sender.cleaned_up(stream)
        with self._channels.at(channel):
            channel.link.drop_payload(key)
            channel.link.clean_up(*stream, False)

    def sent_to(self, external: str) -> tuple[str, str, str]:
        """The stream of a request to the next stage, as vLLM-Omni's adapter of chunks names the two."""
        return str(self.stage_id), str(int(self.stage_id) + 1), str(external)

    def received_from(self, external: str) -> tuple[str, str, str]:
        """The same, from the stage before."""
        return str(int(self.stage_id) - 1), str(self.stage_id), str(external)

    def sender_ended(self, external: str, is_whole: bool) -> None:
        """vLLM-Omni puts no more of a request's stream: all of it was put, or it was given up."""
        if self.refusal is None and wrong_with(PayloadKey(*self.sent_to(external), None)) is None:
            self._sender.ended(self.sent_to(external), is_whole)

    def receiver_ended(self, external: str, is_whole: bool) -> None:
        """vLLM-Omni wants no more of a request's stream: it got all of it, or does not need the rest."""
        if self.refusal is None and wrong_with(PayloadKey(*self.received_from(external), None)) is None:
            self._receiver.ended(self.received_from(external), is_whole)

    def reap_consumed(self) -> None:
        """Payloads are the host's; but who waits for what was lost with one is told by way of the next."""
        if self.refusal is None:
            self._channels.current()

    def get_connection_info(self) -> dict[str, Any]:
        """As vLLM-Omni's own connectors; keys find the way, not this address."""
        channel, address = self._channels.current(), self.settings.address
        host, port = channel.address(address) if channel is not None else address
        return {
            "host": host,
            "zmq_port": port,
            "engine_key": self._channels.name,
            "can_put": True,
            settings.NAME: {"deployment": self.settings.deployment, "socket": str(self.settings.socket)},
        }

    def update_sender_info(self, sender_host: str, sender_zmq_port: int, sender_rank: int | None = None) -> None:
        """Keys find the way, but to a stage whose connector is MoRI's."""
        if getattr(self, "refusal", "") is None:
            self._receiver.sender = (sender_host, sender_zmq_port)

    def health(self) -> dict[str, Any]:
        """Whether there is a host, what payloads go by, and what became of them."""
        channels, refusal = self._channels, self.refusal
        channel = channels.current() if refusal is None else None
        host: dict[str, Any] = {}
        if channel is not None:
            with channels.at(channel):
                # Which says so if it is gone.
                channel.link.poll(NOTHING)
                host = channel.link.stats()
            # Unless that failed.
            channel = channels.current()
        counts = self._counts.health()
        return {
            "status": "healthy" if channel is not None else "unhealthy",
            "error": None if channel is not None else refusal or "the host is gone, and there is no other one yet",
            "connector": type(self).__name__,
            "fabric": settings.FABRIC,
            "not_available": list(self.settings.instead),
            "pool_device": "cpu",
            "pool_size": channels.pool_bytes,
            "deployment": self.settings.deployment,
            "socket": str(self.settings.socket),
            "stage": channels.stage,
            "bytes_by_fabric": {settings.FABRIC: counts["bytes_transferred"]},
            "host": host,
            **counts,
        }

    def close(self) -> None:
        """The connection ends when nobody reads a payload any more that was got here. What was put stays for who gets it."""
        if getattr(self, "refusal", "") is not None:
            return
        self.refusal = "this KvferryOmniConnector is closed"
        self._receiver.close()
        self._channels.end()


# Those of this process: their connections are not those of one that it is forked into.
_connectors: weakref.WeakSet[KvferryOmniConnector] = weakref.WeakSet()


def _forked() -> None:
    for connector in list(_connectors):
        connector.refusal = connector.refusal or (
            f"this KvferryOmniConnector was made by process {connector.process}, of which this one is a fork: make one here"
        )


os.register_at_fork(after_in_child=_forked)
