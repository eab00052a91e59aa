"""What the environment variables do."""

import hashlib
import json
import subprocess
import sys

import pytest
from conftest import engine, finish, pattern

FIRST = '[[fault]]\nkind = "{}"\non = {{ event = "op.posted" }}\n'


@pytest.fixture
def faults(monkeypatch, tmp_path):
    def write(text: str):
        path = tmp_path / "faults.toml"
        path.write_text(text)
        monkeypatch.setenv("KVFERRY_FAULTS", str(path))

    return write


def opened(peer, buffer):
    mine = engine("me")
    mine.register_remote_engine(peer.desc)
    return mine.create_session(buffer.register(mine), peer.memory)


def test_a_suppressed_copy_succeeds_without_a_byte(faults, peer, buffer):
    faults(FIRST.format("fabric.no_copy"))
    session = opened(peer, buffer)
    assert finish(session.read(0, 0, 4096, 1)).Succeeded()
    assert buffer.memory[:] == pattern(1)
    assert finish(session.read(0, 0, 4096, 2)).Succeeded()
    assert buffer.memory[:4096] == pattern(2)[:4096]


def test_a_failure_is_injected(faults, peer, buffer):
    faults(FIRST.format("fabric.ack_lost"))
    session = opened(peer, buffer)
    status = finish(session.read(0, 0, 4096, 1))
    assert status.Failed() and "injected by KVFERRY_FAULTS" in status.Message()
    assert buffer.memory[:4096] == pattern(2)[:4096], "only the acknowledgement was lost"


def test_a_full_queue_says_so_in_moris_words(faults, peer, buffer):
    faults(FIRST.format("fabric.queue_full") + 'lasts = "1h"\n')
    session = opened(peer, buffer)
    assert finish(session.read(0, 0, 8, 1)).Succeeded()
    status = session.read(0, 0, 8, 2)
    assert status.Failed() and "SQ full" in status.Message()


@pytest.mark.parametrize(
    "text, said",
    [
        ('[[fault]]\nkind = "fabric.nonsense"\nchance = 1\n', "faults.toml:2.*fabric.nonsense"),
        ('[[fault]]\nkind = "wire.loss"\nchance = 1\n', "faults.toml:2.*cannot be injected"),
        ("[[fault]\n", "faults.toml:1.*not TOML"),
    ],
)
def test_a_wrong_fault_file_is_an_error_at_the_start(faults, text, said):
    faults(text)
    with pytest.raises(ValueError, match=said):
        engine("me")


def test_a_wrong_fault_file_stops_the_import(faults):
    faults(FIRST.format("wire.loss"))
    ends = subprocess.run([sys.executable, "-c", "import mori.io"], capture_output=True, text=True)
    assert ends.returncode == 1 and "faults.toml:2" in ends.stderr, ends


def test_the_audit_tells_the_bytes_in_place(monkeypatch, tmp_path, peer, buffer):
    path = tmp_path / "audit.jsonl"
    monkeypatch.setenv("KVFERRY_AUDIT", str(path))
    session = opened(peer, buffer)
    assert finish(session.batch_read([0, 8192], [64, 4096], [100, 50], 9)).Succeeded()
    (line,) = [json.loads(text) for text in path.read_text().splitlines()]
    theirs = pattern(2)
    moved = theirs[64:164] + theirs[4096:4146]
    assert line == {
        "engine": "me",
        "peer": "peer",
        "uid": 9,
        "direction": "read",
        "slices": 2,
        "bytes": 150,
        "local": [0, 8242],
        "remote": [64, 4146],
        "error": None,
        "sha256": hashlib.sha256(moved).hexdigest(),
    }


def test_settings_that_are_wrong_are_named(monkeypatch, tmp_path):
    path = tmp_path / "fabric.toml"
    path.write_text('paths = ["carrier-pigeon"]\n')
    for name, value, said in [
        ("KVFERRY_FABRIC", str(path), "KVFERRY_FABRIC=.*carrier-pigeon"),
        ("KVFERRY_FABRIC", "/nonexistent", "cannot read"),
        ("KVFERRY_AUDIT", "/nonexistent/audit", "cannot append"),
        ("MORI_IO_SQ_BACKOFF_TIMEOUT_US", "soon", "number of microseconds"),
    ]:
        with monkeypatch.context() as one:
            one.setenv(name, value)
            with pytest.raises(ValueError, match=f"(?s){said}"):
                engine("me")
