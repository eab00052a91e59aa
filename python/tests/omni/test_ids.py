"""Ids that are used again, and keys that only look like those of chunks: by vLLM-Omni's own callers, with two processes of a stage."""

import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from adapters import audio, begin, begin_to_receive, finish, receive, send, used
from kvferry.omni.keys import KEY_BYTES_MAX
from stages import clean_up, get, health, poll, put, put_chunk, settle, wait_for
from test_callers import keys_of, manage, transfer
from test_callers import receive as receive_kv

NOTHING = {"wants": 0, "failing": 0, "open": 0, "given up": 0, "link": 0}

# Of an operation that nobody ends: longer than anything here takes.
NEVER_S = 600.0


@pytest.fixture
def four(pipeline):
    """Two adapters of stage 0 and two of stage 1."""
    made = []
    for stage in (0, 0, 1, 1):
        made.append(pipeline.bare())
        made[-1](begin, stage, pipeline.extra(stage, put_wait_s=0))
    return made


def stream(sender: Any, receiver: Any, name: str, first: int, is_asked: bool = True) -> None:
    """A request of three chunks, for each of which the receiver asks before it is put."""
    for chunk in range(3):
        if is_asked:
            receiver.begin(receive, name)
        assert sender(send, name, audio(first + chunk), chunk == 2) == {}
        if not is_asked:
            receiver.begin(receive, name)
        got, is_last = receiver.result()
        assert torch.equal(got, audio(first + chunk)) and is_last == (chunk == 2)


@pytest.mark.parametrize("is_asked", [True, False], ids=["asked first", "put first"])
def test_an_id_is_used_again_by_any_pair_of_processes(four, is_asked):
    senders, receivers = four[:2], four[2:]
    for again in range(8):
        stream(senders[again % 2], receivers[again // 2 % 2], "r", 10 * again, is_asked)
    assert [stage(used) for stage in four] == [NOTHING] * 4


def test_an_id_is_used_again_by_a_consumer_that_was_started_anew(four, pipeline):
    sender, _, old, _ = four
    stream(sender, old, "r", 0)
    old.kill()
    new = pipeline.bare()
    new(begin, 1, pipeline.extra(1))
    stream(sender, new, "r", 10)


@pytest.mark.parametrize("before", [0, 1], ids=["before its first chunk", "after its first chunk"])
def test_an_abort_at_the_producer_is_not_of_the_next_request(four, before):
    """Which the stage asks for before anything of it is put."""
    sender, other, receiver, _ = four
    for producer in (sender, other):
        for chunk in range(before):
            sender(send, "r", audio(chunk))
        sender(finish, "r")
        stream(producer, receiver, "r", 10)
    # A later chunk that was aborted is told at once, whoever asked first.
    sender(send, "r", audio(0))
    assert receiver(receive, "r")[1] is False
    sender(finish, "r")
    assert receiver(receive, "r") == "error"


def test_an_abort_at_one_receiver_is_not_of_the_next_request_at_another(four):
    sender, other, old, new = four
    sender(send, "r", audio(0))
    assert old(receive, "r")[1] is False
    sender(send, "r", audio(1))
    # The client sends it again: the next request has begun when the old one hears of its end.
    new(begin_to_receive, "r")
    other(send, "r", audio(10))
    old(finish, "r")
    sender(finish, "r")
    assert torch.equal(new(receive, "r")[0], audio(10))
    new.begin(receive, "r")
    other(send, "r", audio(11), True)
    got, is_last = new.result()
    assert torch.equal(got, audio(11)) and is_last
    assert [stage(used) for stage in four] == [NOTHING] * 4


def test_a_chunk_of_an_earlier_request_is_for_nobody(four):
    old, new, receiver, _ = four
    for chunk in range(3):
        old(send, "r", audio(chunk))
    assert torch.equal(receiver(receive, "r")[0], audio(0))
    receiver(finish, "r")
    # Chunks of the request before are neither got, nor put any more.
    new(send, "r", audio(10))
    assert old(send, "r", audio(3)) == {"internal-r": "connector.put reported failure"}
    assert old(health)["failures"] == {"superseded": 1}
    old(finish, "r")
    assert torch.equal(receiver(receive, "r")[0], audio(10))
    receiver.begin(receive, "r")
    new(send, "r", audio(11), True)
    assert torch.equal(receiver.result()[0], audio(11))


def test_a_stage_that_needs_no_more_fails_no_request_of_its_producer(four):
    sender, _, receiver, _ = four
    sender(send, "r", audio(0))
    assert receiver(receive, "r")[1] is False
    receiver(finish, "r")
    for chunk in range(1, 4):
        assert sender(send, "r", torch.zeros(1, 3 << 17), chunk == 3) == {}
    # What was put since is nowhere: there is room for as much again.
    for _ in range(3):
        assert sender(send, "s", torch.zeros(1, 3 << 17)) == {}


def test_a_full_pool_ends_one_request_and_none_with_its_id(four):
    sender, _, receiver, _ = four
    for again in range(3):
        assert sender(send, "r", torch.zeros(2, 4 << 20)) == {"internal-r": "connector.put reported failure"}
        # What followed would have the key of the chunk that failed.
        assert sender(send, "r", audio(1)) == {"internal-r": "connector.put reported failure"}
        sender(finish, "r")
        stream(sender, receiver, "r", 10 * again)


def test_the_outcome_of_keys_without_streams_is_not_of_the_next_request(pipeline):
    sender, first, second = pipeline.stage(0), pipeline.stage(1), pipeline.stage(1)
    for chunk in range(3):
        sender(put, f"r_0_{chunk}", [chunk])
        assert first(get, f"r_0_{chunk}") == [chunk]
    sender(put, "r_0_0", ["new", 0])
    assert second(get, "r_0_0") == ["new", 0]
    assert second(poll, "r_0_1") is None
    second.begin(get, "r_0_1")
    sender(put, "r_0_1", ["new", 1])
    assert second.result() == ["new", 1]


def managed(pipeline, *ranks: int) -> list[Any]:
    """Managers of KV caches of two stages, each with these ranks."""
    made = []
    for stage in (0, 1):
        for rank in ranks:
            made.append(pipeline.bare())
            made[-1](manage, stage, pipeline.extra(stage, stage_id=None, put_wait_s=0), rank, len(ranks))
    return made


def fill(put: Callable[..., Any]) -> list[str]:
    """Puts until there is no room; says under which keys."""
    filled: list[str] = []
    while put("0", "1", f"fill {len(filled)}", torch.zeros(1 << 20, dtype=torch.uint8))[0]:
        filled.append(f"fill {len(filled)}")
    return filled


def transfer_while_full(here: Any, request: str) -> dict[str, int]:
    """There is no room when the manager tries first, and room when it tries again."""
    put_once, tries, filled = here.connector.put, [], []

    def counted(**given: Any) -> Any:
        # Not sooner: what was put before may go until then.
        if not tries:
            filled.extend(fill(put_once))
        done = put_once(**given)
        tries.append(done[0])
        if tries == [False]:
            for key in filled:
                here.connector.cleanup(key, "0", "1")
        return done

    here.connector.put = counted
    transfer(here, request)
    del here.connector.put
    return {"failed": tries.count(False), "done": tries.count(True)}


def test_kv_caches_of_ranks_are_tried_again_when_there_was_no_room(pipeline):
    """Their keys end like those of chunks, of which the next one is refused."""
    senders, receivers = (stages := managed(pipeline, 0, 1))[:2], stages[2:]
    for request in ("r", "r", "s"):
        for rank in (0, 1):
            receivers[rank].begin(receive_kv, request)
            assert senders[rank](transfer_while_full, request) == {"failed": 1, "done": 1}
            assert torch.equal(receivers[rank].result(), keys_of(request))


def test_ids_that_end_like_chunks_are_requests_of_their_own(pipeline):
    sender, receiver = pipeline.stage(0, put_wait_s=0), pipeline.stage(1)
    assert not sender(put, "batch_0_1", torch.empty(32 << 20, dtype=torch.uint8))[0]
    for name in ("batch_0_0", "batch_0_2", "batch_0_1"):
        assert sender(put, name, [name])[0], sender(health)["last_error"]
        assert receiver(get, name) == [name]
    # A stream with such a name leaves them alone.
    sender(put, "batch_0_7", ["whole"])
    sender(put_chunk, "batch", 0, ["chunk"])
    sender(clean_up, "batch")
    assert receiver(get, "batch_0_7") == ["whole"]


def test_what_was_put_is_what_the_next_one_gets(pipeline):
    """Of two puts of a key the later one, as soon as it has returned."""
    sender, receiver = pipeline.stage(0), pipeline.stage(1)
    for number in range(300):
        for again in range(2):
            sender(put, f"k{number}", [number, again])
        assert receiver(get, f"k{number}") == [number, again]


def test_a_single_get_with_metadata_is_enough(pipeline):
    sender, receiver = pipeline.stage(0), pipeline.stage(1, get_wait_ms=0.001)
    for number in range(300):
        _, _, metadata = sender(put, f"k{number}", [number])
        assert receiver(poll, f"k{number}", ("0", "1"), metadata)[0] == [number]


def leave_no_room(here: Any) -> None:
    fill(here.connector.put)


def test_a_deployment_that_is_gone_leaves_nothing(pipeline):
    """Neither payloads under ids that are used again, nor a full share, nor its pool."""
    for pool_bytes in (16 << 20, 16 << 20, 24 << 20):
        sender, receiver = (pipeline.stage(stage, put_wait_s=0, pool_bytes=pool_bytes) for stage in (0, 1))
        assert sender(health)["pool_size"] == receiver(health)["pool_size"] == pool_bytes
        assert receiver(poll, "r_0_0") is None and receiver(poll, "kv") is None
        receiver(clean_up, "kv")
        receiver(abandon, "r_0_0")
        assert sender(put_chunk, "r", 0, ["left"])[0] and sender(put, "kv", b"left")[0]
        sender(leave_no_room)
        # The host is there for ten seconds more.
        for stage in (sender, receiver):
            stage.kill()
        wait_for(lambda: all(not stage.process.is_alive() for stage in (sender, receiver)))


def abandon(here: Any, key: str) -> None:
    here.connector.abandon_get(key)
    settle(here)


def cleaned_up_while_polled(here: Any, key: str) -> None:
    assert here.connector.get("0", "1", key) is None
    here.connector.cleanup(key, "0", "1")
    settle(here)


@pytest.mark.parametrize("key", ["r_0_0", "kv"])
def test_who_cleans_up_what_it_polls_gets_the_next_one(pipeline, key):
    sender, receiver = pipeline.stage(0), pipeline.stage(1)
    receiver(cleaned_up_while_polled, key)
    sender(put, key, [1])
    assert receiver(get, key) == [1]


NONSENSE = [
    "text", 7, [], {"kvferry": 7}, {"kvferry": {"client": -1, "incarnation": 1 << 70}}, {"kvferry": {"client": "one"}},
    {"kvferry": {"engine": 7}}, {"kvferry": {"engine": "x" * 100_000}}, {"kvferry": {"engine": "\ud800"}},
    {"kvferry": {"client": 1.5, "incarnation": "a", "engine": []}}, {"source_host": 7, "source_port": "x", "data_size": []},
    {"source_host": "h", "source_port": 1 << 40}, {"data_size": None, "kvferry": {"client": {}}},
]  # fmt: skip


@pytest.mark.parametrize("metadata", NONSENSE, ids=lambda metadata: repr(metadata)[:40])
def test_metadata_that_makes_no_sense_is_none_however_often(pipeline, metadata):
    sender, receiver = pipeline.stage(0), pipeline.stage(1)
    for _ in range(2):
        assert receiver(poll, "k", ("0", "1"), metadata) is None
    sender(put, "k", [1])
    assert receiver(get, "k", ("0", "1"), metadata) == [1]


def interrupted(here: Any, wait: str) -> str:
    """Seconds that a call takes which a signal interrupts."""

    def handle(*_: Any) -> None:
        raise KeyboardInterrupt(wait)

    signal.signal(signal.SIGUSR1, handle)
    main = threading.main_thread().ident

    def interrupt() -> None:
        link = here.connector._channels.current().link
        wait_for(lambda: link.stats()["tickets" if wait == "put" else "wants"])
        signal.pthread_kill(main, signal.SIGUSR1)

    interrupts = threading.Thread(target=interrupt)
    begun = time.monotonic()
    interrupts.start()
    try:
        if wait == "put":
            here.connector.put("0", "1", "more", torch.zeros(15 << 20, dtype=torch.uint8))
        else:
            here.connector.get_with_deadline("0", "1", "absent", deadline=begun + NEVER_S)
    except KeyboardInterrupt as error:
        assert time.monotonic() - begun < NEVER_S / 2
        return str(error)
    finally:
        interrupts.join()
    return "not interrupted"


@pytest.mark.parametrize("wait", ["put", "get"])
def test_a_wait_ends_with_a_signal(pipeline, wait):
    stage = pipeline.stage(0, put_wait_s=NEVER_S)
    assert stage(put, "full", torch.zeros(12 << 20, dtype=torch.uint8))[0]
    assert stage(interrupted, wait) == wait
    # It has cost nothing else.
    stage(clean_up, "full")
    assert stage(put, "more", torch.zeros(12 << 20, dtype=torch.uint8))[0]


def put_long(here: Any, length: int, is_chunk: bool) -> tuple[bool, str | None]:
    name = "k" * length
    done = put_chunk(here, name, 0, [1]) if is_chunk else put(here, name, [1])
    return done[0], here.connector.health()["last_error"]


@pytest.mark.parametrize("is_chunk", [True, False], ids=["chunk", "whole"])
@pytest.mark.parametrize("length", [KEY_BYTES_MAX + 1, 40_000_000, 70_000_000])
def test_a_key_that_is_too_long_is_refused_and_nothing_else(pipeline, length, is_chunk):
    """Clients choose ids."""
    sender, receiver = pipeline.stage(0), pipeline.stage(1)
    done, why = sender(put_long, length, is_chunk)
    assert not done and f"{KEY_BYTES_MAX} at most: give requests shorter ids" in why and len(why) < 2_000
    assert receiver(lost_long, length) == "bad-key"
    assert sender(health)["failures"] == receiver(health)["failures"] == {"bad-key": 1}
    sender(put, "k" * (KEY_BYTES_MAX - 100), [2])
    assert receiver(get, "k" * (KEY_BYTES_MAX - 100)) == [2]


def lost_long(here: Any, length: int) -> str:
    key = "k" * length
    here.connector.cleanup(key, "0", "1")
    try:
        here.connector.get("0", "1", key)
    except RuntimeError as error:
        return error.kind
    finally:
        here.connector.abandon_get(key)
    return "none"


def test_a_key_that_is_no_text_is_refused(pipeline):
    stage = pipeline.stage(0)
    assert not stage(put, "\ud800", [1])[0]
    assert stage(health)["failures"] == {"bad-key": 1}
    assert stage(put, "k", [1])[0]
