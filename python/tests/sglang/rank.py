"""One rank of a server of SGLang without a model, as a process of its own: its connection classes, as they
are, over kvferry's module `mori`, and the memory that they move."""

import contextlib
import multiprocessing
import os
import traceback
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np

LAYERS, PAGES, PAGE, HEADS, WIDTH = 3, 64, 16, 4, 32
AUX_LENS = [4, 64, 1000]
SLOTS = 16
# Of a state that is cut along its first axis, and of one page of a sliding window.
STATE_DIM, STATE_WIDTH, WINDOW_LEN = 8, 24, 96
FILLER = 0xA5


class Content:
    """What the whole model has of a request, from the number of its room."""

    def __init__(self, room: int, pages: int):
        random = np.random.default_rng(room)

        def some(*shape: int) -> np.ndarray:
            return random.integers(0, 256, shape, dtype=np.uint8)

        # Keys of all layers, then values.
        self.kv = some(2 * LAYERS, pages, PAGE, HEADS, WIDTH)
        self.aux = [some(length) for length in AUX_LENS]
        self.mamba = some(LAYERS, STATE_DIM, STATE_WIDTH)
        self.window = some(LAYERS, pages, WINDOW_LEN)


class Memory:
    """The part of a rank, filled with what no request has. "mla" is no state: each rank has the same KV
    then, one head that is no key and no value."""

    def __init__(self, tp_size: int, tp_rank: int, states: Sequence[str]):
        def buffers(count: int, *shape: int) -> list[np.ndarray]:
            return [np.full(shape, FILLER, np.uint8) for _ in range(count)]

        heads, rows = HEADS // tp_size, STATE_DIM // tp_size
        self.heads = slice(tp_rank * heads, (tp_rank + 1) * heads)
        self.rows = slice(tp_rank * rows, (tp_rank + 1) * rows)
        self.is_mla = "mla" in states
        if self.is_mla:
            self.heads, heads = slice(0, 1), 1
        self.kv = buffers(LAYERS if self.is_mla else 2 * LAYERS, PAGES, PAGE, heads, WIDTH)
        self.aux = [np.full((SLOTS, length), FILLER, np.uint8) for length in AUX_LENS]
        shapes = {"mamba": (SLOTS, rows, STATE_WIDTH), "swa": (PAGES, WINDOW_LEN)}
        self.states = {name: buffers(LAYERS, *shapes[name]) for name in states if name != "mla"}

    def put(self, content: Content, pages: list[int], slot: int) -> None:
        for buffer, of_model in zip(self.kv, content.kv, strict=not self.is_mla):
            buffer[pages] = of_model[:, :, self.heads]
        for buffer, of_model in zip(self.aux, content.aux, strict=True):
            buffer[slot] = of_model
        for nth in range(LAYERS):
            if "mamba" in self.states:
                self.states["mamba"][nth][slot] = content.mamba[nth][self.rows]
            if "swa" in self.states:
                self.states["swa"][nth][pages] = content.window[nth]

    def all(self) -> list[np.ndarray]:
        return [*self.kv, *self.aux, *(buffer for state in self.states.values() for buffer in state)]


class Rank:
    """Calls the rank in its process."""

    def __init__(self, pipe: Any, process: Any, port: int):
        self.pipe, self.process, self.port = pipe, process, port

    def begin(self, method: str, *args: Any) -> None:
        self.pipe.send((method, args))

    def finish(self) -> Any:
        error, result = self.pipe.recv()
        if error is not None:
            raise RuntimeError(error)
        return result

    def __getattr__(self, method: str) -> Any:
        def call(*args: Any) -> Any:
            self.begin(method, *args)
            return self.finish()

        return call

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


@contextlib.contextmanager
def rank(
    role: str, port: int, tp: tuple[int, int] = (0, 1), states: Sequence[str] = (), **env: str
) -> Iterator[Rank]:
    """A rank, by its number and the width; `port` is that of the prefill's bootstrap server."""
    context = multiprocessing.get_context("spawn")
    pipe, its = context.Pipe()
    process = context.Process(target=_serve, args=(its, role, port, tp, states), daemon=True)
    # Nothing leaves this machine, and decode sees soon that its prefill is gone.
    here = {"SGLANG_HOST_IP": "127.0.0.1", "SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL": "2"}
    with mock.patch.dict(os.environ, here | env):
        process.start()
    its.close()
    made = Rank(pipe, process, port)
    try:
        yield made
    finally:
        made.kill()


def start(prefills: list[Rank], decodes: list[Rank]) -> None:
    """The imports at the same time; then as servers start, the bootstrap server beside the first rank."""
    for one in prefills + decodes:
        one.begin("load")
    for one in prefills + decodes:
        one.finish()
    for one in prefills[:1]:
        one.bootstrap()
    for one in prefills + decodes:
        one.start()


def _serve(pipe: Any, *config: Any) -> None:
    served = Served(*config)
    while True:
        try:
            method, args = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((None, getattr(served, method)(*args)))
        except Exception:
            pipe.send((traceback.format_exc(), None))


class Served:
    """What `Rank` calls."""

    def __init__(self, role: str, port: int, tp: tuple[int, int], states: Sequence[str]):
        self.role, self.port, (self.tp_rank, self.tp_size) = role, port, tp
        self.memory = Memory(self.tp_size, self.tp_rank, states)
        self.expected = Memory(self.tp_size, self.tp_rank, states)
        self.requests: dict[int, SimpleNamespace] = {}

    def load(self) -> None:
        """Takes as long as all imports."""
        from sglang.srt.disaggregation.utils import KVClassType, TransferBackend, get_kv_class
        from sglang.srt.runtime_context import SpawnRanks, get_parallel, publish
        from sglang.srt.server_args import ServerArgs

        self.args = ServerArgs(
            model_path="dummy",
            device="cpu",
            host="127.0.0.1",
            tp_size=self.tp_size,
            disaggregation_mode=self.role,
            disaggregation_bootstrap_port=self.port,
            disaggregation_transfer_backend="mori",
            # Threads of a manager that is torn down end only with it.
            enable_pd_role_switch=True,
        )
        publish(self.args, role="scheduler", ranks=SpawnRanks(world_rank=self.tp_rank, gpu_id=0))
        # Of process groups, which nobody builds here, its connection classes ask only this.
        get_parallel().override_permanently(pp_group=SimpleNamespace(is_last_rank=True))
        self.classes = {
            kind: get_kv_class(TransferBackend.MORI, KVClassType(kind))
            for kind in ("kvargs", "manager", "sender", "receiver", "bootstrap_server")
        }

    def bootstrap(self) -> None:
        self.server = self.classes["bootstrap_server"]("127.0.0.1", self.port)

    def start(self) -> None:
        from sglang.srt.disaggregation.utils import DisaggregationMode

        mode, is_mla = DisaggregationMode(self.role), self.memory.is_mla
        self.manager = self.classes["manager"](self._kv_args(), mode, self.args, is_mla)

    def _kv_args(self) -> Any:
        from sglang.srt.disaggregation.base.conn import StateType

        def pointers(buffers: list[np.ndarray]) -> list[int]:
            return [buffer.ctypes.data for buffer in buffers]

        def lens(buffers: list[np.ndarray]) -> list[int]:
            return [buffer.nbytes for buffer in buffers]

        def items(buffers: list[np.ndarray]) -> list[int]:
            return [buffer[0].nbytes for buffer in buffers]

        kv, aux, states = self.memory.kv, self.memory.aux, self.memory.states
        args = self.classes["kvargs"]()
        args.engine_rank = self.tp_rank
        args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens = pointers(kv), lens(kv), items(kv)
        args.aux_data_ptrs, args.aux_data_lens, args.aux_item_lens = pointers(aux), lens(aux), items(aux)
        args.kv_layer_ids, args.kv_cache_dtype_str = [], "uint8"
        args.state_types = [StateType(name) for name in states]
        args.state_data_ptrs = [pointers(state) for state in states.values()]
        args.state_data_lens = [lens(state) for state in states.values()]
        args.state_item_lens = [items(state) for state in states.values()]
        args.state_layer_ids = [[] for _ in states]
        rows = {"mamba": STATE_DIM // self.tp_size}
        args.state_dim_per_tensor = [[rows.get(name, 0)] * LAYERS for name in states]
        args.state_slice_outer_counts = [[1] * LAYERS for _ in states]
        args.state_conv_shard_groups = [[None] * LAYERS for _ in states]
        args.is_hybrid_mla_backend, args.ib_device, args.gpu_id = False, "", 0
        args.kv_head_num, args.total_kv_head_num, args.page_size = HEADS // self.tp_size, HEADS, PAGE
        args.system_dp_rank = args.pp_rank = args.prefill_start_layer = 0
        return args

    def _state_indices(self, pages: list[int], slot: int) -> list[Any] | None:
        indices = {"mamba": [slot], "swa": pages}
        return [np.array(indices[name], np.int32) for name in self.memory.states] or None

    def offer(self, room: int, pages: list[int], slot: int) -> None:
        """A request that this prefill has computed."""
        self.memory.put(Content(room, len(pages)), pages, slot)
        sender = self.classes["sender"](self.manager, f"127.0.0.1:{self.port}", room)
        sender.init(len(pages), slot)
        self.requests[room] = SimpleNamespace(end=sender, pages=pages, slot=slot)

    def send(self, room: int, start: int = 0, end: int | None = None) -> None:
        """Some of its pages; the state goes with the last ones."""
        request = self.requests[room]
        states = self._state_indices(request.pages, request.slot)
        request.end.send(np.array(request.pages[start:end], np.int32), states)

    def want(self, room: int, pages: list[int], slot: int) -> None:
        """A request whose pages this decode has allocated."""
        receiver = self.classes["receiver"](self.manager, f"127.0.0.1:{self.port}", room)
        receiver.init(0)
        self.requests[room] = SimpleNamespace(end=receiver, pages=pages, slot=slot)

    def tell(self, room: int) -> None:
        """Tells the prefill where they are."""
        request = self.requests[room]
        states = self._state_indices(request.pages, request.slot)
        request.end.send_metadata(np.array(request.pages, np.int32), request.slot, states)
        self.expected.put(Content(room, len(request.pages)), request.pages, request.slot)

    def knows_prefill(self) -> bool:
        return self.manager.try_ensure_parallel_info(f"127.0.0.1:{self.port}")

    def poll(self, room: int) -> int:
        return self.requests[room].end.poll()

    def why(self, room: int) -> str:
        """What a failed request raises."""
        try:
            self.requests[room].end.failure_exception()
        except Exception as error:
            return str(error)
        return ""

    def clear(self, room: int) -> None:
        self.requests.pop(room).end.clear()

    def abort(self, room: int) -> None:
        self.requests[room].end.abort()

    def may_reuse(self, room: int) -> bool:
        """Whether all prefill ranks said that nothing of an aborted request lands any more."""
        return self.manager.is_abort_release_safe(room, 1)

    def is_exact(self) -> bool:
        """Whether all memory has what was asked for, and nothing else."""
        pairs = zip(self.memory.all(), self.expected.all(), strict=True)
        return all(np.array_equal(have, wanted) for have, wanted in pairs)

    def image(self) -> bytes:
        return b"".join(buffer.tobytes() for buffer in self.memory.all())

    def tear_down(self) -> None:
        self.manager.teardown()
