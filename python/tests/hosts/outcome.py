"""What happens to the cables does something to the requests."""

import re
import time
from dataclasses import dataclass, field

from fleet import HANG_S, Clients, Fleet

# In a row, so that all prefills have their turn.
SERVED = 12
LOOK_S = 0.05


@dataclass
class Outcome:
    """What a fault did to the requests."""

    clients: Clients
    healed: float
    recovered: float | None = None
    # Failures that a process of the fleet remembers though requests are served again, by its name.
    remembered: dict[str, str] = field(default_factory=dict)
    # Packets that met each rule of a relay.
    met: list[int] = field(default_factory=list)

    def cells(self, mode: str, name: str) -> list[str]:
        answers = self.clients.answers
        failed = sum(answer.status not in (200, None) for answer in answers)
        longest = max(answer.ended - answer.begun for answer in answers)
        hung, wrong = self.count(lambda it: it.status is None), self.count(lambda it: it.is_wrong())
        recovered = "never" if self.recovered is None else f"{self.recovered:.1f}"
        still = f"{self.clients.still:.1f}"
        return [mode, name, str(len(answers)), str(failed), f"{longest:.1f}", str(hung), str(wrong), recovered, still]

    def forgets(self, fleet: Fleet) -> bool:
        """True if no process of the fleet remembers a failure now."""
        self.remembered = fleet.remembered()
        return set(self.remembered.values()) == {"0"}

    def count(self, what) -> int:
        return sum(map(what, self.clients.answers))


def suffer(fleet: Fleet, fault, seconds: float) -> Outcome:
    with Clients(fleet) as clients:
        until(lambda: clients.served_since(0.0, SERVED))
        with fault as met:
            begun = time.monotonic()
            until(lambda: time.monotonic() - begun >= seconds)
        outcome = Outcome(clients, healed=time.monotonic(), met=met if isinstance(met, list) else [])
        if until(lambda: clients.served_since(outcome.healed, SERVED)):
            outcome.recovered = time.monotonic() - outcome.healed
            # While requests go on, so that each pair has some.
            until(lambda: outcome.forgets(fleet))
    return outcome


def until(what) -> bool:
    """False if it did not come true in the time that a request may take, which is counted in looks."""
    for _ in range(round(HANG_S / LOOK_S)):
        if what():
            return True
        time.sleep(LOOK_S)
    return False


def judge(fleet: Fleet, outcome: Outcome) -> None:
    assert outcome.count(lambda it: it.is_wrong()) == 0, "a wrong answer"
    assert outcome.count(lambda it: it.status is None) == 0, f"a request that has no outcome after {HANG_S:g} s"
    assert outcome.recovered is not None, "not served again"
    assert set(outcome.remembered.values()) == {"0"}, f"failures that are still remembered: {outcome.remembered}"
    assert all(outcome.met), f"rules that no packet met: {outcome.met}"
    why = [answer.why for answer in outcome.clients.answers if answer.status != 200]
    assert all(re.search(r'"(message|error)"', text) for text in why), why
    # Who has lost a peer keeps its blocks for as long as that may still read or write them.
    assert until(lambda: set(fleet.held().values()) == {"0"}), fleet.held()
