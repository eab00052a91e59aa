"""Clients that ask on and on, while something happens to the servers."""

import json
import threading
import time
from dataclasses import dataclass
from itertools import count

from client import Refused
from pair import request, tokens

CLIENTS = 4


@dataclass
class Asked:
    """A request and how it ended."""

    began: float
    ended: float
    # None if the answer was right.
    error: str | None


class Load:
    """Sends prompts whose answers are known through the router of a pair."""

    def __init__(self, pair, reference, prompts: list[list[int]]):
        self.pair = pair
        self.prompts = prompts
        self.expected = [reference(ids) for ids in prompts]
        self.asked: list[Asked] = []
        self.wrong: list[str] = []
        self._numbers = count()
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._client) for _ in range(CLIENTS)]

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def answers(self, more: int, seconds: float) -> None:
        """Waits for so many more right answers."""
        wanted = self._right() + more
        deadline = time.monotonic() + seconds
        while self._right() < wanted:
            assert not self.wrong, self.wrong
            last = [asked.error for asked in self.asked[-3:]]
            assert time.monotonic() < deadline, f"{wanted - self._right()} answers missing: {last}"
            time.sleep(0.05)

    def _right(self) -> int:
        return sum(asked.error is None for asked in self.asked)

    def _client(self) -> None:
        while not self._over.is_set():
            at = next(self._numbers) % len(self.prompts)
            began, error = time.monotonic(), None
            try:
                got = tokens(self.pair.router.complete(request(self.prompts[at])))
                if got != self.expected[at]:
                    self.wrong.append(f"prompt {at}: {got}, not {self.expected[at]}")
            except Refused as refused:
                error = refused.body
                told = json.loads(error)["error"]
                if not (500 <= refused.status < 505 and told["message"]):
                    self.wrong.append(f"prompt {at}: {refused}")
                # What has no instance is answered at once.
                self._over.wait(0.05)
            except OSError as broken:
                error = f"no answer: {broken}"
            self.asked.append(Asked(began, time.monotonic(), error))

    def failed(self, at: float) -> list[str]:
        """What became of those in flight at a time that have no right answer."""
        there = (asked for asked in self.asked if asked.began <= at < asked.ended)
        return [asked.error for asked in there if asked.error is not None]

    def check(self, at: float, seconds: float) -> None:
        """No answer was wrong, and what was in flight at a time ended within so many seconds."""
        late = [asked for asked in self.asked if asked.began <= at < asked.ended - seconds]
        assert not self.wrong and not late, (self.wrong, late)
