"""The two ways into vLLM-Omni, and what its adapter of chunks does not tell a connector by itself.

The adapter polls a chunk whatever `get` raises, until its request has waited for VLLM_OMNI_INPUT_WAIT_TIMEOUT_S; and it tells no
connector but its own for shared memory that a stream is over,
nor any that what it puts are chunks of one. So four of its methods are wrapped, for our connector alone."""

import functools
import os
import sys
from collections.abc import Callable
from typing import Any

from kvferry.log import logger_of

logger = logger_of(__name__)

NAME = "KvferryOmniConnector"

# The connector whose place ours takes if TAKE says so.
MORI = "MoriTransferEngineConnector"
TAKE = "KVFERRY_OMNI_TAKE_MORI"

POLL = "_poll_single_request"
SEND = "_send_single_request_for_generation"
SENT = "_queue_shm_cleanup_locked"
RECEIVED = "_clear_receiver_state_locked"

# What the wrapped methods use of an adapter.
STATE = ("external_req_id", "_waiting_since", "request_ids_mapping", "upstream_exhausted_requests", "collect_timed_out_request_ids")

# Of each process: why the adapter is as it was, if it is.
unwrapped: str | None = "kvferry.omni.register was not called in this process; does VLLM_PLUGINS leave out kvferry?"


def install() -> None:
    """Does nothing the second time."""
    from vllm_omni.distributed.omni_connectors.factory import OmniConnectorFactory

    def made(extra: dict[str, Any]) -> Any:
        from kvferry.omni.connector import KvferryOmniConnector

        return KvferryOmniConnector(extra)

    if NAME not in OmniConnectorFactory.list_registered_connectors():
        OmniConnectorFactory.register_connector(NAME, made)
    if _takes_mori():
        registry = getattr(OmniConnectorFactory, "_registry", None)
        if not isinstance(registry, dict) or MORI not in registry:
            raise ValueError(f"{TAKE} = true: this vLLM-Omni has no {MORI} whose place could be taken: unset it")
        if getattr(registry[MORI], "of_kvferry", False) is False:
            made.of_kvferry = True
            registry[MORI] = made
            logger.warning("%s stands in for %s, because %s is set", NAME, MORI, TAKE)
    _wrap()


def _takes_mori() -> bool:
    said = os.environ.get(TAKE) or "false"
    if said not in ("true", "false"):
        raise ValueError(f'{TAKE} = "{said}": it has to be true or false')
    return said == "true"


def _wrap() -> None:
    global unwrapped
    try:
        from vllm_omni.distributed.omni_connectors.transfer_adapter.chunk_transfer_adapter import (
            OmniChunkTransferAdapter as Adapter,
        )
    except ImportError as error:
        unwrapped = f"vLLM-Omni has no OmniChunkTransferAdapter: {error}"
        return
    if missing := missing_names(Adapter):
        unwrapped = f"this vLLM-Omni's OmniChunkTransferAdapter has no {', '.join(missing)}"
        return
    for name, wrapper in ((POLL, _poll), (SEND, _send), (SENT, _sent), (RECEIVED, _received)):
        method = getattr(Adapter, name)
        if not hasattr(method, "of_kvferry"):
            setattr(Adapter, name, _wrapped(method, wrapper))
    unwrapped = None


def _wrapped(method: Callable, wrapper: Callable) -> Callable:
    @functools.wraps(method)
    def call(adapter: Any, *args: Any) -> Any:
        if not getattr(adapter.connector, "of_kvferry", False):
            return method(adapter, *args)
        return wrapper(adapter, adapter.connector, functools.partial(method, adapter), *args)

    call.of_kvferry = True
    return call


def missing_names(adapter: type) -> list[str]:
    """What the wrapped methods need and the class has not."""
    names = (POLL, SEND, SENT, RECEIVED)
    missing = [name for name in names if not callable(getattr(adapter, name, None))]
    # Attributes of objects are in the code of the methods that use them.
    used = {
        name
        for method in vars(adapter).values()
        if hasattr(method, "__code__")
        for name in (*method.__code__.co_names, method.__code__.co_name)
    }
    return missing + [name for name in STATE if name not in used]


def _poll(adapter: Any, connector: Any, poll: Callable, entry: Any) -> bool:
    """A request whose payload is lost fails, instead of being polled until it has waited for too long."""
    request = entry.request.request_id
    if request in connector.failing:
        return _fail(adapter, connector, request)
    connector.raised.error = None
    with connector.chunks_of(connector.received_from(entry.request.external_req_id)):
        done = poll(entry)
    error = connector.raised.error
    if done or error is None:
        return done
    logger.error("request %s fails: %s", request, error)
    connector.failing.add(request)
    return _fail(adapter, connector, request)


def _send(_: Any, connector: Any, send: Callable, task: dict[str, Any], token: Any = None) -> None:
    """What is put of a request is chunks of one stream. A later request with the same id has another token."""
    if token is None:
        return send(task)
    with connector.chunks_of(connector.sent_to(task["request"].external_req_id), token):
        return send(task, token)


def _fail(adapter: Any, connector: Any, request: str) -> bool:
    """The scheduler ends a request that has waited for too long, with an error for who sent it. It goes through these times
    meanwhile: none may be added."""
    if request not in adapter._waiting_since:
        return False
    adapter._waiting_since[request] = float("-inf")
    connector.failing.discard(request)
    return True


def _sent(_: Any, connector: Any, clear: Callable, external: str, token: Any) -> None:
    """The adapter has put the last chunk of a stream, or puts no more of it."""
    clear(external, token)
    connector.sender_ended(external, getattr(token, "terminal_sent", False))


def _received(adapter: Any, connector: Any, clear: Callable, request: str) -> None:
    """The adapter wants no more chunks of a stream."""
    external = adapter.request_ids_mapping.get(request)
    is_whole = request in adapter.upstream_exhausted_requests
    clear(request)
    connector.failing.discard(request)
    if external is not None:
        connector.receiver_ended(external, is_whole)


def wait_limit() -> float | None:
    """Seconds after which vLLM-Omni ends a request that waits for a payload, 0 for never; None if it is not known here."""
    module = sys.modules.get("vllm_omni.core.sched.omni_scheduler_mixin")
    return getattr(module, "DEFAULT_INPUT_WAIT_TIMEOUT_S", None)
