"""vLLM-Omni's keys as streams of chunks: a request that is given up, cleaned up or ended is so with all its chunks."""

from typing import NamedTuple

CHUNK_MAX = (1 << 64) - 1


class PayloadKey(NamedTuple):
    """As the host knows it."""

    from_stage: str
    to_stage: str
    # The whole key of what comes in no chunks.
    request: str
    chunk: int | None

    @property
    def stream(self) -> tuple[str, str, str]:
        return self[:3]

    def __str__(self) -> str:
        what = self.request if self.chunk is None else f"chunk {self.chunk} of {self.request}"
        return f"{what} from stage {self.from_stage} to stage {self.to_stage}"


def parsed(from_stage: str, to_stage: str, key: str) -> PayloadKey:
    """`{external_req_id}_{from_stage}_{chunk}` is a chunk of a stream. What has another form is whole; no two keys are
    the same chunk."""
    from_stage, to_stage, key = str(from_stage), str(to_stage), str(key)
    head, _, number = key.rpartition("_")
    if number.isascii() and number.isdecimal() and head.endswith(f"_{from_stage}"):
        chunk = int(number) if len(number) <= 20 else CHUNK_MAX + 1
        if chunk <= CHUNK_MAX and str(chunk) == number:
            return PayloadKey(from_stage, to_stage, head[: -len(from_stage) - 1], chunk)
    return PayloadKey(from_stage, to_stage, key, None)


def of_internal(key: str) -> tuple[str, str, str]:
    """Stages and key of what OmniConnectorBase._make_key made."""
    head, at, stages = key.rpartition("@")
    from_stage, line, to_stage = stages.partition("_")
    if not (at and line and from_stage and to_stage):
        raise ValueError(
            f'{key!r} is no "key@from_to": cleanup takes that, or the key with from_stage and to_stage beside it'
        )
    return from_stage, to_stage, head
