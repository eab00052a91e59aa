"""What vLLM-Omni 0.30.0's connectors ask of a machine with MoRI and a GPU, on one that has neither: kvferry's module `mori`
with the rest of MoRI's interface that MoriTransferEngineConnector calls, and memory that is not pinned."""

import sys
import threading
import time
import types
from typing import Any


def unpinned() -> None:
    """Pinning fails without a driver, and does nothing for a pool that no GPU reads."""
    import torch

    torch.Tensor.pin_memory = lambda tensor, *_: tensor


class Status:
    """A transfer that can be waited for."""

    def __init__(self, status: Any):
        self._status = status
        self.Succeeded, self.Failed = status.Succeeded, status.Failed
        self.Message, self.Code = status.Message, status.Code

    def Wait(self) -> None:  # noqa: N802
        while not (self.Succeeded() or self.Failed()):
            # Others have the interpreter's lock meanwhile, as in MoRI's.
            time.sleep(0)


def mori() -> None:
    """Completes kvferry's `mori`, whose folder `python -m kvferry.dropin` names, before vllm_omni is imported."""
    from mori import io

    class IOEngine(io.IOEngine):
        def __init__(self, key: str, config: Any):
            super().__init__(key, config)
            self._sessions: dict[tuple[str, int], Any] = {}
            self._opening = threading.Lock()

        def batch_write(self, locals_, offsets, remotes, remote_offsets, sizes, uids) -> list[Status]:
            statuses = []
            for local, ours, remote, theirs, lengths, uid in zip(
                locals_, offsets, remotes, remote_offsets, sizes, uids, strict=True
            ):
                with self._opening:
                    key = (remote.engine_key, remote.id)
                    session = self._sessions.get(key) or self._sessions.setdefault(
                        key, self.create_session(local, remote)
                    )
                statuses.append(Status(session.batch_write(ours, theirs, lengths, uid)))
            return statuses

        def deregister_memory(self, memory: Any) -> None:
            """Stays registered as long as the engine."""

        def deregister_remote_engine(self, desc: Any) -> None:
            """Stays known as long as the engine."""

    io.IOEngine = IOEngine
    cpp = types.ModuleType("mori.cpp")
    cpp.TransferStatus = io.TransferStatus
    sys.modules["mori.cpp"] = cpp
