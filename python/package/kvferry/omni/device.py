"""The pool where there is a GPU."""

import weakref

import numpy as np
import torch

from kvferry.log import logger_of

logger = logger_of(__name__)

# Addresses of pools that were tried.
_tried: set[int] = set()


def _unpin(address: int) -> None:
    _tried.discard(address)
    torch.cuda.cudart().cudaHostUnregister(address)


def pin(pool: np.ndarray) -> None:
    """Has the GPU copy from and to the pool by itself, in a process that uses one already: for others its context would be
    memory of the GPU for nothing. Without it copies go by way of the driver's own memory."""
    address = pool.__array_interface__["data"][0]
    if address in _tried or not torch.cuda.is_initialized():
        return
    _tried.add(address)
    status = torch.cuda.cudart().cudaHostRegister(address, pool.nbytes, 0)
    if int(status):
        logger.warning("the pool is not pinned, and copies of tensors to it are slower: error %d", int(status))
        return
    # Before it is unmapped.
    weakref.finalize(pool, _unpin, address)
