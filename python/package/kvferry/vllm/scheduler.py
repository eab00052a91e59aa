"""The half in the engine core: forwards the scheduler's hooks to the host and applies its answers."""

import json
import time
from collections import deque
from dataclasses import dataclass, field

from vllm.v1.request import RequestStatus

from kvferry._native import Link
from kvferry.line import guarded, nothing
from kvferry.log import logger_of
from kvferry.vllm.engine import STILL_S, connect, describe, line, place, reads_on
from kvferry.vllm.prompt import names_media, prompt_hash
from kvferry.vllm.stats import KvferryStats

logger = logger_of(__name__)

# Clocks differ.
LEASE_MARGIN_S = 1.0

# Wait for news at the end of a step without tokens that no pause held back: vLLM makes such steps one after
# the other while KV is under way, at the expense of who computes it, and sleeps for 1 ms after each. A request
# that arrives meanwhile waits, too.
IDLE_S = 0.002

# A load waits for blocks until its prefill is ready, unless all but this part of them are free: it takes a
# step of the engine less, and what waits in blocks for long leaves enough of them to others.
EARLY = 1 / 8

# Longest `kv_transfer_params`, in bytes of JSON: a quarter of the longest message to a host, with room for the blocks
# of two million tokens.
PARAMS_MAX = 16 << 20

# Within which a host says that the start has taken too long.
REFUSAL_S = 10.0

REASONS = {
    RequestStatus.FINISHED_STOPPED: "stop",
    RequestStatus.FINISHED_LENGTH_CAPPED: "length",
    RequestStatus.FINISHED_ABORTED: "abort",
}


@dataclass
class Leg:
    """A request that is handed over or taken over."""

    tokens: int
    # Prefill: its `kv_transfer_params`, in JSON.
    params: str = ""
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
        at = place(vllm_config)
        engine = describe(vllm_config, kv_cache_config, at.drafts)

        ports, last = {}, {}

        def make() -> Link:
            # Peers know the next host by the ports of the last one, if it can have them, and by its
            # later incarnation, whatever the clock says.
            settings = json.dumps(json.loads(at.settings) | ports)
            described = json.dumps(json.loads(engine) | last)
            link = connect(at, lambda path: Link.scheduler(path, described, settings))
            try:
                # The host says before what is late.
                link.wait_ready(at.start_s + REFUSAL_S)
            except ValueError:
                ports.clear()
                raise
            ports.update(link.ports)
            last["last_life"] = link.incarnation
            return link

        self.has_names = names_media(vllm_config)
        self.line = line(make, self._give_up)
        lease_s = self.line.link.lease_s
        self.lease_s = lease_s + LEASE_MARGIN_S if lease_s else 0.0
        self.groups = len(kv_cache_config.kv_cache_groups)
        self.block_tokens = [it.kv_cache_spec.block_size for it in kv_cache_config.kv_cache_groups]
        # Of vLLM, when it has bound it.
        self.blocks = None
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
        # Those that the workers are to answer for, which vLLM then tells of.
        self.told: set[str] = set()
        # The lost host, for workers with a transfer actor that it told its jobs.
        self.lost_host = 0
        # Requests whose blocks others may read for a while though the host is gone, and until when.
        self.leased: deque[tuple[float, set[str]]] = deque()
        self.steps = 0
        # The step computes nothing, and does not come after a pause.
        self.idle = False
        # Transfers that failed with a host that is gone, and were not counted.
        self.lost = 0
        # Blocks held and in quarantine, as last told.
        self.kept = (0, 0)

    @guarded(nothing)
    def arrived(self, request) -> None:
        params = request.kv_transfer_params
        wanted = "do_remote_decode" if self.produces else "do_remote_prefill"
        # The answer of a prefill of ours, which whoever asked it sent on.
        if not params or not (params.get(wanted) or params.get("kvferry")):
            return
        params = json.dumps(params)
        # Before there is the leg: the next host knows nothing of those that there are.
        link = self.line.current()
        leg = Leg(request.num_prompt_tokens, params if self.produces else "")
        self.legs[request.request_id] = leg
        if is_too_long := len(params) > PARAMS_MAX:
            logger.warning(
                "%s: kv_transfer_params of %d bytes, of which it can have %d: it goes without a transfer",
                request.request_id,
                len(params),
                PARAMS_MAX,
            )
        if link is None or is_too_long:
            # It is not handed over, and what it was to load has failed.
            leg.over = leg.may_allocate = True
            return
        self._tell("arrived", request.request_id, params, leg.tokens, prompt_hash(request, self.has_names))

    @guarded(lambda *_: (0, False))
    def matched(self, request, computed: int) -> tuple[int | None, bool]:
        leg = self.legs.get(request.request_id)
        if self.produces or leg is None or leg.allocated:
            return 0, False
        sampling = request.sampling_params
        if sampling is not None and sampling.prompt_logprobs is not None:
            # They come of computing the prompt.
            return 0, False
        external = leg.tokens - computed
        if not leg.may_allocate and not self._are_free(external):
            return None, False
        return (external, True) if external > 0 else (0, False)

    def _are_free(self, tokens: int) -> bool:
        """Whether so many tokens leave most blocks free."""
        if self.blocks is None:
            return False
        taken = sum(-(-tokens // each) for each in self.block_tokens)
        all_, free = self.blocks.num_gpu_blocks, self.blocks.get_num_free_blocks()
        return free - taken >= all_ * (1 - EARLY)

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

    @guarded(lambda self, *_: (None, 0, [], [], [], [], self.lost_host))
    def step(
        self, output, held_back: bool = False
    ) -> tuple[int | None, int, list[str], list[str], list[str], list[str], int]:
        """What the workers are told: number of the step if the host is told of it, and tokens of prompts
        that it computes; preempted and failed requests, ended ones whose loads are over or whose blocks are
        free, and the host that was lost. `held_back` if it comes after a pause."""
        preempted = []
        self._wait_until_free(self.held.intersection(output.preempted_req_ids or ()))
        for request in output.preempted_req_ids or ():
            leg = self.legs.get(request)
            if self.produces and leg is not None and not leg.over:
                leg.blocks.clear()
                self._tell("preempted", request)
                preempted.append(request)
        step, tokens = None, 0
        if chunks := self._chunks(output) if self.produces else []:
            self.steps += 1
            step = self.steps
            tokens = sum(to - begin for _, begin, to, _ in chunks)
            self._tell("scheduled", step, chunks)
        self._hear()
        self.idle = not output.total_num_scheduled_tokens and not held_back
        failed, self.failed = list(self.failed), set()
        over, self.over = list(self.over), set()
        self.told.update(failed, over)
        freed, self.free = list(self.free), set()
        return step, tokens, preempted, failed, over, freed, self.lost_host

    def waiting(self) -> int:
        """Returns the number of unfinished requests that cannot go on before news of the host."""
        if self.produces:
            return 0
        return sum(
            not leg.ended and (leg.loading or not (leg.allocated or leg.may_allocate))
            for leg in self.legs.values()
        )

    def has_orders(self) -> bool:
        """True if the next step has something to tell the workers or vLLM."""
        return bool(self.failed or self.over or self.free or self.loaded)

    @guarded(lambda *_: True)
    def hears(self, patience: float) -> bool:
        """Waits for news of the host, at most `patience` seconds. True if there were some."""
        lost = self.lost_host
        if self.line.current() is None:
            time.sleep(patience)
        return self._hear(patience) or self.has_orders() or self.lost_host != lost

    def _wait_until_free(self, requests: set[str]) -> None:
        """Of requests that were preempted, which freed their blocks, and ended before this step."""
        deadline = time.monotonic() + STILL_S
        while (waited := requests & self.held) and self.line.link is not None:
            if (left := deadline - time.monotonic()) > 0:
                self._hear(left)
            else:
                self.line.lost(reads_on(waited))

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
        try:
            return True, json.loads(self.line.link.answer(request.request_id, leg.params, blocks))
        except ValueError as why:
            # Nobody fetches it, and the host is about to say so.
            logger.warning("%s: nothing is answered for who is to fetch it: %s", request.request_id, why)
            return True, None

    @guarded(nothing)
    def deliver(self, output) -> None:
        """Adds what the host loaded to what vLLM is about to apply, which has requests of others, too."""
        waits = self.idle and (self.legs or self.held) and not (self.free or self.loaded)
        self._hear(IDLE_S if waits else 0.0)
        if self.loaded or output.finished_recving:
            ended = (output.finished_recving or set()) | self.loaded
            output.finished_recving = ended - (ended & (self.told | self.loaded) - self.awaited)
            self.awaited -= ended
            self.told -= ended
            self.loaded = set()

    @guarded(nothing)
    def stats(self) -> KvferryStats | None:
        """What was heard of transfers since the last time."""
        told = self.line.link.stats() if self.line.link is not None else None
        if told is None and not self.lost:
            return None
        stats = KvferryStats()
        if told is not None:
            ended, kept = told
            stats.add(ended)
            self.kept = kept or self.kept
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

    def _hear(self, patience: float = 0.0) -> bool:
        """Applies what the host says. True if that was something."""
        while self.leased and self.leased[0][0] <= time.monotonic():
            self.free |= self.leased.popleft()[1]
        if (link := self.line.current()) is None:
            return False
        try:
            events = link.wait(patience) if patience else link.poll()
        except ConnectionError as error:
            self.line.lost(error)
            return False
        for kind, request, why in events:
            self._apply(kind, request, why)
        return bool(events)

    def _apply(self, kind: str, request: str, why: tuple[str, str] | None) -> None:
        leg = self.legs.get(request)
        if leg is None or leg.ended:
            # vLLM ended the request: no answer is left that could tell it.
            self._told(request)
        if why is not None and (leg is not None or request in self.held):
            level, why = why
            getattr(logger, level)("%s: %s: %s", request or "engine", kind.replace("_", " "), why)
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
