"""What vLLM logs and exports of the transfers: sums and short lists, which the scheduler's half collects
and the API server takes."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from kvferry._native import answered
from kvferry.vllm.check import given

# A transfer that ended: how, for which cause, seconds until it began, seconds that it took, bytes
# that were moved meanwhile, by path, and at a decode what was spoken with the prefill.
Ended = tuple[str, str | None, float | None, float | None, list[tuple[str, int]], str | None]

OUTCOMES = ("done", "local", "failed")

# Seconds: from 0.1 ms up to about 100 s.
BUCKETS = [1e-4 * 2**power for power in range(21)]


def _add(sums: dict[str, int], more: dict[str, int]) -> None:
    for key, count in more.items():
        sums[key] = sums.get(key, 0) + count


@dataclass
class KvferryStats(KVConnectorStats):
    """Transfers that ended in an interval, and the blocks that the host keeps from reuse."""

    def __post_init__(self):
        if not self.data:
            self.reset()

    def reset(self) -> None:
        self.data: dict[str, Any] = {
            "outcomes": {},
            "failures": {},
            "bytes": {},
            "dialects": {},
            "queue": [],
            "duration": [],
            # None where nothing new is known.
            "held": None,
            "quarantined": None,
        }

    def add(self, ended: list[Ended]) -> None:
        """What the host told."""
        for outcome, cause, queue, duration, moved, dialect in ended:
            _add(self.data["outcomes"], {outcome: 1})
            _add(self.data["bytes"], dict(moved))
            if outcome == "done" and dialect is not None:
                _add(self.data["dialects"], {dialect: 1})
            if cause is not None:
                _add(self.data["failures"], {cause: 1})
            if queue is not None:
                self.data["queue"].append(queue)
            if duration is not None:
                self.data["duration"].append(duration)

    def keep(self, blocks: list[tuple[int, int]]) -> None:
        """Those held and in quarantine of all hosts."""
        self.data["held"], self.data["quarantined"] = map(sum, zip(*blocks, strict=True))

    def add_failures(self, cause: str, count: int) -> None:
        """Transfers that failed without the host."""
        if count:
            _add(self.data["outcomes"], {"failed": count})
            _add(self.data["failures"], {cause: count})

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Adds what came later."""
        for sums in ("outcomes", "failures", "bytes", "dialects"):
            _add(self.data[sums], other.data[sums])
        for times in ("queue", "duration"):
            self.data[times].extend(other.data[times])
        for blocks in ("held", "quarantined"):
            if other.data[blocks] is not None:
                self.data[blocks] = other.data[blocks]
        return self

    def reduce(self) -> dict[str, int | float]:
        """The figures of a log line."""
        outcomes, failures = self.data["outcomes"], self.data["failures"]
        figures = {
            "Transfers": outcomes.get("done", 0),
            "MB": round(sum(self.data["bytes"].values()) / 2**20, 3),
        }
        if duration := self.data["duration"]:
            figures["Mean duration (ms)"] = round(float(np.mean(duration)) * 1e3, 3)
            figures["P90 duration (ms)"] = round(float(np.percentile(duration, 90)) * 1e3, 3)
        if queue := self.data["queue"]:
            figures["Mean queue time (ms)"] = round(float(np.mean(queue)) * 1e3, 3)
        figures["Failed"] = outcomes.get("failed", 0)
        figures |= {f"Failed: {cause}": count for cause, count in sorted(failures.items())}
        for name, blocks in (("Blocks held", "held"), ("Blocks quarantined", "quarantined")):
            if self.data[blocks] is not None:
                figures[name] = self.data[blocks]
        return figures

    def is_empty(self) -> bool:
        return not self.data["outcomes"] and self.data["held"] is None


class KvferryPromMetrics(KVConnectorPromMetrics):
    """The series of the API server."""

    def __init__(self, vllm_config, metric_types, labelnames, per_engine_labelvalues):
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)

        def counter(name: str, about: str, label: str):
            return self._counter_cls(
                name=f"vllm:kvferry_{name}", documentation=about, labelnames=labelnames + [label]
            )

        def seconds(name: str, about: str):
            return self._histogram_cls(
                name=f"vllm:kvferry_{name}_seconds",
                documentation=about,
                buckets=BUCKETS,
                labelnames=labelnames,
            )

        def gauge(name: str, about: str):
            return self._gauge_cls(
                name=f"vllm:kvferry_{name}",
                documentation=about,
                multiprocess_mode="mostrecent",
                labelnames=labelnames,
            )

        self._sums = {
            "outcomes": counter("transfers", "KV transfers that ended.", "outcome"),
            "failures": counter("transfer_failures", "KV transfers that failed.", "cause"),
            "bytes": counter("transfer_bytes", "Bytes of KV that were moved.", "path"),
            "dialects": counter(
                "transfers_spoken",
                "KV transfers of a decode that were done, by what it spoke with the prefill.",
                "dialect",
            ),
        }
        self._times = {
            "duration": seconds(
                "transfer_duration", "From the begin of a KV transfer to its last byte."
            ),
            "queue": seconds(
                "transfer_queue", "From the arrival of a request to the begin of its KV transfer."
            ),
        }
        self._blocks = {
            "held": gauge("blocks_held", "KV blocks that are kept for transfers."),
            "quarantined": gauge(
                "blocks_quarantined", "KV blocks that bytes of a failed transfer may still land in."
            ),
        }
        # Where the connector does not start the host, that one knows it.
        if (who := answered(given(vllm_config))) is not None:
            network, moriio_peers = who
            trust = self._gauge_cls(
                name="vllm:kvferry_trust",
                documentation="Who is answered at the ports of the engine's host.",
                multiprocess_mode="mostrecent",
                labelnames=[*labelnames, "network", "moriio_peers"],
            )
            for values in per_engine_labelvalues.values():
                trust.labels(*values, network, str(moriio_peers).lower()).set(1)
        # Rates need a series before the first transfer.
        for values in per_engine_labelvalues.values():
            for outcome in OUTCOMES:
                self._sums["outcomes"].labels(*values, outcome)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        values = self.per_engine_labelvalues[engine_idx]
        for name, metric in self._sums.items():
            for label, count in transfer_stats_data[name].items():
                metric.labels(*values, label).inc(count)
        for name, metric in self._times.items():
            for span in transfer_stats_data[name]:
                metric.labels(*values).observe(span)
        for name, metric in self._blocks.items():
            if (blocks := transfer_stats_data[name]) is not None:
                metric.labels(*values).set(blocks)
