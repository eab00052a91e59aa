"""Stages on two machines, which are two hosts here: each is told where others reach it, and the second where the first is."""

from typing import Any

import pytest
import torch
from stages import get, hosts, kill, lost, poll, put, put_chunk, wait_for, want


def engine(here: Any) -> str | None:
    return here.connector._channels.current().link.engine


@pytest.fixture
def machines(pipeline, monkeypatch):
    """A stage on either; hosts that a stage starts have its environment."""
    monkeypatch.setenv("KVFERRY_HOST_PAYLOAD_LISTEN", "127.0.0.1:0")
    first = pipeline.stage(0, socket=str(pipeline.folder / "first"))
    monkeypatch.setenv("KVFERRY_HOST_PAYLOAD_HOSTS", first(engine))
    return first, pipeline.stage(1, socket=str(pipeline.folder / "second"))


def test_payloads_come_from_another_host(machines):
    first, second = machines
    assert first(engine) != second(engine)
    for chunk in range(3):
        assert first(put, f"r_0_{chunk}", {"a": torch.arange(100_000) + chunk})[0]
        assert torch.equal(second(get, f"r_0_{chunk}")["a"], torch.arange(100_000) + chunk)
    second(want, "kv")
    first(put, "kv", bytes(1_000_000))
    assert second(get, "kv") == (bytes, bytes(1_000_000))


def test_r2_metadata_names_the_host(pipeline, monkeypatch):
    """Which nobody else has named."""
    monkeypatch.setenv("KVFERRY_HOST_PAYLOAD_LISTEN", "127.0.0.1:0")
    first, second = (pipeline.stage(stage, socket=str(pipeline.folder / str(stage))) for stage in (0, 1))
    _, _, metadata = first(put, "k", [1, 2])
    assert metadata["kvferry"]["engine"] == first(engine)
    assert second(get, "k", ("0", "1"), metadata) == [1, 2]


def test_metadata_that_comes_later_names_the_host_as_well(pipeline, monkeypatch):
    monkeypatch.setenv("KVFERRY_HOST_PAYLOAD_LISTEN", "127.0.0.1:0")
    first, second = (pipeline.stage(stage, socket=str(pipeline.folder / str(stage))) for stage in (0, 1))
    assert second(poll, "k") is None
    _, _, metadata = first(put, "k", [1, 2])
    assert second(get, "k", ("0", "1"), metadata) == [1, 2]


def test_an_id_is_used_again_on_other_machines(machines):
    first, second = machines
    for again in range(3):
        for chunk in range(2):
            first(put_chunk, "r", chunk, [again, chunk])
            assert second(get, f"r_0_{chunk}") == [again, chunk]


def test_a_lost_machine_is_an_outcome(pipeline, machines):
    first, second = machines
    first(put_chunk, "r", 0, [0])
    assert second(get, "r_0_0") == [0]
    second(want, "r_0_1")
    first.kill()
    kill(hosts(pipeline.folder, "first"))
    assert second(lost, "r_0_1") in ("peer-gone", "producer-gone")
    wait_for(lambda: not hosts(pipeline.folder, "first"))
