"""What becomes of payloads, and how often."""

import threading
from collections import Counter, OrderedDict
from typing import Any

from kvferry.omni.keys import PayloadKey

# What `health` counts, by the kinds of the host and by ours.
OUTCOMES = {
    "ended": "unknown",
    "taken": "unknown",
    "cleaned-up": "unknown",
    "superseded": "unknown",
    "unknown": "unknown",
    "given-up": "peer_down",
    "producer-gone": "peer_down",
    "host-gone": "peer_down",
    "peer-gone": "peer_down",
    "not-moved": "peer_down",
    "expired": "timeout",
    "host-silent": "timeout",
    "pool-full": "pool_full",
    "too-long": "pool_full",
    "overload": "pool_full",
    "corrupt": "corrupt",
    "unencodable": "corrupt",
    "bad-key": "unknown",
    "closed": "closed",
}

# Keys and streams that are remembered; of what is beyond them the oldest are forgotten.
REMEMBERED_MAX = 65_536


class PayloadLost(RuntimeError):
    """A payload that does not come."""

    def __init__(self, key: PayloadKey, kind: str, why: str):
        super().__init__(f"{key} is lost ({kind}): {why}")
        self.key = key
        self.kind = kind
        self.why = why

    def __reduce__(self):
        return PayloadLost, (self.key, self.kind, self.why)


class OutcomeCounts:
    """Of one connector."""

    def __init__(self):
        self._lock = threading.Lock()
        self.done: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        # Polls of what is not there. Threads may lose some of each other's.
        self.not_ready = 0
        self.last_error: str | None = None

    def moved(self, what: str, nbytes: int) -> None:
        with self._lock:
            self.done[what] += 1
            self.done["bytes"] += nbytes

    def failed(self, kind: str, error: str) -> None:
        with self._lock:
            self.failures[kind] += 1
            self.last_error = error

    def health(self) -> dict[str, Any]:
        with self._lock:
            outcomes = Counter({name: 0 for name in OUTCOMES.values()})
            outcomes["not_ready"] = self.not_ready
            for kind, count in self.failures.items():
                outcomes[OUTCOMES.get(kind, "unknown")] += count
            return {
                "puts": self.done["puts"],
                "gets": self.done["gets"],
                "bytes_transferred": self.done["bytes"],
                "outcomes": dict(outcomes),
                "failures": dict(self.failures),
                "last_error": self.last_error,
            }


class Remembered(OrderedDict):
    """The last entries."""

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        if len(self) > REMEMBERED_MAX:
            self.popitem(last=False)
