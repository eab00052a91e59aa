"""The half in the engine core: forwards the scheduler's hooks to the host and applies its answers."""

import json
import time
from collections import deque
from dataclasses import dataclass, field

from vllm.v1.request import RequestStatus

from kvferry._native import Link
from kvferry.line import Line, guarded, nothing
from kvferry.log import logger_of
from kvferry.start import START_S
from kvferry.vllm.engine import connect, describe, place
from kvferry.vllm.stats import KvferryStats

logger = logger_of(__name__)

# Clocks differ.
LEASE_MARGIN_S = 1.0

# Wait for news in a step without tokens: vLLM makes such steps one after the other while KV is under
# way, at the expense of who computes it.
IDLE_S = 0.001

REASONS = {
    RequestStatus.FINISHED_STOPPED: "stop",
    RequestStatus.FINISHED_LENGTH_CAPPED: "length",
    RequestStatus.FINISHED_ABORTED: "abort",
}


@dataclass
class Leg:
    """A request that is handed over or taken over."""

    transfer: str
    tokens: int
    # Decode: blocks may be allocated, or there will be nothing to load.
    may_allocate: bool = False
    # Decode: blocks were allocated, once.
    allocated: bool = False
    # Decode: an answer is due for the allocated blocks.
    loading: bool = False
    # The host knows nothing of it any more.
    over: bool = False
    # vLLM ended the request and keeps its blocks until the load is over.
    ended: bool = False
    # Prefill: blocks of each group that the host was told.
    blocks: list[int] = field(default_factory=list)


def _not_loaded(self, request, _, external: int) -> None:
    """Who waits for blocks that were allocated is told that nothing comes."""
    if external > 0:
        self.awaited.add(request.request_id)
        self.failed.add(request.request_id)


def _kept(self, request, _) -> tuple[bool, None]:
    """Others may still read a prefill's blocks."""
    if not self.produces:
        return False, None
    self.leased.append((time.monotonic() + self.lease_s, {request.request_id}))
    return True, None


class Scheduler:
    def __init__(self, vllm_config, kv_cache_config):
        self.produces = vllm_config.kv_transfer_config.is_kv_producer
        engine = describe(vllm_config, kv_cache_config)
        at = place(vllm_config)

        ports, last = {}, {}

        def make() -> Link:
            # Peers know the next host by the ports of the last one, if it can have them, and by its
            # later incarnation, whatever the clock says.
            settings = json.dumps(json.loads(at.settings) | ports)
            described = json.dumps(json.loads(engine) | last)
            link = connect(at, lambda path: Link.scheduler(path, described, settings))
            try:
                link.wait_ready(START_S)
            except ValueError:
                ports.clear()
                raise
            ports.update(link.ports)
            last["last_life"] = link.incarnation
            return link

        link = make()
        self.lease_s = link.lease_s + LEASE_MARGIN_S if link.lease_s else 0.0
        self.line = Line(link, make, self._give_up)
        self.groups = len(kv_cache_config.kv_cache_groups)
        self.legs: dict[str, Leg] = {}
        # Finished requests whose blocks the host holds.
        self.held: set[str] = set()
        self.free: set[str] = set()
        # Requests that vLLM waits for; it ends when it hears of another one.
        self.awaited: set[str] = set()
        self.loaded: set[str] = set()
        self.failed: set[str] = set()
        # Requests that vLLM had ended when the host was lost that loaded them.
        self.over: set[str] = set()
        # The lost host, for workers with a transfer actor that it told its jobs.
        self.lost_host = 0
        # Requests whose blocks others may read for a while though the host is gone, and until when.
        self.leased: deque[tuple[float, set[str]]] = deque()
        self.steps = 0
        # Transfers that failed with a host that is gone, and were not counted.
        self.lost = 0

    @guarded(nothing)
    def arrived(self, request) -> None:
        params = request.kv_transfer_params
        wanted = "do_remote_decode" if self.produces else "do_remote_prefill"
        if not params or not params.get(wanted):
            return
        # Before there is the leg: the next host knows nothing of those that there are.
        link = self.line.current()
        leg = Leg(str(params.get("transfer_id") or ""), request.num_prompt_tokens)
        self.legs[request.request_id] = leg
        if link is None:
            # It is not handed over, and what it was to load has failed.
            leg.over = leg.may_allocate = True
            return
        self._tell("arrived", request.request_id, json.dumps(params), leg.tokens)

    @guarded(lambda *_: (0, False))
    def matched(self, request, computed: int) -> tuple[int | None, bool]:
        leg = self.legs.get(request.request_id)
        if self.produces or leg is None or leg.allocated:
            return 0, False
        sampling = request.sampling_params
        if sampling is not None and sampling.prompt_logprobs is not None:
            # They come of computing the prompt.
            return 0, False
        if not leg.may_allocate:
            return None, False
        external = leg.tokens - computed
        return (external, True) if external > 0 else (0, False)

    @guarded(_not_loaded)
    def allocated(self, request, blocks, external: int) -> None:
        leg = self.legs.get(request.request_id)
        if self.produces or leg is None or leg.allocated:
            return
        leg.allocated = True
        if external > 0:
            self.awaited.add(request.request_id)
        if leg.over:
            self.failed |= {request.request_id} & self.awaited
            return
        leg.loading = external > 0
        lists = [list(ids) for ids in blocks.get_block_ids()]
        self._tell("allocated", request.request_id, leg.tokens - external, lists)

    @guarded(lambda self, _: (None, [], [], [], self.lost_host))
    def step(self, output) -> tuple[int | None, list[str], list[str], list[str], int]:
        """What the workers are told: number of the step if the host is told of it, preempted and
        failed requests, ended ones whose loads are over, and the host that was lost."""
        preempted = []
        for request in output.preempted_req_ids or ():
            leg = self.legs.get(request)
            if self.produces and leg is not None and not leg.over:
                leg.blocks.clear()
                self._tell("preempted", request)
                preempted.append(request)
        step = None
        if chunks := self._chunks(output) if self.produces else []:
            self.steps += 1
            step = self.steps
            self._tell("scheduled", step, chunks)
        self._hear(0.0 if output.total_num_scheduled_tokens else IDLE_S)
        failed, self.failed = list(self.failed), set()
        over, self.over = list(self.over), set()
        return step, preempted, failed, over, self.lost_host

    def _chunks(self, output) -> list[tuple]:
        chunks = []
        for new in output.scheduled_new_reqs:
            self._chunk(chunks, output, new.req_id, new.num_computed_tokens, new.block_ids, True)
        cached = output.scheduled_cached_reqs
        for at, request in enumerate(cached.req_ids):
            fresh = request in cached.resumed_req_ids
            computed, added = cached.num_computed_tokens[at], cached.new_block_ids[at]
            self._chunk(chunks, output, request, computed, added, fresh)
        return chunks

    def _chunk(self, chunks, output, request: str, computed: int, added, fresh: bool) -> None:
        leg = self.legs.get(request)
        if leg is None or leg.over or computed >= leg.tokens:
            return
        begin = computed
        if fresh or not leg.blocks:
            leg.blocks = [0] * self.groups
            # Blocks of a prefix hit may be computed in this very step, by another request.
            begin = 0
        lists = []
        for group in range(self.groups):
            ids = list(added[group]) if added else []
            lists.append((leg.blocks[group], ids))
            leg.blocks[group] += len(ids)
        to = min(computed + output.num_scheduled_tokens[request], leg.tokens)
        chunks.append((request, begin, to, lists))

    @guarded(_kept)
    def finished(self, request, block_ids: tuple[list[int], ...]) -> tuple[bool, dict | None]:
        leg = self.legs.get(request.request_id)
        if leg is None:
            return False, None
        leg.ended = True
        if not leg.loading:
            del self.legs[request.request_id]
        if leg.over:
            return False, self._told(request.request_id)
        reason = REASONS.get(request.status, "error")
        self._tell("finished", request.request_id, reason)
        if not self.produces or self.line.link is None:
            return False, None
        self.held.add(request.request_id)
        if reason not in ("stop", "length"):
            return True, None
        blocks = [list(ids) for ids in block_ids]
        return True, json.loads(self.line.link.answer(leg.transfer, blocks))

    @guarded(nothing)
    def deliver(self, output) -> None:
        """Adds what the host freed and loaded to what vLLM is about to apply."""
        self._hear()
        if self.free:
            output.finished_sending = (output.finished_sending or set()) | self.free
            self.free = set()
        if self.loaded or output.finished_recving:
            ended = (output.finished_recving or set()) | self.loaded
            output.finished_recving = ended & self.awaited
            self.awaited -= ended
            self.loaded = set()

    @guarded(nothing)
    def stats(self) -> KvferryStats | None:
        """What was heard of transfers since the last time."""
        told = self.line.link.stats() if self.line.link is not None else None
        if told is None and not self.lost:
            return None
        stats = KvferryStats()
        if told is not None:
            stats.add(*told)
        stats.add_failures("host-lost", self.lost)
        self.lost = 0
        return stats

    def _told(self, request: str) -> dict | None:
        """What the answer tells the router of a transfer that failed."""
        told = self.line.link.told(request) if self.line.link is not None else None
        return json.loads(told) if told else None

    def _tell(self, what: str, *args) -> None:
        if self.line.link is None:
            return
        try:
            getattr(self.line.link, what)(*args)
        except ConnectionError as error:
            self.line.lost(error)

    def _hear(self, patience: float = 0.0) -> None:
        while self.leased and self.leased[0][0] <= time.monotonic():
            self.free |= self.leased.popleft()[1]
        if (link := self.line.current()) is None:
            return
        try:
            events = link.wait(patience) if patience else link.poll()
        except ConnectionError as error:
            self.line.lost(error)
            return
        for kind, request, why in events:
            self._apply(kind, request, why)

    def _apply(self, kind: str, request: str, why: str | None) -> None:
        leg = self.legs.get(request)
        if leg is None or leg.ended:
            # vLLM ended the request: no answer is left that could tell it.
            self._told(request)
        if why is not None and (leg is not None or request in self.held):
            logger.warning("%s: %s: %s", request or "engine", kind.replace("_", " "), why)
        if request in self.held and kind in ("source_free", "rejected"):
            self.held.remove(request)
            self.free.add(request)
        elif leg is None:
            return
        elif kind == "allocate":
            leg.may_allocate = True
        elif kind == "loaded":
            self._loaded(request, leg, self.loaded, self.loaded)
        elif kind in ("load_failed", "rejected"):
            leg.over = leg.may_allocate = True
            self._loaded(request, leg, self.failed, self.loaded)

    def _loaded(self, request: str, leg: Leg, into: set[str], ended: set[str]) -> None:
        """The one answer for allocated blocks: goes `into` a set, or among the `ended` ones."""
        if not leg.loading:
            return
        leg.loading = False
        if leg.ended:
            # Whether it was loaded matters no more; the blocks are free.
            del self.legs[request]
            into = ended
        into.add(request)

    def _give_up(self, link: Link) -> None:
        """Without a host nothing is handed over, and what it loads has failed: as soon as the workers
        know of it, for they may move KV for it. What it held is free when nobody reads it any more."""
        self.lost_host = link.incarnation
        if self.held:
            self.leased.append((time.monotonic() + self.lease_s, self.held))
            self.held = set()
        for request, leg in list(self.legs.items()):
            is_open = self.produces or leg.loading or not leg.allocated
            self.lost += is_open and not leg.over
            leg.over = leg.may_allocate = True
            self._loaded(request, leg, self.failed, self.over)
