"""The connector between two hosts."""

import tempfile
from pathlib import Path

import pytest
import torch
from objects import same
from stages import Pipeline, get, health, hosts, lost, put

CHUNK = {"codes": {"audio": torch.arange(60_000).view(4, -1)}, "meta": {"finished": torch.tensor(False)}}


def connection(here):
    return here.connector.get_connection_info()


@pytest.fixture
def others(folder, monkeypatch):
    """Two pipelines of one deployment, each with a host that the other one reaches."""
    monkeypatch.setenv("KVFERRY_HOST_PAYLOAD_LISTEN", "127.0.0.1:0")
    # Sooner than by default it is noticed that a host is gone.
    monkeypatch.setenv("KVFERRY_HOST_SET", "channel.silent_ms=2000")
    made = [Pipeline(Path(tempfile.mkdtemp(dir=folder))) for _ in range(2)]
    yield made
    for pipeline in made:
        pipeline.end()


def test_r2_metadata_leads_to_the_host_that_has_it(others):
    sender, receiver = others[0].stage(0), others[1].stage(1)
    assert len(hosts(others[0].folder)) == len(hosts(others[1].folder)) == 1
    for chunk, obj in enumerate([CHUNK, torch.rand(700_000), b"", {"end": True}]):
        key = f"r_0_{chunk}"
        done, _, metadata = sender(put, key, obj)
        assert done
        at = sender(connection)
        assert (metadata["source_host"], metadata["source_port"]) == (at["host"], at["zmq_port"])
        got = receiver(get, key, ("0", "1"), metadata)
        assert same(got[1] if isinstance(got, tuple) else got, obj)
    # A payload has one receiver.
    assert receiver(lost, "r_0_0", ("0", "1"), metadata) == "taken"
    assert receiver(health)["gets"] == 4


def test_without_metadata_the_hosts_that_are_named_are_asked(others, monkeypatch):
    sender = others[0].stage(0)
    at = sender(connection)
    monkeypatch.setenv("KVFERRY_HOST_PAYLOAD_HOSTS", f"{at['host']}:{at['zmq_port']}")
    receiver = others[1].stage(1)
    receiver.begin(get, "r_0_0")
    sender(put, "r_0_0", CHUNK)
    assert same(receiver.result(), CHUNK)
    sender.kill()
    assert receiver(lost, "r_0_1") == "producer-gone"


def test_o14_a_host_that_dies_is_an_outcome(others):
    sender, receiver = others[0].stage(0), others[1].stage(1)
    _, _, metadata = sender(put, "r_0_0", CHUNK)
    receiver(get, "r_0_0", ("0", "1"), metadata)
    receiver.begin(lost, "r_0_1", ("0", "1"), metadata)
    others[0].lose_host()
    assert receiver.result() in ("peer-gone", "producer-gone")
