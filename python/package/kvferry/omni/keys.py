"""vLLM-Omni's keys as the host knows them, and who says that a key is a chunk of a stream."""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

CHUNK_MAX = (1 << 64) - 1

# Bytes of a key and of the names of its stages at most: clients choose ids. The host takes no longer ones either.
KEY_BYTES_MAX = 64 << 10


class PayloadKey(NamedTuple):
    """As the host knows it."""

    from_stage: str
    to_stage: str
    # The whole key of what has not the form of a chunk's.
    request: str
    chunk: int | None

    @property
    def stream(self) -> tuple[str, str, str]:
        return self[:3]

    @property
    def text(self) -> str:
        """As vLLM-Omni has it."""
        return self.request if self.chunk is None else f"{self.request}_{self.from_stage}_{self.chunk}"

    def __str__(self) -> str:
        return f"{_short(self.text)} from stage {_short(self.from_stage)} to stage {_short(self.to_stage)}"


def _short(text: str) -> str:
    return text if len(text) <= 256 else f"{text[:256]}... ({len(text)} characters)"


def parsed(from_stage: str, to_stage: str, key: str) -> PayloadKey:
    """The form of `{external_req_id}_{from_stage}_{chunk}` is that of a chunk. Whether it is one only its producer says: keys
    of KV caches of ranks and ids that clients choose may have that form as well. No two keys are the same."""
    from_stage, to_stage, key = str(from_stage), str(to_stage), str(key)
    head, _, number = key.rpartition("_")
    if number.isascii() and number.isdecimal() and head.endswith(f"_{from_stage}"):
        chunk = int(number) if len(number) <= 20 else CHUNK_MAX + 1
        if chunk <= CHUNK_MAX and str(chunk) == number:
            return PayloadKey(from_stage, to_stage, head[: -len(from_stage) - 1], chunk)
    return PayloadKey(from_stage, to_stage, key, None)


def wrong_with(key: PayloadKey) -> str | None:
    """Why the host does not take a key."""
    # No character has less than a byte.
    nbytes = sum(map(len, key[:3]))
    try:
        if nbytes <= KEY_BYTES_MAX:
            nbytes = sum(len(name.encode()) for name in key[:3])
    except UnicodeEncodeError as error:
        return f"a key that UTF-8 cannot encode ({error.reason}): give requests other ids"
    if nbytes <= KEY_BYTES_MAX:
        return None
    return f"a key of {nbytes} bytes or more, {KEY_BYTES_MAX} at most: give requests shorter ids"


class ChunksOf(threading.local):
    """The stream whose chunks a thread puts or gets, as whoever calls the connector says it. `life` is one object for each
    request: two requests with one id have two."""

    stream: tuple[str, str, str] | None = None
    life: Any = None

    @contextlib.contextmanager
    def __call__(self, stream: tuple[str, str, str], life: Any = None) -> Iterator[None]:
        before = self.stream, self.life
        self.stream, self.life = stream, life
        try:
            yield
        finally:
            self.stream, self.life = before

    def has(self, key: PayloadKey) -> bool:
        return key.chunk is not None and key.stream == self.stream


def of_internal(key: str) -> tuple[str, str, str]:
    """Stages and key of what OmniConnectorBase._make_key made."""
    head, at, stages = key.rpartition("@")
    from_stage, line, to_stage = stages.partition("_")
    if not (at and line and from_stage and to_stage):
        raise ValueError(
            f'{_short(key)!r} is no "key@from_to": cleanup takes that, or the key with from_stage and to_stage beside it'
        )
    return from_stage, to_stage, head
