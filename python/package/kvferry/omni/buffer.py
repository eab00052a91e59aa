"""A raw payload as vLLM-Omni's connectors return one."""

import torch
from vllm_omni.distributed.omni_connectors.utils.memory_pool import ManagedBuffer

from kvferry.omni.codec import Raw


class PayloadBuffer(ManagedBuffer):
    """A view of the pool. The slot is free when this is released, or gone, and nobody has a view of it."""

    def __init__(self, raw: Raw):
        # Nothing in here is to be freed by the base class.
        self._released = False
        self._raw: Raw | None = raw
        self.allocator = None
        self.offset = 0
        self.size = raw.tensor.nbytes
        # What was put: bytes, bytearray, memoryview or torch.Tensor.
        self.kind = raw.kind
        # Of a tensor that was put; otherwise that of bytes.
        self.dtype = raw.tensor.dtype
        self.shape = raw.tensor.shape

    def release(self) -> None:
        self._raw = None
        self._released = True

    @property
    def raw(self) -> Raw:
        if self._raw is None:
            raise RuntimeError("this buffer has been released")
        return self._raw

    @property
    def tensor(self) -> torch.Tensor:
        """The bytes."""
        return self.raw.tensor.reshape(-1).view(torch.uint8)

    @property
    def pool_tensor(self) -> torch.Tensor:
        return self.tensor

    def as_tensor(self, dtype: torch.dtype | None = None, shape: tuple | None = None) -> torch.Tensor:
        """As the base class, and without arguments the tensor that was put."""
        if dtype is None and shape is None:
            return self.raw.tensor
        return super().as_tensor(dtype or self.dtype, self.shape if shape is None else shape)

    def object(self):
        """What was put; a tensor or a memoryview is a view, bytes are a copy."""
        return self.raw.object()
