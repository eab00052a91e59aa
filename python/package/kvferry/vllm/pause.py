"""Pause of an engine core whose requests all wait for KV. It ends with news of the host or a message of a client."""

import sys

from vllm.v1.engine import EngineCoreOutputs

from kvferry.log import logger_of

logger = logger_of(__name__)

# Longest time until a message of a client ends a pause.
LOOK_S = 0.002

# Attributes of an engine core that a pause needs.
PARTS = ("input_queue", "output_queue", "batch_queue", "scheduler")


class Pause:
    """Holds a step without tokens back before it goes to the workers. vLLM makes such steps one after the other while
    KV is on its way, and a worker of vLLM spins for a second after each.

    vLLM has no public interface that tells a connector of arriving messages. The engine core keeps them in its
    `input_queue`. If the engine core has none, as in a process that has no server, steps are not held back.
    """

    def __init__(self, vllm_config):
        # The ranks of a DP group step together, and other connectors of a MultiConnector count steps.
        is_alone = vllm_config.parallel_config.data_parallel_size == 1
        self._is_possible = is_alone and vllm_config.kv_transfer_config.kv_connector == "KvferryConnector"
        self._engine = None

    def hold(self, output, halves) -> bool:
        """Returns when a half has heard news, or a message of a client is there. False if the step is due at once."""
        if not self._can_hold(output, halves):
            return False
        # The metrics that the step would have sent.
        if (stats := self._engine.scheduler.make_stats()) is not None:
            self._engine.output_queue.put_nowait((0, EngineCoreOutputs(scheduler_stats=stats)))
        patience = LOOK_S / len(halves)
        while self._engine.input_queue.empty():
            if any([half.hears(patience) for half in halves]):
                break
        return True

    def _can_hold(self, output, halves) -> bool:
        """True if the step has nothing for the workers, and all unfinished requests wait for news of a host."""
        if not self._is_possible or output.total_num_scheduled_tokens:
            return False
        if output.finished_req_ids or output.preempted_req_ids or any(half.has_orders() for half in halves):
            return False
        waiting = sum(half.waiting() for half in halves)
        if not waiting and not any(half.held or half.leased for half in halves):
            return False
        if self._engine is None:
            self._engine = _engine_core()
        if self._engine is None:
            logger.warning("vLLM's engine core has none of %s: it steps while KV is on its way", ", ".join(PARTS))
            self._is_possible = False
            return False
        counts = self._engine.scheduler.get_request_counts()
        return not self._engine.batch_queue and counts == (0, waiting)


def _engine_core():
    """Returns the engine core whose step called the hook, or None."""
    frame = sys._getframe()
    while frame is not None:
        owner = frame.f_locals.get("self")
        if all(hasattr(owner, part) for part in PARTS):
            return owner
        frame = frame.f_back
    return None
