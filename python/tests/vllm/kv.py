"""KV in the memory of another process, found by MoRIIO's handshake and read past every data plane."""

import hashlib
from pathlib import Path

import model as tiny
import msgpack
import numpy
import zmq
from server import BLOCK_TOKENS

# K and V of one token in one head, float32.
ROW = 2 * 4 * tiny.HEAD_DIM
HEAD = BLOCK_TOKENS * ROW
BLOCK = tiny.KV_HEADS * HEAD


class Memory:
    """The KV of a process that listens for handshakes at `port`."""

    def __init__(self, port: int):
        socket = zmq.Context.instance().socket(zmq.DEALER)
        try:
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.RCVTIMEO, 10_000)
            socket.connect(f"tcp://127.0.0.1:{port}")
            socket.send(b"get_meta_msg")
            metadata = msgpack.unpackb(socket.recv_multipart()[1])
            socket.recv_multipart()
        finally:
            socket.close()
        assert metadata["block_len"] == BLOCK
        self.bases = metadata["kv_caches_base_addr"]
        self.blocks = metadata["num_blocks"]
        pid = msgpack.unpackb(metadata["agent_metadata"])[5]
        self.memory = Path(f"/proc/{pid}/mem")

    def read(self, layer: int, offset: int, length: int) -> bytes:
        with self.memory.open("rb", buffering=0) as memory:
            memory.seek(self.bases[layer] + offset)
            data = memory.read(length)
        assert len(data) == length
        return data

    def layer(self, layer: int) -> bytes:
        return self.read(layer, 0, self.blocks * BLOCK)

    def digest(self, blocks: list[int], tokens: int) -> str:
        """As an instance without a model tells it: by layer, token, head, K and V."""
        digest = hashlib.sha256()
        for layer in range(tiny.LAYERS):
            data = [self.read(layer, block * BLOCK, BLOCK) for block in blocks]
            for token in range(tokens):
                block, at = data[token // BLOCK_TOKENS], token % BLOCK_TOKENS * ROW
                for head in range(tiny.KV_HEADS):
                    digest.update(block[head * HEAD + at : head * HEAD + at + ROW])
        return digest.hexdigest()


def assert_copied(source: Memory, blocks: list[int], sink: Memory, written: int) -> None:
    """Fails unless the blocks of the source are in blocks of the sink, the same ones in every layer.
    In the last one the receiver has written the KV of as many tokens itself, and vLLM's CPU backend
    spreads the elements of a token over the block."""
    shape = (-1, tiny.KV_HEADS, HEAD)
    sources, sinks = (
        [numpy.frombuffer(memory.layer(n), numpy.uint8).reshape(shape) for n in range(tiny.LAYERS)]
        for memory in (source, sink)
    )
    for nth, block in enumerate(blocks):
        others = written * ROW if nth + 1 == len(blocks) else 0
        differ = (sinks[0] != sources[0][block]).sum(axis=2)
        found = numpy.flatnonzero((differ <= others).all(axis=1))
        assert found.size, f"block {nth} of the prompt is nowhere in the sink"
        for layer in range(tiny.LAYERS):
            differ = (sinks[layer][found] != sources[layer][block]).sum(axis=2)
            assert (differ <= others).all(axis=1).any(), f"block {nth} differs in layer {layer}"
