"""KV cache in a memory file, which the host maps, so that it moves bytes without the worker."""

import contextlib
import errno
import fcntl
import mmap
import os

import torch

from kvferry.log import logger_of

logger = logger_of(__name__)

# MADV_POPULATE_WRITE of <linux/mman.h>, which `mmap` has no name for: all pages are there at once.
POPULATE = 23

# Nobody may cut it: who had it mapped would be killed. (The names of `fcntl` are of Python 3.10.)
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def _populate(mapped: mmap.mmap, buffer: torch.Tensor) -> None:
    """Or the first request that gets a block waits while the kernel clears its pages."""
    try:
        mapped.madvise(POPULATE)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        # A kernel before 5.14.
        buffer.zero_()


class Files:
    """The memory files of a worker, by the address at which they are mapped."""

    def __init__(self):
        self.by_base: dict[int, int] = {}

    @contextlib.contextmanager
    def pool(self):
        """While it is entered, byte buffers that vLLM takes from `torch.zeros` lie in memory files."""
        plain = torch.zeros

        def zeros(*size, dtype=None, device=None, **more):
            is_cpu = device is not None and torch.device(device).type == "cpu"
            if not (is_cpu and dtype == torch.int8 and len(size) == 1 and isinstance(size[0], int)):
                return plain(*size, dtype=dtype, device=device, **more)
            try:
                return self.zeros(size[0])
            except OSError as error:
                logger.warning("no memory file for the KV cache, so private memory: %s", error)
                return plain(*size, dtype=dtype, device=device, **more)

        torch.zeros = zeros
        try:
            yield
        finally:
            torch.zeros = plain

    def zeros(self, size: int) -> torch.Tensor:
        """Zeroed bytes in a file of their own."""
        file = os.memfd_create("kvferry-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(file, -(-size // mmap.PAGESIZE) * mmap.PAGESIZE)
            fcntl.fcntl(file, fcntl.F_ADD_SEALS, SEALS)
            # The tensor keeps it.
            mapped = mmap.mmap(file, 0)
            buffer = torch.frombuffer(mapped, dtype=torch.int8, count=size)
            _populate(mapped, buffer)
        except OSError:
            os.close(file)
            raise
        self.by_base[buffer.data_ptr()] = file
        return buffer
