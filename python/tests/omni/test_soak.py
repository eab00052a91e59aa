"""A little of the soak."""

from soak import Soak


def test_whatever_happens_payloads_arrive_or_are_said_not_to(folder):
    soak = Soak(folder, 1)
    try:
        soak.run(3_000)
    finally:
        soak.pipeline.end()
    assert {"right", "taken", "cleaned-up", "abandoned", "producer-gone"} <= set(soak.outcomes)
