"""vLLM's CPU offloading without a GPU: its own scheduler, and a worker that copies at once."""

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec


class Copying(OffloadingWorker):
    def __init__(self, kv_caches, chunks: int):
        self.blocks = [it.tensor for it in kv_caches.tensors]
        self.kept = [torch.zeros(chunks, *it.shape[1:], dtype=it.dtype) for it in self.blocks]
        self.finished: list[TransferResult] = []

    def submit_store(self, job_id, src_spec, dst_spec) -> bool:
        return self._copy(job_id, self.blocks, src_spec, self.kept, dst_spec)

    def submit_load(self, job_id, src_spec, dst_spec) -> bool:
        return self._copy(job_id, self.kept, src_spec, self.blocks, dst_spec)

    def _copy(self, job_id, sources, source, sinks, sink) -> bool:
        at, to = (torch.from_numpy(spec.block_ids).long() for spec in (source, sink))
        for source, sink in zip(sources, sinks, strict=True):
            sink[to] = source[at]
        self.finished.append(TransferResult(job_id, True))
        return True

    def get_finished(self) -> list[TransferResult]:
        finished, self.finished = self.finished, []
        return finished

    def wait(self, job_ids) -> None:
        """All is copied."""


class HostOffloading(CPUOffloadingSpec):
    def get_worker(self, kv_caches) -> Copying:
        return Copying(kv_caches, self.num_chunks)
