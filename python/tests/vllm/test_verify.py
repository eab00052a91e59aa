"""KV that does not arrive as it was sent is a failed load, where it is verified."""

import pytest
from conftest import wide
from halves import LAYERS, TAKEN, Pair, compute
from pair import PLACES

# An operation is reported as done and moves nothing: of the first prompt, one of its layers.
FAULTS = """
[[fault]]
kind = "fabric.no_copy"
on = { event = "op.posted", nth = 2 }
"""
KINDS = [(mode, place, level) for level in ("all", "off") for mode in ("WRITE", "READ") for place in PLACES]


@pytest.fixture
def faults(monkeypatch, tmp_path):
    file = tmp_path / "faults.toml"
    file.write_text(FAULTS)
    monkeypatch.setenv("KVFERRY_FAULTS", str(file))


def handed_over(pair, name: str) -> bool:
    """Whether a decode is told that the KV of a prompt came."""
    pair.arrive(name)
    if pair.mode == "WRITE":
        pair.begin(name)
        compute(pair.prefill, LAYERS)
        pair.prefill.end()
        pair.prefill.finish(name, pair.taken)
    else:
        pair.prefill.begin(pair.step(name))
        compute(pair.prefill, LAYERS)
        pair.prefill.end()
        pair.prefill.finish(name, pair.taken)
        pair.decode.allocate(name, pair.taken)
    came = pair.decode.outcome(name)
    pair.prefill.until(lambda: name in pair.prefill.freed)
    return came


def is_equal(pair) -> bool:
    return all(pair.prefill.blocks(name, TAKEN) == pair.decode.blocks(name, TAKEN) for name in LAYERS)


@pytest.mark.parametrize("kind", wide(KINDS, 3), ids="-".join)
def test_a_copy_that_was_left_out_is_a_failed_load(kind, model, tmp_path, faults, caplog):
    mode, place, level = kind
    pair = Pair(model, tmp_path, {"transfer": place, "verify": level}, mode)
    try:
        came = handed_over(pair, "first")
        assert (came, is_equal(pair)) == (level == "off", False)
        causes = [record.message for record in caplog.records if "did not arrive as it was sent" in record.message]
        assert len(causes) == (level != "off")
        assert all("block" in cause and "layer" in cause for cause in causes), causes
        # The next one is moved as a whole.
        assert handed_over(pair, "second") and is_equal(pair)
    finally:
        pair.close()


@pytest.mark.parametrize("level", ["every", 1])
def test_a_level_that_there_is_not_is_refused(level, model, tmp_path):
    with pytest.raises(ValueError, match=r"verify: .*(off, sample, all|is no text)"):
        Pair(model, tmp_path, {"verify": level})


def test_peers_that_can_prove_nothing_are_refused(model, tmp_path):
    with pytest.raises(ValueError, match="verify = all with moriio_peers: peers that speak MoRIIO cannot prove any KV"):
        Pair(model, tmp_path, {"verify": "all", "moriio_peers": True})
