"""Many payloads between the processes of two stages, of which some die: `python/tests/omni/soak.py PAYLOADS [SEED]`.

The main process gives each sender and each receiver its work and knows what has to come of it: a payload that was put arrives,
once, with the right bytes, unless its key was cleaned up, or its producer or its receiver died with it; and then that is said. At
the end all slots are free."""

import random
import re
import resource
import sys
import tempfile
import time
import zlib
from pathlib import Path
from typing import Any

import torch
from kvferry.omni import PayloadLost, receiving
from stages import Pipeline, Stage, health, put, put_chunk, wait_for

POOL = 24 << 20

# Of a slot that a link keeps reserved.
SPARE = 16 << 10

# Payloads of a batch, each of a stream of its own or of one.
BATCH = 50

STAGES = ("0", "1")


def payload(seed: int) -> Any:
    """An object with its checksum."""
    rng = random.Random(seed)
    size = rng.choice([0, 1, 100, 3_000, 16_000, 17_000, rng.randrange(200_000)])
    data = torch.frombuffer(bytearray(rng.randbytes(size)), dtype=torch.uint8) if size else torch.empty(0, dtype=torch.uint8)
    if seed % 5 == 0:
        return data
    return {"seed": seed, "sum": zlib.crc32(data.numpy()), "data": data, "more": [1, "two", {"three": None}]}


def is_right(obj: Any, seed: int) -> bool:
    expected = payload(seed)
    if isinstance(expected, torch.Tensor):
        return torch.equal(obj.as_tensor(), expected)
    data = obj["data"]
    return (
        obj["seed"] == seed and obj["sum"] == zlib.crc32(data.numpy()) and torch.equal(data, expected["data"])
    )


def put_batch(here: Any, keys: list[tuple[str, int]]) -> list[bool]:
    return [put_one(here, key, payload(seed))[0] for key, seed in keys]


def put_one(here: Any, key: str, obj: Any) -> Any:
    """What ends like a chunk is one of its stream, but for requests of one payload, which only look so."""
    request, _, chunk = key.rpartition("_0_")
    return put_chunk(here, request, int(chunk), obj) if key.startswith("stream") else put(here, key, obj)


def get_batch(here: Any, keys: list[tuple[str, int]], abandoned: set[str]) -> dict[str, str]:
    """What became of each: `right`, `wrong`, `abandoned`, or the kind of its loss. Some are read while others come."""
    # Each id is used once: what is told of one is of its payload.
    receiving.UNSURE_S.update(perhaps=0.0, yes=0.0)
    came, reading, waiting = {}, [], dict(keys)
    for key in abandoned:
        got, seed = here.connector.get(*STAGES, key), waiting.pop(key)
        here.connector.abandon_get(key)
        came[key] = "abandoned" if got is None else "right" if is_right(got[0], seed) else "wrong"

    def polled() -> bool:
        for key, seed in list(waiting.items()):
            try:
                got = here.connector.get(*STAGES, key)
            except PayloadLost as error:
                came[key] = error.kind
            else:
                if got is None:
                    continue
                came[key] = "right" if is_right(got[0], seed) else "wrong"
                reading.append((got[0], seed))
            del waiting[key]
        return not waiting

    wait_for(polled)
    # What was read first has not changed meanwhile.
    assert all(is_right(obj, seed) for obj, seed in reading)
    return came


def clean_up(here: Any, request: str) -> None:
    here.connector.cleanup(request, *STAGES)


def memory(here: Any) -> tuple[int, int]:
    """KiB that are this process's own, and descriptors."""
    status = Path("/proc/self/status").read_text()
    own = next(line for line in status.splitlines() if line.startswith("RssAnon"))
    return int(own.split()[1]), len(list(Path("/proc/self/fd").iterdir()))


def used(here: Any) -> int:
    """Bytes of the pool that are in a slot, but for those of this process's link."""
    link = here.connector._channels.current().link
    _, kind, text = link.reserve(POOL, 0)
    assert kind == "pool-full", text
    free = int(re.search(r"where (\d+) B are free", text)[1])
    return POOL - free - link.stats()["spares"] * SPARE


class Soak:
    def __init__(self, folder: Path, seed: int):
        self.rng = random.Random(seed)
        self.pipeline = Pipeline(folder)
        self.sender, self.receiver = self.new(0), self.new(1)
        # The second process of each stage, which does not die.
        self.others = [self.new(0), self.new(1)]
        self.count = 0
        self.outcomes: dict[str, int] = {}

    def new(self, stage: int) -> Stage:
        return self.pipeline.stage(stage, pool_bytes=POOL, put_wait_s=60)

    def replaced(self, old: Stage, stage: int) -> Stage:
        old.kill()
        self.pipeline.stages.remove(old)
        return self.new(stage)

    def keys(self) -> list[tuple[str, int]]:
        self.count += BATCH
        numbers = range(self.count - BATCH, self.count)
        if self.rng.random() < 0.5:
            return [(f"stream {self.count}_0_{chunk}", number) for chunk, number in enumerate(numbers)]
        return [(f"request {number}_0_0" if number % 2 else f"whole {number}", number) for number in numbers]

    def batch(self) -> None:
        keys, what = self.keys(), self.rng.random()
        abandoned = {key for key, _ in keys if self.rng.random() < 0.05}
        if what < 0.03:
            return self.sender_dies(keys)
        if what < 0.06:
            return self.receiver_dies(keys)
        if what < 0.2:
            return self.cleaned_up(keys)
        sender = self.rng.choice([self.sender, self.others[0]])
        receiver, another = self.rng.sample([self.receiver, self.others[1]], 2)
        first = self.rng.random() < 0.5
        if first:
            receiver.begin(get_batch, keys, abandoned)
        assert all(sender(put_batch, keys)), sender(health)["last_error"]
        if not first:
            receiver.begin(get_batch, keys, set())
        came = receiver.result()
        self.counted(came, {"right", "abandoned"})
        # What was abandoned is for the next.
        left = [(key, seed) for key, seed in keys if came[key] == "abandoned"]
        self.counted(another(get_batch, left, set()), {"right"})

    def sender_dies(self, keys: list[tuple[str, int]]) -> None:
        """With half of the batch put: it arrives. Of the rest of the streams nothing does, which is said."""
        half = len(keys) // 2
        assert all(self.sender(put_batch, keys[:half]))
        is_stream = keys[0][0].startswith("stream")
        self.receiver.begin(get_batch, keys if is_stream else keys[:half], set())
        self.sender = self.replaced(self.sender, 0)
        came = self.receiver.result()
        assert all(came[key] == "right" for key, _ in keys[:half])
        if is_stream:
            assert {came[key] for key, _ in keys[half:]} == {"producer-gone"}
        self.counted(came, {"right", "producer-gone"})

    def receiver_dies(self, keys: list[tuple[str, int]]) -> None:
        """While it gets. What it did not take is there for the next one, who is told of the rest."""
        self.receiver.begin(get_batch, keys, set())
        assert all(self.sender(put_batch, keys))
        self.receiver = self.replaced(self.receiver, 1)
        self.counted(self.receiver(get_batch, keys, set()), {"right", "taken"})

    def cleaned_up(self, keys: list[tuple[str, int]]) -> None:
        assert all(self.sender(put_batch, keys))
        self.receiver.begin(get_batch, keys, set())
        requests = {key.rsplit("_", 2)[0] for key, _ in keys}
        for request in self.rng.sample(sorted(requests), -(-len(requests) // 3)):
            self.sender(clean_up, request)
        self.counted(self.receiver.result(), {"right", "cleaned-up"})

    def counted(self, came: dict[str, str], expected: set[str]) -> None:
        assert set(came.values()) <= expected, came
        for what in came.values():
            self.outcomes[what] = self.outcomes.get(what, 0) + 1

    def run(self, payloads: int) -> None:
        samples = []
        while self.count < payloads:
            self.batch()
            if self.count % (payloads // 10 // BATCH * BATCH or BATCH) == 0:
                samples.append(self.sample())
                print(f"{self.count} payloads: {self.outcomes}, MiB of host and others: {samples[-1]}", flush=True)
        self.no_slot_is_lost()
        # Once the host remembers as many keys as it ever does, which are 65,536, none of those that were there all the
        # time grows.
        warm = samples[len(samples) * 7 // 10]
        assert all(last <= before + 8 for before, last in zip(warm, samples[-1], strict=True)), samples

    def sample(self) -> list[int]:
        status = Path(f"/proc/{self.pipeline.host()}/status").read_text()
        host = int(next(line for line in status.splitlines() if line.startswith("RssAnon")).split()[1])
        return [host >> 10, *(stage(memory)[0] >> 10 for stage in self.others)]

    def no_slot_is_lost(self) -> None:
        """With nobody there but one, all is free but the slots that its link keeps reserved for small payloads."""
        for stage in (self.sender, self.receiver, self.others[1]):
            stage.kill()
        wait_for(lambda: self.others[0](used) == 0)


def main() -> None:
    payloads, seed = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kvferry-") as folder:
        soak = Soak(Path(folder), seed)
        try:
            soak.run(payloads)
        finally:
            soak.pipeline.end()
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss >> 10
    print(f"{payloads} payloads in {time.monotonic() - begun:.0f} s, {peak} MiB at most in a process")


if __name__ == "__main__":
    main()
