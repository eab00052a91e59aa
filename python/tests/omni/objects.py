"""Random objects of all that vLLM-Omni's serializer takes, and whether two are the same."""

import random
import warnings
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import msgspec
import numpy as np
import torch
from kvferry.omni import codec
from PIL import Image
from vllm.outputs import CompletionOutput, RequestOutput
from vllm_omni.distributed.omni_connectors.utils.serialization import OmniSerializer
from vllm_omni.outputs import OmniRequestOutput

DTYPES = list(codec.DTYPES.values())
ARRAY_DTYPES = ["<i2", ">i4", "|u1", "|b1", "<f2", "<f4", ">f8", "<c8", "<c16", "<M8[ns]", "<m8[us]", "|S3", "<U2"]
MODES = ["L", "P", "RGB", "RGBA", "CMYK", "YCbCr", "LA"]
KEYS = ["finished", "images", "index", "hidden_states", "meta", "ключ", ""]


@dataclass
class Chunk:
    name: str
    codes: Any
    left: int | None = None


class Span(msgspec.Struct, omit_defaults=True):
    start: int
    tensor: Any = None
    tail: Any = None


def taken(rng: random.Random) -> torch.Tensor:
    """A tensor that vLLM-Omni's serializer takes: not all dtypes, and no single item that would step over another."""
    while True:
        made = tensor(rng)
        try:
            OmniSerializer.serialize(made)
        except (RuntimeError, NotImplementedError):
            continue
        return made


def tensor(rng: random.Random, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Of any dtype, rank and layout, with any bytes."""
    dtype = dtype or rng.choice(DTYPES)
    shape = [rng.choice([0, 8]) if rng.random() < 0.1 else rng.randint(1, 5) for _ in range(rng.randint(0, 4))]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = torch.empty(shape, dtype=dtype)
    data = rng.randbytes(made.numel() * dtype.itemsize)
    if data:
        # A bool has two.
        data = bytes(byte & 1 for byte in data) if dtype == torch.bool else data
        made = torch.frombuffer(bytearray(data), dtype=dtype).view(shape)
    if made.dim() > 1 and rng.random() < 0.3:
        made = made.transpose(0, rng.randrange(1, made.dim()))
    if made.dim() and made.shape[0] > 1 and rng.random() < 0.3:
        made = made[rng.randrange(made.shape[0]) :: rng.choice([1, 2])]
    if rng.random() < 0.1:
        made = made.unsqueeze(0).expand(3, *made.shape)
    if rng.random() < 0.1 and made.is_floating_point():
        made = made.detach().requires_grad_()
    return made


def array(rng: random.Random) -> np.ndarray:
    dtype = np.dtype(rng.choice(ARRAY_DTYPES))
    shape = [rng.randint(0, 4) if rng.random() < 0.2 else rng.randint(1, 4) for _ in range(rng.randint(0, 3))]
    count = int(np.prod(shape))
    # Text may not have any bytes.
    data = rng.randbytes(count * dtype.itemsize) if dtype.kind not in "USb" else bytes(count * dtype.itemsize)
    made = np.frombuffer(data, dtype).reshape(shape) if data else np.empty(shape, dtype)
    if made.ndim > 1 and rng.random() < 0.4:
        made = made.T
    return made[::-1] if made.ndim and rng.random() < 0.2 else made


def image(rng: random.Random) -> Image.Image:
    mode, size = rng.choice(MODES), (rng.randint(1, 9), rng.randint(1, 9))
    return Image.frombytes(mode, size, rng.randbytes(size[0] * size[1] * len(Image.new(mode, (1, 1)).tobytes())))


def completion(rng: random.Random) -> CompletionOutput:
    return CompletionOutput(rng.randint(0, 3), "text", [1, 2], 0.5, None, finish_reason=rng.choice([None, "stop"]))


def request(rng: random.Random) -> RequestOutput:
    made = RequestOutput("r", "prompt", [1, 2, 3], None, [completion(rng) for _ in range(rng.randint(0, 2))], True)
    if rng.random() < 0.5:
        made.multimodal_output = {"audio": taken(rng)}
    return made


def omni_request(rng: random.Random) -> OmniRequestOutput:
    return OmniRequestOutput(
        request_id="r", finished=True, final_output_type="audio", outputs=[completion(rng)], images=[image(rng)]
    )


LEAVES = {
    "nothing": lambda rng: None,
    "flag": lambda rng: rng.random() < 0.5,
    "integer": lambda rng: rng.choice([0, -1, 127, 128, -129, 2**32, 2**64 - 1, -(2**63)]),
    "float": lambda rng: rng.choice([0.0, -0.0, 1.5, float("inf"), float("nan")]),
    "text": lambda rng: rng.choice(["", "слово", "x" * 300]),
    "bytes": lambda rng: rng.choice([bytes, bytearray, memoryview])(rng.randbytes(rng.choice([0, 1, 70_000]))),
    "slice": lambda rng: slice(1, rng.choice([None, 5]), 2),
    "tensor": taken,
    "array": array,
    "image": image,
    "completion": completion,
    "request": request,
    "omni_request": omni_request,
}
WEIGHTS = [12 if leaf == "tensor" else 3 for leaf in LEAVES]


def anything(rng: random.Random, depth: int = 4) -> Any:
    kind = rng.choice(["leaf", "dict", "list", "tuple", "chunk", "span"]) if depth else "leaf"
    if kind == "leaf":
        return rng.choices(list(LEAVES.values()), WEIGHTS)[0](rng)
    some = [anything(rng, depth - 1) for _ in range(rng.randint(0, 4))]
    if kind == "dict":
        return {rng.choice(KEYS) if rng.random() < 0.7 else rng.randint(-3, 3): value for value in some}
    if kind == "chunk":
        return Chunk("name", some)
    if kind == "span":
        return Span(7, *some[:2])
    return some if kind == "list" else tuple(some)


def same(one: Any, other: Any) -> bool:
    """Types, and all that a receiver can ask."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        if (one.dtype, one.shape, one.stride()) != (other.dtype, other.shape, other.stride()):
            return False
        return one.requires_grad == other.requires_grad and stored(one) == stored(other)
    if isinstance(one, np.ndarray):
        if (one.dtype, one.shape, one.flags.writeable) != (other.dtype, other.shape, other.flags.writeable):
            return False
        return one.tobytes() == other.tobytes()
    if isinstance(one, Image.Image):
        return (one.mode, one.size, one.tobytes()) == (other.mode, other.size, other.tobytes())
    if isinstance(one, dict):
        # Their order is kept, too.
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if is_dataclass(one):
        names = {field.name for field in fields(one)} | set(getattr(one, "__dict__", ()))
        return all(same(getattr(one, name, None), getattr(other, name, None)) for name in names)
    if isinstance(one, RequestOutput):
        return same(vars(one), vars(other))
    if isinstance(one, msgspec.msgpack.Ext):
        return (one.code, one.data) == (other.code, other.data)
    if isinstance(one, memoryview):
        return (one.format, one.shape, one.tobytes()) == (other.format, other.shape, other.tobytes())
    # So that nan is nan.
    return repr(one) == repr(other)


def stored(tensor: torch.Tensor) -> bytes:
    if tensor.element_size() < 16:
        tensor = tensor.detach().view(codec.WORDS[tensor.element_size()])
    return tensor.numpy().tobytes()
