"""What a pipeline's configuration says of the connector: `extra` of vLLM-Omni's `connectors`."""

import difflib
import hashlib
import os
import re
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvferry.start import socket_at

# Says which deployment a process is of, unless its configuration does. All processes of one inherit it.
DEPLOYMENT = "KVFERRY_OMNI_DEPLOYMENT"

# Under which our keys are in the metadata of a payload.
NAME = "kvferry"

# What moves payloads. There is one so far.
FABRIC = "host"

# Bytes, as MoRI's and Mooncake's connectors have it.
POOL_BYTES = 1 << 30

PUT_WAIT_S = 5.0
GET_WAIT_MS = 10.0

# Of an object beside its tensors, arrays and long bytes.
OBJECT_BYTES = 256 << 20

OWN = (
    *("socket", "host", "deployment", "pool_bytes", "put_wait_s", "get_wait_ms", "object_bytes"),
    *("require_fabric", "mori_stages"),
)

# Those of vLLM-Omni and its connectors that somebody might take for a misspelled one of ours.
OTHERS = re.compile(
    "stage_id|from_stage|to_stage|role|outgoing|name|type|zmq_port|sender_host|sender_zmq_port|device_name|protocol|proto"
    "|memory_pool_size|memory_pool_device|backend_type|backends|qp_per_transfer|post_batch_size|num_worker_threads|num_threads"
    "|metadata_server|master|segment|localbuf|rpc_port|.*_seconds|.*_timeout_ms|.*_sleep_s|.*_max_wait.*"
    "|(xgmi|codec|initial|connector|ref|native|latent|fish)_.*"
)


@dataclass(frozen=True)
class OmniSettings:
    """What a connector goes by."""

    socket: Path
    # Start a host if there is none.
    spawn: bool
    deployment: str
    pool_bytes: int
    put_wait_s: float
    # Seconds.
    get_wait: float
    # At most, of an object beside its tensors, arrays and long bytes.
    object_bytes: int
    # None: it becomes known with the first payload.
    stage: str | None
    # Why payloads do not go the way that is asked for, if they do not.
    instead: list[str] = field(default_factory=list)
    # What `get_connection_info` says where no other host reaches ours; nobody listens there.
    address: tuple[str, int] = ("127.0.0.1", 50051)
    # Stages whose connector is vLLM-Omni's own for MoRI, and where the one before this stage listens if nothing else says it.
    mori_stages: frozenset[str] = frozenset()
    mori_sender: tuple[str, int] | None = None


def deployment() -> str:
    """That of this process and of those that it starts from now on."""
    return os.environ.setdefault(DEPLOYMENT, uuid.uuid4().hex)


def _wrong(key: str, value: Any, needed: str) -> ValueError:
    return ValueError(f"KvferryOmniConnector: {key} = {value!r}: it has to be {needed}")


def _number(extra: dict[str, Any], key: str, default: float, least: float, most: float) -> float:
    value = extra.get(key, default)
    try:
        number = float(value) if not isinstance(value, bool) else None
    except (TypeError, ValueError):
        number = None
    if number is None or not least <= number <= most:
        raise _wrong(key, value, f"a number from {least:g} to {most:g}")
    return number


def _bytes(extra: dict[str, Any], key: str) -> int:
    value = extra[key]
    whole = int(value) if isinstance(value, str) and value.isdecimal() else value
    if not isinstance(whole, int) or isinstance(whole, bool) or not 1 << 16 <= whole <= 1 << 48:
        raise _wrong(key, value, "a number of bytes from 65536 to 281474976710656")
    return whole


def _pool_bytes(extra: dict[str, Any]) -> int:
    """By our name or by that of vLLM-Omni's own connectors."""
    given = [key for key in ("pool_bytes", "memory_pool_size") if extra.get(key) is not None]
    sizes = {_bytes(extra, key) for key in given}
    if len(sizes) > 1:
        raise ValueError("KvferryOmniConnector: pool_bytes and memory_pool_size are the same thing: give one of them")
    return sizes.pop() if sizes else POOL_BYTES


def _text(extra: dict[str, Any], key: str, longest: int) -> str:
    value = extra.get(key) or ""
    if not isinstance(value, str) or len(value) > longest:
        raise _wrong(key, value, f"a text of at most {longest} characters")
    return value


def _mori_stages(extra: dict[str, Any]) -> frozenset[str]:
    value = extra.get("mori_stages") or []
    if not isinstance(value, (list, tuple)) or not all(type(stage) in (int, str) for stage in value):
        raise _wrong("mori_stages", value, "a list of stages, such as [1, 2]")
    return frozenset(map(str, value))


def _mori_sender(extra: dict[str, Any]) -> tuple[str, int] | None:
    """As vLLM-Omni's connectors are told where the stage before theirs listens."""
    host, port = extra.get("sender_host"), str(extra.get("sender_zmq_port") or "")
    return (str(host), int(port)) if host and port.isdecimal() else None


def _spawn(extra: dict[str, Any]) -> bool:
    """`host` is also what vLLM-Omni's connectors call an address."""
    value = str(extra.get("host") or "spawn")
    if value not in ("spawn", "connect") and difflib.get_close_matches(value, ("spawn", "connect")):
        raise _wrong("host", value, '"spawn", "connect", or an address, which has no meaning here')
    return value != "connect"


def _check_keys(extra: dict[str, Any]) -> None:
    for key in extra:
        if key in OWN or OTHERS.fullmatch(str(key)):
            continue
        if nearest := difflib.get_close_matches(str(key), (*OWN, "memory_pool_size"), 1, 0.7):
            raise ValueError(f'KvferryOmniConnector: {key}: there is no such key; did you mean "{nearest[0]}"?')


def _instead(extra: dict[str, Any]) -> list[str]:
    """What was asked for and is not there. Raises ValueError if nothing else will do."""
    needed = extra.get("require_fabric") or False
    if not isinstance(needed, (bool, str)):
        raise _wrong("require_fabric", needed, f'"{FABRIC}", or true: no other way than is asked for')
    if needed not in (False, True, FABRIC):
        raise ValueError(
            f"KvferryOmniConnector: require_fabric = {needed!r}: payloads move through a pool in host memory here "
            f'("{FABRIC}"), and by nothing else; take another connector, or leave it out'
        )
    asked = [
        f"{key} {extra[key]}"
        for key, here in (("backend_type", ()), ("memory_pool_device", ("cpu",)))
        if extra.get(key) not in (None, "", *here)
    ]
    if asked and needed is True:
        raise ValueError(
            f"KvferryOmniConnector: require_fabric = True and {', '.join(asked)}: payloads move through a pool in host "
            "memory, and by nothing else; take another connector, or leave one of them out"
        )
    return asked


def read(extra: dict[str, Any]) -> OmniSettings:
    """Raises ValueError for what is wrong, and what to do about it."""
    extra = dict(extra or {})
    _check_keys(extra)
    named = _text(extra, "deployment", 1024) or deployment()
    socket = _text(extra, "socket", 4096)
    # A name that a path can have, whatever the deployment's is.
    digest = hashlib.sha256(named.encode()).hexdigest()[:16]
    stage = extra.get("stage_id")
    return OmniSettings(
        socket=Path(socket) if socket else socket_at(f"omni-{digest}"),
        spawn=_spawn(extra),
        deployment=named,
        pool_bytes=_pool_bytes(extra),
        put_wait_s=_number(extra, "put_wait_s", PUT_WAIT_S, 0, 3600),
        get_wait=_number(extra, "get_wait_ms", GET_WAIT_MS, 0, 1000) / 1e3,
        object_bytes=int(_number(extra, "object_bytes", OBJECT_BYTES, 1 << 12, 1 << 31)),
        stage=str(stage) if stage is not None and str(stage) != "-1" else None,
        instead=_instead(extra),
        address=(str(extra.get("host") or "127.0.0.1"), extra.get("zmq_port") or 50051),
        mori_stages=_mori_stages(extra),
        mori_sender=_mori_sender(extra),
    )
