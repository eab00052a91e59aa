"""MoRI-IO's Python interface over kvferry's fabric for host memory, as far as vLLM 0.32.0's
MoRIIOConnector uses it."""

import enum
import logging
import sys
import threading
from dataclasses import dataclass

from kvferry._native import Engine, EngineDesc, MemoryDesc
from kvferry._native import IOEngineSession, TransferStatus, check_settings
from kvferry.cuda import stand_in

__all__ = [
    "BackendType",
    "EngineDesc",
    "IOEngine",
    "IOEngineConfig",
    "IOEngineSession",
    "MemoryDesc",
    "MemoryLocationType",
    "PollCqMode",
    "RdmaBackendConfig",
    "StatusCode",
    "TransferStatus",
    "XgmiBackendConfig",
]

# Below vLLM's logger, whose handlers a server has.
logger = logging.getLogger("vllm.kvferry" if "vllm" in sys.modules else "kvferry")

if "torch" in sys.modules:
    stand_in(sys.modules["torch"])


class BackendType(enum.IntEnum):
    XGMI = 1
    RDMA = 2


class MemoryLocationType(enum.IntEnum):
    CPU = 1
    GPU = 2


class PollCqMode(enum.IntEnum):
    POLLING = 0
    EVENT = 1


class StatusCode(enum.IntEnum):
    SUCCESS = 0
    INIT = 1
    IN_PROGRESS = 2
    ERR_INVALID_ARGS = 11
    ERR_RDMA_OP = 13
    ERR_BAD_STATE = 14


@dataclass
class RdmaBackendConfig:
    """Only `num_worker_threads` has a meaning here: threads that copy."""

    qp_per_transfer: int = 1
    post_batch_size: int = -1
    num_worker_threads: int = 1
    poll_cq_mode: PollCqMode = PollCqMode.POLLING
    enable_notification: bool = True


@dataclass
class XgmiBackendConfig:
    """Nothing of it has a meaning here."""

    num_streams: int = 64
    num_events: int = 64


@dataclass
class IOEngineConfig:
    """Where the engine listens; port 0 is a free one."""

    host: str = ""
    port: int = 0


class IOEngine:
    """Registers memory and opens sessions. Memory that is registered stays referenced for the life
    of the engine. May be used from several threads."""

    Session = IOEngineSession

    def __init__(self, key: str, config: IOEngineConfig):
        _check_vllm()
        self._key = key
        self._config = config
        self._lock = threading.Lock()
        self._native: Engine | None = None

    def __repr__(self) -> str:
        return f"IOEngine({self._key} over kvferry)"

    def create_backend(self, kind: BackendType, config: object = None) -> None:
        """Starts the engine. Both kinds are kvferry's fabric for host memory."""
        workers = 1
        if kind == BackendType.RDMA:
            workers = (config or RdmaBackendConfig()).num_worker_threads
        elif kind != BackendType.XGMI:
            raise ValueError(f"backend {kind!r}: use BackendType.RDMA or BackendType.XGMI")
        with self._lock:
            if self._native is not None:
                raise RuntimeError(f"{self._key} has its backend already")
            host, port = self._config.host or "127.0.0.1", self._config.port
            self._native = Engine(self._key, host, port, workers)
        logger.info("%s: host memory instead of %s, %s", self._key, kind.name, self._native.desc())

    def _engine(self) -> Engine:
        if self._native is None:
            raise RuntimeError(f"{self._key} has no backend: call create_backend first")
        return self._native

    def get_engine_desc(self) -> EngineDesc:
        return self._engine().desc()

    def register_remote_engine(self, desc: EngineDesc) -> None:
        self._engine().register_remote_engine(desc)

    def register_torch_tensor(self, tensor) -> MemoryDesc:
        """Registers the memory of a contiguous tensor of the CPU."""
        if tensor.device.type != "cpu":
            raise ValueError(
                f"a tensor on {tensor.device}: kvferry's mori moves host memory only; take its "
                "folder off PYTHONPATH and install MoRI"
            )
        if not tensor.is_contiguous():
            raise ValueError(f"a tensor with strides {tensor.stride()}: it has to be contiguous")
        return self._engine().register_memory(tensor.data_ptr(), tensor.nbytes, tensor)

    def register_memory(
        self, ptr: int, size: int, device: int, location: MemoryLocationType
    ) -> MemoryDesc:
        """Registers `size` bytes at address `ptr`, which the caller keeps mapped."""
        if location != MemoryLocationType.CPU or device != -1:
            raise ValueError("kvferry's mori moves host memory only: device -1, location CPU")
        return self._engine().register_memory(ptr, size, None)

    def create_session(self, local: MemoryDesc, remote: MemoryDesc) -> IOEngineSession:
        session = self._engine().create_session(local, remote)
        logger.info("%s: %s, paths of writes and reads %s", self._key, session, session.paths)
        return session

    def allocate_transfer_uid(self) -> int:
        return self._engine().allocate_transfer_uid()


# Bytes of a page, as vLLM's connector has it, and of a tensor that glibc maps on its own like a KV cache.
PAGE = 4096
LARGE = 64 << 20


def _check_vllm() -> None:
    """vLLM on a CPU may allocate KV where its connector cannot register it, and says so in words that
    do not help. Where PyTorch puts what is large is seen from such a tensor, whose pages are never
    touched."""
    torch = sys.modules.get("torch")
    if torch is None or "vllm" not in sys.modules or torch.cuda.is_available():
        return
    at = torch.empty(LARGE, dtype=torch.int8, device="cpu").data_ptr()
    if at % PAGE:
        raise RuntimeError(
            "vLLM's MoRIIOConnector needs its KV cache page-aligned, and PyTorch allocates at "
            f"{at % PAGE} bytes behind a page: set THP_MEM_ALLOC_ENABLE=1 in the environment of this server"
        )


# A worker of vLLM that fails once its connector beats its heart never ends; one that cannot import
# it does.
check_settings()
_check_vllm()
