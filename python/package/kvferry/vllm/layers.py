"""Which layers of a step are computed, by name: the host moves the KV of none before."""

from vllm.v1.worker.ubatching import dbo_current_ubatch_id, dbo_enabled

from kvferry._native import layer_order


def microbatch(parallel) -> tuple[int, int]:
    """Which microbatch of the step computes in this thread, and of how many: with dual-batch overlap the
    hooks of a layer are called in each of them."""
    return (dbo_current_ubatch_id(), parallel.num_ubatches) if dbo_enabled() else (0, 1)


class StepLayers:
    """The layers of a worker that have KV of their own. Who shares the KV of another layer is none of them,
    and layers without a hook are computed when the step is over, as are the `drafts`, whose hooks are called
    for each token that is drafted."""

    def __init__(self, names: list[str], drafts: frozenset[str] | set[str] = frozenset()):
        order = enumerate(layer_order(names))
        self._places = {name: place for place, name in order if name not in drafts}
        # By place, a bit for each microbatch that computed it.
        self._seen = [0] * len(names)
        # The first layers are computed for all tokens of the step, in the order of their numbers.
        self.done = 0
        # Of those, what the host was told of.
        self.told = 0
        # The model computes layers more than once in a step, and which time is the last shows at its end.
        self._repeats = False

    def computed(self, name: str, part: int, parts: int) -> bool:
        """One of the `parts` of the step has computed a layer. True if there are more layers of which all
        have. Raises RuntimeError if the host was told that the layer is computed."""
        place = self._places.get(name)
        if place is None:
            return False
        if self._seen[place] & 1 << part:
            self._repeats = True
            if place < self.told:
                raise RuntimeError(
                    f"{name} is computed again in a step after its KV was handed over; from now on KV of"
                    " this model is handed over when a step is over"
                )
            self.done = self.told
        self._seen[place] |= 1 << part
        before, whole = self.done, (1 << parts) - 1
        while not self._repeats and self.done < len(self._seen) and self._seen[self.done] == whole:
            self.done += 1
        return self.done > before

    @property
    def all_done(self) -> bool:
        return self.done == len(self._seen)

    def finish(self) -> None:
        """The step is over, and with it all layers."""
        self.done = len(self._seen)

    def reset(self) -> None:
        """Before the next step."""
        self._seen = [0] * len(self._seen)
        self.done = self.told = 0
