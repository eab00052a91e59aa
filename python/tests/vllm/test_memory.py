"""The memory file of a KV cache."""

import os

import pytest
import torch
from kvferry.vllm import memory

SIZE = (3 << 20) + 5


@pytest.mark.parametrize("populate", [memory.POPULATE, -1], ids=["at once", "an old kernel"])
def test_all_pages_are_there_from_the_start(monkeypatch, populate):
    monkeypatch.setattr(memory, "POPULATE", populate)
    files = memory.Files()
    buffer = files.zeros(SIZE)
    (file,) = files.by_base.values()
    assert os.fstat(file).st_blocks * 512 >= SIZE
    assert buffer.dtype == torch.int8 and buffer.numel() == SIZE and not buffer.any()
    os.close(file)
