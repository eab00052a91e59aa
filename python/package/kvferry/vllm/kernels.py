"""Events behind the kernels that compute KV: its bytes are moved when they are done."""

from collections import deque

import torch


class Kernels:
    """Of one worker. An event stays until the transfer actor has seen it, and is used again then."""

    def __init__(self):
        self.free: list[torch.cuda.Event] = []
        self.used: deque[torch.cuda.Event] = deque()
        # Of all that were used, how many were seen.
        self.seen = 0

    def mark(self, seen: int) -> int:
        """The `hipEvent_t` behind all that the current stream was given, when `seen` events of those
        that were given out are not looked at any more."""
        while self.seen < seen:
            self.free.append(self.used.popleft())
            self.seen += 1
        event = self.free.pop() if self.free else torch.cuda.Event()
        event.record()
        self.used.append(event)
        return event.cuda_event
