"""A stage of vLLM-Omni with its own MoriTransferEngineConnector, over kvferry's module `mori`, as a process of its own."""

import contextlib
import multiprocessing
from collections.abc import Iterator
from typing import Any


class MoriStage:
    """Calls the connector in its process."""

    def __init__(self, pipe: Any):
        self.pipe = pipe

    def call(self, method: str, *args: Any) -> Any:
        self.pipe.send((method, args))
        error, result = self.pipe.recv()
        if error is not None:
            raise RuntimeError(error)
        return result


@contextlib.contextmanager
def mori_stage(**config: Any) -> Iterator[MoriStage]:
    context = multiprocessing.get_context("spawn")
    pipe, its = context.Pipe()
    process = context.Process(target=_serve, args=(its, config), daemon=True)
    process.start()
    its.close()
    stage = MoriStage(pipe)
    try:
        assert stage.pipe.recv() == "ready"
        yield stage
    finally:
        # The connector's own `close` may wait for ever.
        process.kill()
        process.join()


def _serve(pipe: Any, config: dict[str, Any]) -> None:
    from vllm_omni.distributed.omni_connectors.connectors.mori_transfer_engine_connector import (
        MoriTransferEngineConnector,
    )

    connector = MoriTransferEngineConnector({"host": "127.0.0.1", "memory_pool_size": 32 << 20, **config})
    pipe.send("ready")
    while True:
        try:
            method, args = pipe.recv()
        except EOFError:
            return
        try:
            result = getattr(connector, method)(*args)
            if isinstance(result, tuple) and hasattr(result[0], "release"):
                buffer, size = result
                result = buffer.to_bytes(), size
                buffer.release()
            pipe.send((None, result))
        except Exception as error:
            pipe.send((f"{type(error).__name__}: {error}", None))
