"""What a stage of vLLM-Omni puts, as one header and the memory of its tensors, arrays, images and long bytes: so that
tensors are copied once, into a pool, and read there as views. What is decoded equals what vLLM-Omni's own OmniSerializer
makes of the same object; a payload that is bytes, a bytearray, a memoryview or one tensor stays that.

    whole     = header | zeros up to ALIGNMENT | buffer | zeros up to ALIGNMENT | buffer ...
    header    = PREAMBLE | skeleton
    skeleton  = the leaf (a raw payload), or msgpack with the leaves as extensions, whose code the preamble says
    leaf      = kind (1 byte) | length of the name (1) | name | dimensions (8 each, little endian)

Buffers have no offsets: they follow each other in the order of their leaves, each as long as dtype and shape say. A tensor
on a device is copied from there into the pool, by the device itself where `device.pin` has had the pool pinned."""

import ctypes
import math
import re
import struct
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
import vllm_omni
from msgspec import msgpack
from vllm_omni.distributed.omni_connectors.utils import serialization

MAGIC = b"KVFP"
VERSION = 1

# Magic, version, form (one of the next four), bytes of the skeleton, code of the leaves, bytes of the whole.
PREAMBLE = struct.Struct("<4sHHIb3xQ")

# Forms of a payload: an object as a skeleton with leaves, or one leaf alone.
OBJECT = 0
RAW = 1

# Forms of what MoriTransferEngineConnector of vLLM-Omni 0.30.0 puts or gets, for stages that have it: its bytes at ALIGNMENT,
# without a skeleton; serialized by OmniSerializer, or as they are (its fast path).
FOREIGN_SERIALIZED = 2
FOREIGN_RAW = 3

# Of buffers in the whole, bytes: a cache line, and what kernels on tensors ask for.
ALIGNMENT = 64

# Bytes of the longest header, unless a deployment says otherwise. A hostile one makes at most some 64 times as many bytes of
# Python objects.
HEADER_MAX = 256 << 20

# A skeleton of more bytes than ASIDE_AFTER is looked through for bytes of at least ASIDE_MIN, which become buffers.
ASIDE_AFTER = 64 << 10
ASIDE_MIN = 4 << 10

# Of msgpack's extensions: vLLM-Omni uses none, but an object may have some of its own. Then it is another one.
LEAF_CODE = 75

# Where something may be an extension of that code.
LIKE_LEAVES = re.compile(rb"(?=[\xd4-\xd8]K|\xc7.K|\xc8..K|\xc9....K)", re.DOTALL)

# What torch takes.
DIMENSIONS_MAX = 64

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    # Those of quantized tensors mean nothing without their scales.
    if isinstance(dtype, torch.dtype) and not str(dtype).startswith("torch.q")
}
NAMES = {dtype: name.encode() for name, dtype in DTYPES.items()}

# By bytes of an item.
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

# numpy's names of types without pointers: no objects, no structures.
ARRAY_DTYPE = re.compile(r"[<>|=][biufcmMSU]\d{1,10}(\[\d*[A-Za-z]{1,2}\])?")

# Kinds of leaves; besides these there are tensors (T), numpy's arrays (N) and Pillow's images (P).
RAW_KINDS = {bytes: b"B", bytearray: b"A", memoryview: b"M"}

# To what memoryview.cast can go back.
FORMATS = frozenset("bBhHiIlLqQnNfd?c")

# One of these strings is in the skeleton of anything that vLLM-Omni makes more of than dicts and lists.
RESTORED = tuple(
    word.encode()
    for word in (
        serialization._TENSOR_MARKER,
        serialization._NDARRAY_MARKER,
        serialization._PIL_IMAGE_MARKER,
        "final_output_type",
        "images",
        "prompt_token_ids",
        "finish_reason",
    )
)
RESTORED_IS_KNOWN = vllm_omni.__version__.startswith("0.30.")

ZEROS = ctypes.create_string_buffer(ALIGNMENT)

for _base, _names in (
    (serialization.OmniMsgpackEncoder, ("_enc_hook", "_encode_tensor", "_encode_ndarray", "_encode_pil_image")),
    (serialization.OmniMsgpackDecoder, ("_post_process", "_decode_tensor", "_decode_pil_image")),
):
    for _name in _names:
        # Or tensors would go through msgpack, and nobody would know.
        if not hasattr(_base, _name):
            raise ImportError(
                f"vllm_omni {vllm_omni.__version__} has no {_base.__name__}.{_name}, which kvferry.omni builds on; "
                "use vllm_omni 0.30 or a kvferry that names this version"
            )


class PayloadError(ValueError):
    """A payload that cannot be decoded."""


def _damaged(what: str) -> PayloadError:
    return PayloadError(
        f"damaged payload: {what}; "
        "both stages have to run the same kvferry, and nothing may write to a payload that is read"
    )


class Buffer(NamedTuple):
    """Memory that goes into the whole as it is."""

    # In the whole.
    offset: int
    nbytes: int
    # None of a tensor on a device.
    address: int | None
    # Has the memory at `address`, or is the tensor.
    owner: Any


class Encoded:
    """An object as memory to be copied; has references to it, so that a tensor must not change until it is copied."""

    __slots__ = ("buffers", "header", "is_raw", "nbytes", "payload_bytes")

    def __init__(
        self,
        form: int,
        skeleton: bytes,
        leaves: list[tuple[int, int | None, Any]],
        code: int = LEAF_CODE,
        header_max: int = HEADER_MAX,
    ):
        start = PREAMBLE.size + len(skeleton)
        if start > header_max:
            raise ValueError(
                f"an object with {start} bytes beside tensors, arrays and long bytes, object_bytes = {header_max} at most; "
                "put its long lists as tensors or arrays, or raise object_bytes in all stages"
            )
        end = start
        self.buffers = []
        for nbytes, address, owner in leaves:
            offset = -(-end // ALIGNMENT) * ALIGNMENT
            self.buffers.append(Buffer(offset, nbytes, address, owner))
            end = offset + nbytes
        # Bytes of the whole.
        self.nbytes = end
        self.is_raw = form in (RAW, FOREIGN_RAW)
        # Those of a raw payload, or a foreign one, alone; of another one the whole's.
        self.payload_bytes = leaves[0][0] if form else end
        self.header = PREAMBLE.pack(MAGIC, VERSION, form, len(skeleton), code, end) + skeleton

    def is_on_device(self) -> bool:
        """Whether a device copies some of it."""
        return any(address is None for _, _, address, _ in self.buffers)

    def write(self, memory: Any) -> None:
        """Copies all into writable memory, a tensor of uint8 or anything with a buffer, of `nbytes` or more. It releases
        the interpreter's lock while it copies a buffer."""
        target = _bytes_of(memory)
        if target.nbytes < self.nbytes:
            raise ValueError(f"{target.nbytes} bytes for a payload of {self.nbytes}")
        base = target.__array_interface__["data"][0]
        end = len(self.header)
        memmove = ctypes.memmove
        memmove(base, self.header, end)
        devices = set()
        for offset, nbytes, address, owner in self.buffers:
            # Whose bytes were there before is nobody's business.
            if offset > end:
                memmove(base + end, ZEROS, offset - end)
            if address is not None:
                memmove(base + offset, address, nbytes)
            elif nbytes:
                place = torch.from_numpy(target[offset : offset + nbytes])
                place.copy_(owner.view(-1).view(torch.uint8), non_blocking=True)
                devices.add(owner.device)
            end = offset + nbytes
        for device in devices:
            torch.accelerator.current_stream(device).synchronize()


class _Aside:
    """Bytes that are to be a buffer."""

    __slots__ = ("data",)

    def __init__(self, data: Any):
        self.data = data


class _Encoder(serialization.OmniMsgpackEncoder):
    """vLLM-Omni's, but for the memory of tensors, arrays and images, which it sets aside."""

    def __init__(self, code: int = LEAF_CODE):
        super().__init__()
        # Of the leaves in the skeleton.
        self.code = code
        # Bytes, address and owner of each, in the order of the skeleton.
        self.leaves: list[tuple[int, int | None, Any]] = []

    def tensor(self, tensor: torch.Tensor) -> bytes:
        name = NAMES.get(tensor.dtype)
        if name is None:
            raise TypeError(f"a tensor of {tensor.dtype} has no bytes of its own; dequantize it before it is put")
        # Each call that is not made is a microsecond of a small payload's.
        flat = tensor if tensor.is_cpu else tensor.detach()
        if flat.is_conj() or flat.is_neg():
            flat = flat.detach().resolve_conj().resolve_neg()
        if not flat.is_contiguous():
            # Torch copies no tensor of some dtypes.
            flat = flat.detach().view(WORDS.get(flat.element_size(), flat.dtype)).contiguous()
        self.leaves.append((flat.nbytes, flat.data_ptr() if flat.is_cpu else None, flat))
        return _leaf(b"T", name, tensor.shape)

    def array(self, array: np.ndarray) -> bytes:
        kind, shape = array.dtype.str, array.shape
        if type(array) is np.ndarray:
            array = np.ascontiguousarray(array)
            self.leaves.append((array.nbytes, array.__array_interface__["data"][0], array))
        else:
            # A masked array, for one, has other bytes than its memory.
            self.memory(array.tobytes())
        return _leaf(b"N", kind.encode(), shape)

    def memory(self, data: bytes | bytearray | memoryview) -> int:
        """Sets bytes aside, and says how many."""
        view = memoryview(data)
        array = np.frombuffer(view if view.c_contiguous else view.tobytes(), np.uint8)
        self.leaves.append((array.nbytes, array.__array_interface__["data"][0], array))
        return array.nbytes

    def raw(self, data: Any) -> bytes | None:
        """The leaf of a payload that is one; None of others."""
        if isinstance(data, torch.Tensor):
            return self.tensor(data)
        kind = RAW_KINDS.get(type(data))
        if kind is None:
            return None
        form, shape = "B", (self.memory(data),)
        if kind == b"M" and data.format in FORMATS and data.nbytes:
            form, shape = data.format, data.shape
        return _leaf(kind, form.encode(), shape)

    def _enc_hook(self, obj: Any) -> Any:
        if type(obj) is _Aside:
            return msgpack.Ext(self.code, _leaf(b"B", b"B", (self.memory(obj.data),)))
        return super()._enc_hook(obj)

    def _encode_tensor(self, tensor: torch.Tensor) -> msgpack.Ext:
        return msgpack.Ext(self.code, self.tensor(tensor))

    def _encode_ndarray(self, arr: np.ndarray) -> msgpack.Ext:
        return msgpack.Ext(self.code, self.array(arr))

    def _encode_pil_image(self, img: Any) -> msgpack.Ext:
        array = np.ascontiguousarray(np.asarray(img, dtype=np.uint8))
        self.leaves.append((array.nbytes, array.__array_interface__["data"][0], array))
        return msgpack.Ext(self.code, _leaf(b"P", img.mode.encode(), array.shape))


# Chunks of a stream have the same leaves again and again.
@lru_cache(1024)
def _leaf(kind: bytes, name: bytes, shape: tuple[int, ...]) -> bytes:
    return struct.pack(f"<cB{len(name)}s{len(shape)}Q", kind, len(name), name, *shape)


def encode(obj: Any, header_max: int = HEADER_MAX) -> Encoded:
    """Raises what OmniSerializer.serialize raises, and ValueError for more than `header_max` bytes that are no buffers."""
    encoder = _Encoder()
    leaf = encoder.raw(obj)
    if leaf is not None:
        return Encoded(RAW, leaf, encoder.leaves)
    skeleton = encoder.encode(obj)
    if len(skeleton) > ASIDE_AFTER:
        aside = _without_bytes(obj)
        if aside is not obj:
            obj, encoder = aside, _Encoder()
            skeleton = encoder.encode(obj)
    if (code := _other_code(skeleton, len(encoder.leaves))) is not None:
        encoder = _Encoder(code)
        skeleton = encoder.encode(obj)
    return Encoded(OBJECT, skeleton, encoder.leaves, encoder.code, header_max)


def _other_code(skeleton: bytes, leaves: int) -> int | None:
    """A code that no extension of the object has, if one of them has LEAF_CODE."""
    # Each leaf looks like one once. Most objects have nothing else that does, and are not read again.
    if skeleton.count(LEAF_CODE) == leaves or len(LIKE_LEAVES.findall(skeleton)) == leaves:
        return None
    codes = []
    msgpack.Decoder(ext_hook=lambda code, _: codes.append(code)).decode(skeleton)
    if codes.count(LEAF_CODE) == leaves:
        return None
    unused = set(range(1, 128)).difference(codes)
    if not unused:
        raise ValueError("an object with msgpack extensions of all codes from 1 to 127: leave one of them unused")
    return min(unused)


def encode_foreign(obj: Any) -> Encoded:
    """The same for a stage whose connector is vLLM-Omni 0.30.0's for MoRI: as that one would put it, but for what is empty,
    which it refuses to put. Raises what OmniSerializer.serialize raises."""
    encoder = _Encoder()
    is_raw = isinstance(obj, (bytes, torch.Tensor))
    if is_raw:
        encoder.raw(obj)
        is_raw = encoder.leaves[0][0] > 0
    if not is_raw:
        encoder.leaves.clear()
        encoder.memory(serialization.OmniSerializer.serialize(obj))
    return Encoded(FOREIGN_RAW if is_raw else FOREIGN_SERIALIZED, b"", encoder.leaves)


def _without_bytes(obj: Any) -> Any:
    """The object with long bytes as `_Aside`, or itself if it has none. Those in dataclasses and structs stay, which
    msgspec alone knows how to encode."""
    kind = type(obj)
    if kind in RAW_KINDS:
        return _Aside(obj) if memoryview(obj).nbytes >= ASIDE_MIN else obj
    if kind is dict:
        values = {key: _without_bytes(value) for key, value in obj.items()}
        return values if any(values[key] is not value for key, value in obj.items()) else obj
    if kind is list or kind is tuple:
        values = [_without_bytes(value) for value in obj]
        return values if any(new is not old for new, old in zip(values, obj, strict=True)) else obj
    return obj


class _Whole(np.ndarray):
    """The memory of a payload; views of it keep it, and with it the holder."""

    holder: Any = None


def _bytes_of(memory: Any) -> np.ndarray:
    """Memory as writable bytes."""
    if isinstance(memory, torch.Tensor):
        if memory.device.type != "cpu" or memory.dtype != torch.uint8 or not memory.is_contiguous():
            raise TypeError(
                f"a contiguous uint8 tensor in host memory is needed, not {memory.dtype} on {memory.device}"
            )
        array = memory.detach().view(-1).numpy()
    else:
        array = np.frombuffer(memory, np.uint8) if memoryview(memory).nbytes else np.empty(0, np.uint8)
    if not array.flags.writeable:
        raise TypeError("writable memory is needed: so are the tensors that are views of it")
    return array


class Raw(NamedTuple):
    """A payload that is memory and nothing else."""

    # What was put.
    kind: type
    # A view; of uint8 and one dimension unless a tensor was put.
    tensor: torch.Tensor
    # Of a memoryview.
    format: str = "B"
    shape: tuple[int, ...] = ()

    def object(self) -> Any:
        """A tensor or a memoryview that is a view; bytes and bytearrays are copies."""
        if self.kind is torch.Tensor:
            return self.tensor
        view = memoryview(self.tensor.numpy())
        if self.kind is not memoryview:
            return self.kind(view)
        return view.cast(self.format, self.shape) if view.nbytes else view


class _Reader:
    """Takes the leaves of a payload one after the other."""

    def __init__(self, whole: _Whole, end: int, nbytes: int, code: int = LEAF_CODE):
        self.code = code
        # Of an array numpy would take the base, which has no holder.
        self.view = memoryview(whole)
        self.end = end
        self.nbytes = nbytes

    def extension(self, code: int, data: memoryview) -> Any:
        if code != self.code:
            return msgpack.Ext(code, bytes(data))
        return self.leaf(bytes(data))

    def leaf(self, leaf: bytes) -> Any:
        kind, name, shape = _parts(leaf)
        if kind == b"T":
            return self.tensor(name, shape)
        if kind == b"N":
            return self.array(name, shape)
        if kind == b"P":
            return self.image(name, shape)
        return self.raw(leaf).object()

    def raw(self, leaf: bytes) -> Raw:
        kind, name, shape = _parts(leaf)
        if kind == b"T":
            return Raw(torch.Tensor, self.tensor(name, shape))
        for made, known in RAW_KINDS.items():
            if kind == known and name in FORMATS:
                nbytes = math.prod(shape) * struct.calcsize(name)
                return Raw(made, self.tensor("uint8", (nbytes,)), name, shape)
        raise _damaged(f"a leaf of kind {kind!r} and name {name!r}")

    def take(self, shape: tuple[int, ...], item: int) -> tuple[int, int]:
        """How many items the next buffer has, and where it begins."""
        count = math.prod(shape)
        offset = -(-self.end // ALIGNMENT) * ALIGNMENT
        self.end = offset + count * item
        if self.end > self.nbytes:
            raise _damaged(f"{count} items of {item} bytes from byte {offset} on, of {self.nbytes} bytes in all")
        return count, offset

    def done(self) -> None:
        if self.end != self.nbytes:
            raise _damaged(f"buffers end at byte {self.end} of {self.nbytes}")

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        dtype = DTYPES.get(name)
        if dtype is None:
            raise _damaged(f"a tensor of {name!r}, of which this torch has no dtype")
        count, offset = self.take(shape, dtype.itemsize)
        if not count:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(self.view, dtype=dtype, count=count, offset=offset).view(shape)

    def array(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        dtype = _array_dtype(name)
        count, offset = self.take(shape, dtype.itemsize)
        if count and dtype.itemsize:
            array = np.frombuffer(self.view, dtype, count, offset).reshape(shape)
        else:
            array = np.empty(shape, dtype)
        # As vLLM-Omni's are.
        array.flags.writeable = False
        return array

    def image(self, mode: str, shape: tuple[int, ...]) -> Any:
        count, offset = self.take(shape, 1)
        data = self.view[offset : offset + count]
        return DECODER._decode_pil_image({"mode": mode, "shape": shape, "data": data})


@lru_cache(1024)
def _parts(leaf: bytes) -> tuple[bytes, str, tuple[int, ...]]:
    if len(leaf) < 2:
        raise _damaged(f"a leaf of {len(leaf)} bytes")
    start = 2 + leaf[1]
    rest = len(leaf) - start
    if rest < 0 or rest % 8 or rest > 8 * DIMENSIONS_MAX:
        raise _damaged(f"a leaf of {len(leaf)} bytes with a name of {leaf[1]}")
    return leaf[:1], leaf[2:start].decode(), struct.unpack_from(f"<{rest // 8}Q", leaf, start)


@lru_cache(64)
def _array_dtype(name: str) -> np.dtype:
    if not ARRAY_DTYPE.fullmatch(name):
        raise _damaged(f"an array of {name!r}")
    return np.dtype(name)


class _Decoder(serialization.OmniMsgpackDecoder):
    """vLLM-Omni's, but for a tensor in the skeleton, which somebody put as a dict: it is as long as its shape says."""

    def _decode_tensor(self, obj: dict[str, Any]) -> torch.Tensor:
        dtype, shape = DTYPES.get(obj["dtype"]), obj["shape"]
        if dtype is None or min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize != len(obj["data"]):
            raise _damaged(f"a tensor of {obj['dtype']!r} and {shape} with {len(obj['data'])} bytes")
        return super()._decode_tensor(obj)


DECODER = _Decoder()


def decode(memory: Any, holder: Any = None) -> Any:
    """The object of a payload. `memory`, a tensor of uint8 or anything with a buffer, writable and aligned to ALIGNMENT,
    may be longer. Tensors, arrays, memoryviews and images of some modes are views of it, and keep `holder` alive as long
    as one of them is. Raises PayloadError, whatever is in the memory."""
    return _opened(memory, holder, _object)


def decode_raw(memory: Any, holder: Any = None) -> Raw | None:
    """A raw payload without a copy; None of others."""
    return _opened(memory, holder, _raw)


def decode_either(memory: Any, holder: Any = None, header_max: int = HEADER_MAX) -> tuple[Any, int]:
    """A raw payload as `Raw`, another one as its object; and the bytes of the whole."""
    return _opened(memory, holder, _either, header_max)


def _either(reader: _Reader, raw: int, skeleton: bytes) -> tuple[Any, int]:
    return (_raw if raw else _object)(reader, raw, skeleton), reader.nbytes


def _raw(reader: _Reader, raw: int, skeleton: bytes) -> Raw | None:
    if not raw:
        return None
    made = reader.raw(skeleton)
    reader.done()
    return made


def _object(reader: _Reader, raw: int, skeleton: bytes) -> Any:
    if raw:
        return _raw(reader, raw, skeleton).object()
    obj = msgpack.Decoder(ext_hook=reader.extension).decode(skeleton)
    if not RESTORED_IS_KNOWN or any(word in skeleton for word in RESTORED):
        obj = DECODER._post_process(obj)
    reader.done()
    return obj


def _opened(
    memory: Any, holder: Any, made: Callable[[_Reader, int, bytes], Any], header_max: int = HEADER_MAX
) -> Any:
    whole = _bytes_of(memory).view(_Whole)
    whole.holder = holder
    if whole.nbytes < PREAMBLE.size:
        raise _damaged(f"{whole.nbytes} bytes, fewer than the {PREAMBLE.size} of a preamble")
    magic, version, form, length, code, nbytes = PREAMBLE.unpack_from(whole)
    if magic != MAGIC:
        raise _damaged(f"it begins with {magic!r}, not {MAGIC!r}")
    if version != VERSION or form > FOREIGN_RAW:
        raise _damaged(f"version {version} and form {form}, this kvferry reads version {VERSION}")
    end = PREAMBLE.size + length
    if end > header_max:
        raise _damaged(f"a header of {end} bytes, object_bytes = {header_max} at most")
    if not end <= nbytes <= whole.nbytes:
        raise _damaged(f"a header of {end} bytes and {nbytes} in all, in {whole.nbytes} bytes of memory")
    # Once, so that what was looked at is what is read.
    skeleton = whole[PREAMBLE.size : end].tobytes()
    if form >= FOREIGN_SERIALIZED:
        if nbytes < ALIGNMENT or length:
            raise _damaged(f"form {form} with a skeleton of {length} bytes and {nbytes} bytes in all")
        form, end, skeleton = _of_mori(form, whole, nbytes)
    try:
        return made(_Reader(whole, end, nbytes, code), form, skeleton)
    except PayloadError:
        raise
    # Recursion and lack of memory among them: the bytes are a peer's.
    except Exception as error:
        raise _damaged(f"{type(error).__name__}: {error}") from error


def _of_mori(form: int, whole: _Whole, nbytes: int) -> tuple[int, int, bytes]:
    """What another stage put, as if one of ours had: its raw payloads, of which nothing else is known, as a tensor of
    uint8. Where buffers begin is where there are none any more, or the only one."""
    if form == FOREIGN_RAW:
        return RAW, PREAMBLE.size, _leaf(b"T", b"uint8", (nbytes - ALIGNMENT,))
    return OBJECT, nbytes, whole[ALIGNMENT:nbytes].tobytes()
