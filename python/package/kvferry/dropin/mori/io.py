"""MoRI-IO's Python interface over kvferry's fabric for host memory, as far as vLLM 0.32.0's
MoRIIOConnector, SGLang 0.5.23's MoRI backend and vLLM-Omni 0.30.0's connector use it."""

import enum
import logging
import sys
import threading
from dataclasses import dataclass

from kvferry._native import Engine, EngineDesc, MemoryDesc
from kvferry._native import IOEngineSession, TransferStatus, check_settings, wait_all
from kvferry.codes import StatusCode
from kvferry.cuda import stand_in, unpinned

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

# Below the logger of the server, which has handlers: vLLM's are vLLM-Omni's, too, and SGLang loads vLLM
# where it is installed.
_SERVERS = [name for name in ("sglang", "vllm") if name in sys.modules]
logger = logging.getLogger(".".join([*_SERVERS[:1], "kvferry"]))

# What imports this module in vLLM.
_MORIIO = "vllm.distributed.kv_transfer.kv_connector.v1.moriio"


class BackendType(enum.IntEnum):
    XGMI = 1
    RDMA = 2


class MemoryLocationType(enum.IntEnum):
    CPU = 1
    GPU = 2


class PollCqMode(enum.IntEnum):
    POLLING = 0
    EVENT = 1


@dataclass
class RdmaBackendConfig:
    """Only `num_worker_threads` has a meaning here: threads that copy, one if it is less."""

    qp_per_transfer: int = 1
    post_batch_size: int = -1
    num_worker_threads: int = -1
    poll_cq_mode: PollCqMode = PollCqMode.POLLING
    enable_notification: bool = True
    notif_per_qp: int = 1024
    enable_transfer_chunking: bool = False
    chunk_bytes: int = 65536
    max_chunks_per_transfer: int = 64
    num_nics_per_transfer: int = 1


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
    """Registers memory, opens sessions and posts transfers that need none. A tensor that is registered
    stays referenced until it is deregistered, or for the life of the engine. May be used from several
    threads."""

    Session = IOEngineSession

    def __init__(self, key: str, config: IOEngineConfig):
        _prepare()
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
            workers = max(1, (config or RdmaBackendConfig()).num_worker_threads)
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

    def deregister_remote_engine(self, desc: EngineDesc) -> None:
        """Forgets a peer; what is under way with it fails."""
        self._engine().deregister_remote_engine(desc)

    def register_torch_tensor(self, tensor) -> MemoryDesc:
        """Registers the memory of a contiguous tensor of the CPU."""
        if tensor.device.type != "cpu":
            raise ValueError(
                f"a tensor on {tensor.device}: kvferry's mori moves host memory only; take its "
                "folder off PYTHONPATH and install MoRI"
            )
        if not tensor.is_contiguous():
            raise ValueError(f"a tensor with strides {tensor.stride()}: it has to be contiguous")
        return self._engine().register_memory(tensor.data_ptr(), tensor.nbytes, tensor, False)

    def register_memory(self, ptr: int, size: int, device: int, location: MemoryLocationType) -> MemoryDesc:
        """Registers `size` bytes at address `ptr`, which the caller keeps mapped until they are
        deregistered. A server on the CPU may call its KV a GPU's, as SGLang does: that is looked at."""
        of_gpu = location == MemoryLocationType.GPU
        if not of_gpu and (location != MemoryLocationType.CPU or device != -1):
            raise ValueError(
                f"memory of device {device} at {location!r}: host memory is device -1, MemoryLocationType.CPU"
            )
        desc = self._engine().register_memory(ptr, size, None, of_gpu)
        if of_gpu:
            logger.debug("%s: %s, said to be of GPU %d, is host memory", self._key, desc, device)
        return desc

    def deregister_memory(self, memory: MemoryDesc) -> None:
        """What is under way with it here fails; on return nothing lands in it any more."""
        self._engine().deregister_memory(memory)

    def create_session(self, local: MemoryDesc, remote: MemoryDesc) -> IOEngineSession:
        session = self._engine().create_session(local, remote)
        logger.info("%s: %s, paths of writes and reads %s", self._key, session, session.paths)
        return session

    def allocate_transfer_uid(self) -> int:
        return self._engine().allocate_transfer_uid()

    def read(self, local, local_offset, remote, remote_offset, size, uid) -> TransferStatus:
        lists = [local], [[local_offset]], [remote], [[remote_offset]], [[size]], [uid]
        return self.batch_read(*lists)[0]

    def write(self, local, local_offset, remote, remote_offset, size, uid) -> TransferStatus:
        lists = [local], [[local_offset]], [remote], [[remote_offset]], [[size]], [uid]
        return self.batch_write(*lists)[0]

    def batch_read(
        self, locals_, local_offsets, remotes, remote_offsets, sizes, uids
    ) -> list[TransferStatus]:
        """Copies ranges of remote regions into local ones, one batch for each pair of regions.

        Raises RuntimeError, and has posted nothing, if a peer cannot be reached; whatever else cannot be
        done is in the status."""
        return self._engine().post(True, locals_, local_offsets, remotes, remote_offsets, sizes, uids)

    def batch_write(
        self, locals_, local_offsets, remotes, remote_offsets, sizes, uids
    ) -> list[TransferStatus]:
        """As `batch_read`, of local regions into remote ones."""
        return self._engine().post(False, locals_, local_offsets, remotes, remote_offsets, sizes, uids)

    def wait_all(self, statuses: list[TransferStatus], timeout_ms: int = -1) -> StatusCode:
        """Waits for all of them, or for so many milliseconds; tells the first failure, else whether one
        is under way."""
        return wait_all(statuses, timeout_ms)


# Bytes of a page, as vLLM's connector has it, and of a tensor that glibc maps on its own like a KV cache.
PAGE = 4096
LARGE = 64 << 20


def _prepare() -> None:
    """Where PyTorch has no GPU, makes up for what servers ask of it all the same."""
    torch = sys.modules.get("torch")
    if torch is None or torch.cuda.is_available():
        return
    unpinned(torch)
    if any(name.startswith(_MORIIO) for name in sys.modules):
        stand_in(torch)
        _check_alignment(torch)


def _check_alignment(torch) -> None:
    """vLLM on a CPU may allocate KV where its connector cannot register it, and says so in words that
    do not help. Where PyTorch puts what is large is seen from such a tensor, whose pages are never
    touched."""
    at = torch.empty(LARGE, dtype=torch.int8, device="cpu").data_ptr()
    if at % PAGE:
        raise RuntimeError(
            "vLLM's MoRIIOConnector needs its KV cache page-aligned, and PyTorch allocates at "
            f"{at % PAGE} bytes behind a page: set THP_MEM_ALLOC_ENABLE=1 in the environment of this server"
        )


# A worker of vLLM that fails once its connector beats its heart never ends; one that cannot import
# it does.
check_settings()
_prepare()
