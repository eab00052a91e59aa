"""Payloads in memory against vLLM-Omni's own serializer."""

import json
import random
import struct
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kvferry.omni import codec
from msgspec import msgpack
from objects import DTYPES, anything, array, image, same, stored, tensor
from PIL import Image
from vllm_omni.distributed.omni_connectors.utils.serialization import OmniSerializer

PAYLOADS = json.loads((Path(__file__).parent / "payloads.json").read_text())

# Torch says that some dtypes are new.
pytestmark = pytest.mark.filterwarnings("ignore")


def pool(nbytes: int) -> torch.Tensor:
    """Memory as a slot of a pool: aligned, and full of what was there before."""
    whole = torch.full((nbytes + codec.ALIGNMENT,), 0xA5, dtype=torch.uint8)
    start = -whole.data_ptr() % codec.ALIGNMENT
    return whole[start : start + nbytes]


def written(obj: Any, spare: int = 0) -> torch.Tensor:
    encoded = codec.encode(obj)
    memory = pool(encoded.nbytes + spare)
    encoded.write(memory)
    return memory


def there_and_back(obj: Any) -> Any:
    return codec.decode(written(obj, spare=7))


def serialized(obj: Any) -> Any:
    return OmniSerializer.deserialize(OmniSerializer.serialize(obj))


@pytest.mark.parametrize("name", PAYLOADS["serialized"])
def test_what_was_recorded_comes_back(name):
    data = bytes.fromhex(PAYLOADS["serialized"][name])
    obj = OmniSerializer.deserialize(data)
    back = there_and_back(obj)
    assert same(back, obj)
    assert OmniSerializer.serialize(back) == OmniSerializer.serialize(obj)


def test_kv_bytes_come_back():
    data = bytes.fromhex(PAYLOADS["kv_transfer_data"])
    assert there_and_back(data) == data


@pytest.mark.parametrize("seed", range(20))
def test_any_object_is_what_the_serializer_makes_of_it(seed):
    rng = random.Random(seed)
    for number in range(100):
        # Not raw, which keeps more than the serializer does.
        obj = [anything(rng)]
        assert same(there_and_back(obj), serialized(obj)), f"object {number} of seed {seed}: {obj!r}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_tensor_keeps_dtype_shape_and_bytes(dtype):
    rng = random.Random(str(dtype))
    for _ in range(30):
        obj = tensor(rng, dtype)
        back = there_and_back(obj)
        assert (back.dtype, back.shape) == (obj.dtype, obj.shape)
        assert stored(back) == stored(obj)


def test_a_conjugate_is_written_as_it_reads():
    obj = torch.tensor([1 + 2j, 3 - 4j]).conj()
    assert torch.equal(there_and_back(obj), obj)
    assert torch.equal(there_and_back(obj.imag), obj.imag)


@pytest.mark.parametrize(
    "obj",
    [
        b"",
        b"bytes",
        bytearray(),
        bytearray(b"array"),
        memoryview(b""),
        memoryview(b"view"),
        memoryview(np.arange(6, dtype=np.float32).reshape(2, 3)),
        memoryview(np.array(1.5)),
        memoryview(np.arange(12, dtype=np.int16).reshape(3, 4).T),
    ],
    ids=repr,
)
def test_raw_bytes_keep_their_kind(obj):
    back = there_and_back(obj)
    assert type(back) is type(obj) and back == obj
    raw = codec.decode_raw(written(obj))
    assert raw.kind is type(obj) and same(raw.object(), back)
    assert raw.tensor.dtype == torch.uint8 and raw.tensor.numpy().tobytes() == memoryview(obj).tobytes()


def test_a_raw_payload_is_read_without_a_copy():
    memory = written(torch.arange(8.0).view(2, 4))
    raw = codec.decode_raw(memory)
    assert raw.kind is torch.Tensor and raw.tensor.shape == (2, 4)
    assert raw.tensor.data_ptr() == memory.data_ptr() + codec.encode(raw.tensor).buffers[0].offset
    assert codec.decode_raw(written({"a": 1})) is None


def test_the_header_is_small_and_the_buffers_are_the_objects_own():
    obj = {"a": torch.zeros(1 << 20), "b": np.zeros(1 << 20), "c": [bytes(1 << 20)], "d": (bytearray(1 << 20),)}
    encoded = codec.encode(obj)
    assert len(encoded.header) < 200
    a, b, c, d = encoded.buffers
    assert (a.address, a.nbytes) == (obj["a"].data_ptr(), 4 << 20)
    assert (b.address, b.nbytes) == (obj["b"].ctypes.data, 8 << 20)
    assert c.address == np.frombuffer(obj["c"][0], np.uint8).ctypes.data
    assert d.address == np.frombuffer(obj["d"][0], np.uint8).ctypes.data
    assert encoded.nbytes == d.offset + d.nbytes


def test_buffers_are_aligned_and_no_byte_between_them_is_somebody_elses():
    rng = random.Random(1)
    for _ in range(200):
        encoded = codec.encode([anything(rng)])
        memory = pool(encoded.nbytes)
        encoded.write(memory)
        data, end = memory.numpy().tobytes(), len(encoded.header)
        assert data[:end] == encoded.header
        for buffer in encoded.buffers:
            assert buffer.offset % codec.ALIGNMENT == 0 and 0 <= buffer.offset - end < codec.ALIGNMENT
            assert not any(data[end : buffer.offset])
            end = buffer.offset + buffer.nbytes
        assert end == encoded.nbytes


def test_a_tensor_is_made_contiguous_once():
    obj = torch.arange(6).view(2, 3).t()
    (buffer,) = codec.encode(obj).buffers
    assert buffer.owner.is_contiguous() and buffer.address == buffer.owner.data_ptr() != obj.data_ptr()


class Holder:
    """Of a slot."""


VIEWS = {
    "tensor": (torch.arange(4.0), lambda back: back),
    "part of a tensor": ([torch.arange(4.0)], lambda back: back[0][1:].view(torch.uint8)),
    "scalar": ({"a": torch.tensor(1)}, lambda back: back["a"]),
    "array": ([np.arange(4.0)], lambda back: back[0]),
    "part of an array": ([np.arange(4.0)], lambda back: back[0][1:].view(np.uint8)),
    "tensor of an array": ([np.arange(4.0)], lambda back: torch.from_numpy(back[0])),
    "memoryview": (memoryview(b"1234"), lambda back: back[2:]),
    "image": ([Image.new("L", (5, 5), 7)], lambda back: back[0]),
}


@pytest.mark.parametrize("case", VIEWS)
def test_a_view_sees_the_memory_and_keeps_its_holder(case):
    obj, viewed = VIEWS[case]
    memory, holder = written(obj), Holder()
    held = weakref.ref(holder)
    view = viewed(codec.decode(memory, holder))
    before = bytes(np.asarray(view).tobytes())
    memory[codec.encode(obj).buffers[0].offset :] ^= 1
    after = bytes(np.asarray(view).tobytes())
    assert after == bytes(byte ^ 1 for byte in before) != before
    del holder
    assert held() is not None
    del view
    assert held() is None


def test_copies_do_not_keep_the_holder():
    for obj in [b"bytes", bytearray(b"array"), {"a": bytes(1 << 20)}, {"a": 1}, torch.empty(0)]:
        holder = Holder()
        held = weakref.ref(holder)
        back = codec.decode(written(obj), holder)
        del holder
        assert held() is None
        assert same(back, obj)


def test_memory_may_be_anything_with_a_buffer():
    encoded = codec.encode({"a": torch.arange(4)})
    plain = bytearray(encoded.nbytes)
    for memory in [plain, memoryview(plain), np.zeros(encoded.nbytes, np.uint8)]:
        encoded.write(memory)
        assert torch.equal(codec.decode(memory)["a"], torch.arange(4))
    with pytest.raises(TypeError, match="writable memory is needed"):
        codec.decode(bytes(encoded.nbytes))
    with pytest.raises(TypeError, match="contiguous uint8 tensor in host memory"):
        codec.decode(torch.zeros(encoded.nbytes))
    with pytest.raises(ValueError, match=f"{encoded.nbytes - 1} bytes for a payload of {encoded.nbytes}"):
        encoded.write(bytearray(encoded.nbytes - 1))


@pytest.mark.parametrize("obj", [["x" * (20 << 20)], [0.5] * 2_000_000], ids=["text", "list"])
def test_long_texts_and_lists_are_the_same(obj):
    assert there_and_back(obj) == obj


@pytest.mark.parametrize("codes", [[codec.LEAF_CODE], [75, 1, 2], [*range(-128, -1), *range(127)]], ids=len)
def test_msgpack_extensions_of_an_object_stay_its_own(codes):
    """Beside tensors, which are extensions in the skeleton as well, and with bytes that look like those of a leaf."""
    extensions = [msgpack.Ext(code, b"K" * length) for code in codes for length in (1, 4, 16, 75, 300)]
    obj = {"own": extensions, "tensor": torch.arange(75), "text": "\xc7KKK", "ids": [75, 75 << 8, 0xC74B4B]}
    back = there_and_back(obj)
    # What the serializer makes of them.
    assert back["own"] == extensions and torch.equal(back["tensor"], obj["tensor"])
    assert (back["text"], back["ids"]) == (obj["text"], obj["ids"])


def test_extensions_of_all_codes_are_refused():
    with pytest.raises(ValueError, match="leave one of them unused"):
        codec.encode([msgpack.Ext(code, b"x") for code in range(128)])


def test_what_the_serializer_refuses_is_refused():
    for obj in [{"a": object()}, [torch.nn.Linear(1, 1)], np.array([object()], dtype=object)]:
        with pytest.raises(TypeError) as theirs:
            OmniSerializer.serialize(obj)
        with pytest.raises(TypeError) as ours:
            codec.encode(obj)
        assert str(ours.value) == str(theirs.value)
    with pytest.raises(ValueError, match="put its long lists as tensors or arrays"):
        codec.encode(["x" * 5000], header_max=5000)


def inside(obj: Any, memory: torch.Tensor) -> bool:
    """Whether all that is memory of an object is within this one."""
    if isinstance(obj, dict):
        return all(inside(value, memory) for value in obj.values())
    if isinstance(obj, list):
        return all(inside(value, memory) for value in obj)
    if isinstance(obj, torch.Tensor):
        address, nbytes = obj.data_ptr(), obj.numel() * obj.element_size()
    elif isinstance(obj, np.ndarray):
        address, nbytes = obj.ctypes.data, obj.nbytes
    else:
        return True
    return not nbytes or memory.data_ptr() <= address <= address + nbytes <= memory.data_ptr() + memory.numel()


def damaged(rng: random.Random, data: bytearray, header: int) -> bytearray:
    for _ in range(rng.randint(1, 4)):
        place = rng.randrange(min(header, len(data)) or 1)
        kind = rng.randrange(4)
        if kind == 0:
            data[place : place + 1] = rng.randbytes(1)
        elif kind == 1:
            data[place : place + 1] = bytes([data[place] ^ 1 << rng.randrange(8)]) if data else b""
        elif kind == 2:
            del data[place : place + rng.randint(1, 9)]
        else:
            data[place:place] = rng.choice([b"\xff", b"\0", b"\xdd\xff\xff\xff\xff", b"\xc9\0\0\0\x0a\x4bT\x04bool"])
    return data


@pytest.mark.parametrize("seed", range(10))
def test_damage_is_an_error_or_an_object_within_the_memory(seed):
    rng = random.Random(seed)
    errors = 0
    for number in range(300):
        encoded = codec.encode(anything(rng) if number % 2 else {"t": tensor(rng), "a": array(rng), "i": image(rng)})
        memory = bytearray(encoded.nbytes)
        encoded.write(memory)
        memory = torch.frombuffer(damaged(rng, memory, len(encoded.header)) or bytearray(1), dtype=torch.uint8)
        try:
            back = codec.decode(memory)
        except codec.PayloadError:
            errors += 1
        else:
            assert inside(back, memory)
        try:
            codec.decode_raw(memory)
        except codec.PayloadError:
            pass
    assert errors


def whole(skeleton: bytes, tail: int = 0, raw: int = 0, **lies: int) -> bytearray:
    """A payload as somebody makes it who wants to do harm."""
    start = codec.PREAMBLE.size + len(skeleton)
    says = {"magic": codec.MAGIC, "version": codec.VERSION, "raw": raw, "length": len(skeleton)}
    says |= {"code": codec.LEAF_CODE, "nbytes": start + tail}
    return bytearray(codec.PREAMBLE.pack(*(says | lies).values()) + skeleton + bytes(tail))


def leaf(kind: bytes, name: bytes, *shape: int) -> bytes:
    return struct.pack(f"<cB{len(name)}s{len(shape)}Q", kind, len(name), name, *shape)


def extension(*leaves: bytes) -> bytes:
    return msgpack.encode([msgpack.Ext(codec.LEAF_CODE, data) for data in leaves])


ADDRESSED = {
    "nothing": (bytearray(), "0 bytes, fewer than"),
    "short": (bytearray(b"KVFP"), "4 bytes, fewer than"),
    "magic": (whole(b"\xc0", magic=b"KVFQ"), "begins with b'KVFQ'"),
    "version": (whole(b"\xc0", version=2), "version 2 and form 0, this kvferry reads version 1"),
    "form": (whole(b"\xc0", raw=2), "form 2"),
    "header past the memory": (whole(b"\xc0", length=1 << 20), "a header of"),
    "header past the payload": (whole(b"\xc0", tail=99, length=20, nbytes=40), "a header of"),
    "long header": (whole(b"\xc0", length=codec.HEADER_MAX), "a header of .*object_bytes"),
    "payload past the memory": (whole(b"\xc0", nbytes=1 << 62), "in all"),
    "empty skeleton": (whole(b""), "DecodeError"),
    "not msgpack": (whole(b"\xc1"), "DecodeError"),
    "more than one object": (whole(b"\xc0\xc0"), "DecodeError"),
    "not UTF-8": (whole(b"\xa1\xff"), "DecodeError|Unicode"),
    "list of 2^32": (whole(b"\xdd\xff\xff\xff\xff"), "DecodeError"),
    "depth": (whole(b"\x91" * 100_000), "RecursionError"),
    "depth of what is restored": (whole(b"\x92\xa6images" * 3_000 + b"\xc0"), "RecursionError"),
    "bytes that nobody names": (whole(b"\xc0", tail=1), "buffers end at byte"),
    "bytes that no raw payload names": (whole(leaf(b"B", b"B", 1), tail=99, raw=1), "buffers end at byte"),
    "leaf without a name": (whole(extension(b"T")), "a leaf of 1 bytes"),
    "leaf with half a dimension": (whole(extension(leaf(b"T", b"bool", 1)[:-1])), "a leaf of"),
    "name past the leaf": (whole(extension(b"T\x0cbool")), "with a name of 12"),
    "65 dimensions": (whole(extension(leaf(b"T", b"bool", *[1] * 65)), 99), "a leaf of"),
    "65 dimensions of an array": (whole(extension(leaf(b"N", b"|u1", *[1] * 65)), 99), "a leaf of"),
    "kind": (whole(extension(leaf(b"Z", b"bool"))), "a leaf of kind b'Z'"),
    "dtype": (whole(extension(leaf(b"T", b"load", 1)), 99), "a tensor of 'load'"),
    "dtype of objects": (whole(extension(leaf(b"N", b"|O", 1)), 99), "an array of '|O'"),
    "dtype of structures": (whole(extension(leaf(b"N", b"i4,O", 1)), 99), "an array of 'i4,O'"),
    "dtype of many bytes": (whole(extension(leaf(b"N", b"<U999999999", 1)), 99), "Error|items of"),
    "past the end": (whole(extension(leaf(b"T", b"int64", 9)), 64), "9 items of 8 bytes from byte 64 on"),
    "past every end": (whole(extension(leaf(b"T", b"int64", 1 << 63, 1 << 63)), 64), "items of 8 bytes"),
    "product that wraps": (whole(extension(leaf(b"T", b"uint8", 1 << 32, 1 << 32)), 64), "items of 1 bytes"),
    "nothing of a lot": (whole(extension(leaf(b"T", b"int64", 0, 1 << 63, 1 << 63)), 64), "Error"),
    "an array of nothing of a lot": (whole(extension(leaf(b"N", b"<i8", 0, 1 << 63)), 64), "Error"),
    "twice the same bytes": (whole(extension(*[leaf(b"T", b"uint8", 64)] * 2), 100), "64 items of 1 bytes"),
    "image": (whole(extension(leaf(b"P", b"RGBA", 2, 2, 3)), 99), "Error"),
    "mode": (whole(extension(leaf(b"P", b"XYZ", 2, 2)), 99), "Error"),
    "format": (whole(leaf(b"M", b"QQ", 1), 99, raw=1), "kind b'M' and name 'QQ'"),
    "raw kind": (whole(leaf(b"N", b"<i8", 1), 99, raw=1), "kind b'N'"),
    "tensor as a dict": (
        whole(msgpack.encode({"__tensor__": True, "dtype": "float32", "shape": [1 << 40], "data": b""})),
        "a tensor of 'float32'",
    ),
    "negative shape as a dict": (
        whole(msgpack.encode({"__tensor__": True, "dtype": "uint8", "shape": [-1, -1], "data": b"1"})),
        "a tensor of 'uint8'",
    ),
    "dtype as a dict": (
        whole(msgpack.encode({"__tensor__": True, "dtype": "load", "shape": [1], "data": b"1"})),
        "a tensor of 'load'",
    ),
    "half a tensor as a dict": (whole(msgpack.encode({"__tensor__": True})), "KeyError"),
    "half a request": (
        whole(msgpack.encode({"index": 0, "text": 0, "token_ids": 0, "finish_reason": 0})),
        "ValidationError",
    ),
}


@pytest.mark.parametrize("case", ADDRESSED)
def test_a_lie_is_one_clear_error(case):
    memory, says = ADDRESSED[case]
    with pytest.raises(codec.PayloadError, match=f"damaged payload: .*({says})"):
        codec.decode(memory)


@pytest.mark.parametrize(
    "obj",
    [
        {"__tensor__": True, "dtype": "int16", "shape": [2, 1], "data": b"1234"},
        {"__tensor__": True, "dtype": "int16", "shape": [0], "data": b""},
        {"__ndarray__": True, "dtype": "<i2", "shape": [2, 1], "data": b"1234"},
        {"__pil_image__": True, "mode": "L", "shape": [2, 2], "data": b"1234"},
        {"finished": True, "final_output_type": "text"},
        {"finished": True, "images": []},
        {"finished": True, "image": []},
        {"index": 0, "text": "", "token_ids": [], "cumulative_logprob": None, "logprobs": None, "finish_reason": None},
        # Not only its memory.
        {"a": np.ma.masked_array([1, 2, 3], mask=[0, 1, 0])},
        {"a": np.arange(4, dtype=np.int8).view(np.memmap)},
        {"a": msgpack.Ext(3, b"data"), "b": torch.tensor(1)},
        {(1, "a"): {b"b": 1}},
    ],
    ids=str,
)
def test_what_the_serializer_makes_of_more_is_made_of_it(obj):
    assert same(there_and_back(obj), serialized(obj))


def of_mori(obj: Any) -> tuple[bytes, bool]:
    """What MoriTransferEngineConnector puts into its pool, and whether that is its fast path."""
    if isinstance(obj, torch.Tensor):
        return obj.contiguous().flatten().view(torch.uint8).numpy().tobytes(), True
    return (obj, True) if isinstance(obj, bytes) else (OmniSerializer.serialize(obj), False)


@pytest.mark.parametrize("seed", range(40))
def test_what_a_stage_with_moris_connector_gets_is_what_it_would_be_put(seed):
    obj = [b"bytes", torch.arange(6).view(2, 3).t(), bytearray(b"x"), anything(random.Random(seed))][min(seed, 3)]
    encoded = codec.encode_foreign(obj)
    memory = pool(encoded.nbytes + 5)
    encoded.write(memory)
    data, is_raw = of_mori(obj)
    _, _, form, length, _, nbytes = codec.PREAMBLE.unpack_from(memory.numpy())
    assert (form, length, nbytes) == (codec.FOREIGN_RAW if is_raw else codec.FOREIGN_SERIALIZED, 0, encoded.nbytes)
    assert memory[codec.ALIGNMENT : nbytes].numpy().tobytes() == data


@pytest.mark.parametrize("seed", range(40))
def test_what_a_stage_with_moris_connector_puts_is_what_it_would_get(seed):
    obj = anything(random.Random(seed))
    encoded = codec.encode_foreign(obj)
    memory = pool(encoded.nbytes)
    encoded.write(memory)
    raw = codec.decode_raw(memory)
    data, is_raw = of_mori(obj)
    if is_raw and data:
        assert raw.tensor.dtype == torch.uint8
        assert raw.tensor.numpy().tobytes() == data
        assert raw.tensor.data_ptr() == memory.data_ptr() + codec.ALIGNMENT
    else:
        assert raw is None
        assert same(codec.decode(memory), serialized(obj))


def test_what_is_empty_is_serialized():
    for obj in (b"", torch.empty(0, 3)):
        encoded = codec.encode_foreign(obj)
        memory = pool(encoded.nbytes)
        encoded.write(memory)
        assert same(codec.decode(memory), serialized(obj))


@pytest.mark.parametrize(("form", "length", "nbytes"), [(4, 0, 100), (2, 1, 100), (3, 0, 63), (2, 0, 63), (2, 0, 100)])
def test_a_damaged_payload_of_mori_is_said_to_be(form, length, nbytes):
    memory = pool(100)
    memory[: codec.PREAMBLE.size] = torch.frombuffer(
        bytearray(codec.PREAMBLE.pack(codec.MAGIC, codec.VERSION, form, length, 0, nbytes)), dtype=torch.uint8
    )
    with pytest.raises(codec.PayloadError):
        codec.decode(memory)
