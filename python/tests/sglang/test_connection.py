"""SGLang 0.5.23's MoRI backend, unmodified, between processes: managers, senders, receivers and the
bootstrap server that its schedulers use, and memory of this machine in place of a model's."""

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator

import pytest
from ports import free_ports
from rank import Rank, rank, start

FAILED, WAITING, SUCCESS = 0, 2, 4
# However busy the machine is, nothing takes as long.
PATIENCE = 300

ROOMS = itertools.count(1000)


def until(condition: Callable[[], object]) -> None:
    late = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < late, f"waited for {PATIENCE} s"
        time.sleep(0.005)


class Servers:
    """All ranks of a prefill and of a decode."""

    def __init__(self, prefills: list[Rank], decodes: list[Rank]):
        self.prefills, self.decodes = prefills, decodes

    def know_each_other(self) -> None:
        for decode in self.decodes:
            until(decode.knows_prefill)

    def begin(self, pages: int = 3, slot: int = 0, first: tuple[int, int] = (0, 0)) -> int:
        """A request whose bytes can go: the decode has told where to."""
        room = next(ROOMS)
        here, there = (list(range(at, at + pages)) for at in first)
        for prefill in self.prefills:
            prefill.offer(room, here, slot)
        for decode in self.decodes:
            decode.want(room, there[::-1], slot)
            until(lambda decode=decode: decode.poll(room) != 1)
            decode.tell(room)
        for prefill in self.prefills:
            until(lambda prefill=prefill: prefill.poll(room) == WAITING)
        return room

    def end(self, room: int, status: int = SUCCESS) -> None:
        for one in self.prefills + self.decodes:
            until(lambda one=one: one.poll(room) in (FAILED, SUCCESS))
            assert one.poll(room) == status, one.why(room)

    def are_exact(self) -> bool:
        return all(decode.is_exact() for decode in self.decodes)


@contextlib.contextmanager
def servers(prefill: int, decode: int, states: tuple[str, ...], **env: str) -> Iterator[Servers]:
    (port,) = free_ports(1)
    with contextlib.ExitStack() as stack:

        def ranks(role: str, size: int) -> list[Rank]:
            return [stack.enter_context(rank(role, port, (nth, size), states, **env)) for nth in range(size)]

        both = ranks("prefill", prefill), ranks("decode", decode)
        start(*both)
        made = Servers(*both)
        made.know_each_other()
        yield made


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> Iterator[Servers]:
    """Of all that they move the first is told to have failed."""
    faults = tmp_path_factory.mktemp("pair") / "faults.toml"
    faults.write_text('[[fault]]\nkind = "fabric.ack_lost"\non = { event = "op.posted" }\n')
    with servers(1, 1, ("mamba", "swa"), KVFERRY_FAULTS=str(faults)) as made:
        yield made


def test_a_failed_transfer_is_told_with_its_cause(pair):
    (prefill,), (decode,) = pair.prefills, pair.decodes
    room = pair.begin(2, 0, (0, 60))
    prefill.send(room)
    for one in (prefill, decode):
        until(lambda one=one: one.poll(room) in (FAILED, SUCCESS))
        assert "KV transfer failed: acknowledgement lost (injected by KVFERRY_FAULTS)" in one.why(room)


def test_requests_arrive_at_once_and_in_parts(pair):
    (prefill,), (decode,) = pair.prefills, pair.decodes
    first = [pair.begin(4, nth, (4 * nth, 60 - 4 * nth)) for nth in range(8)]
    for room in first:
        prefill.send(room, 0, 1)
    for room in first[::-1]:
        prefill.send(room, 1, 3)
    for room in first:
        prefill.send(room, 3, 4)
    for room in first:
        pair.end(room)
        prefill.clear(room)
        decode.clear(room)
    assert pair.are_exact()


def test_an_aborted_request_lands_nowhere_once_prefill_said_so(pair):
    (prefill,), (decode,) = pair.prefills, pair.decodes
    room = pair.begin(8, 9, (32, 0))
    prefill.send(room, 0, 4)
    decode.abort(room)
    pair.end(room, FAILED)
    until(lambda: decode.may_reuse(room))
    before = decode.image()
    prefill.send(room, 4, 8)
    assert "Aborted by AbortReq" in decode.why(room)
    # What comes after it on the same connection has arrived.
    again = pair.begin(8, 10, (40, 8))
    assert decode.image() == before
    prefill.send(again)
    pair.end(again)


def test_a_decode_that_is_torn_down_is_written_no_more(pair):
    (prefill,), (decode,) = pair.prefills, pair.decodes
    room = pair.begin(4, 11, (0, 20))
    decode.tear_down()
    before = decode.image()
    prefill.send(room)
    until(lambda: prefill.poll(room) in (FAILED, SUCCESS))
    assert prefill.poll(room) == FAILED and prefill.why(room)
    assert decode.image() == before
    # The same memory, registered by a new engine.
    decode.start()
    pair.know_each_other()
    room = pair.begin(4, 11, (0, 20))
    prefill.send(room)
    pair.end(room)


def test_a_decode_that_is_killed_fails_alone(pair):
    (prefill,) = pair.prefills
    with rank("decode", prefill.port, (0, 1), ("mamba", "swa")) as other:
        start([], [other])
        beside = Servers([prefill], [other])
        beside.know_each_other()
        lives = beside.begin(2, 0, (0, 0))
        prefill.send(lives)
        beside.end(lives)
        dies, goes_on = beside.begin(2, 1, (2, 2)), pair.begin(2, 12, (8, 24))
        other.kill()
        for room in (dies, goes_on):
            prefill.send(room)
        until(lambda: prefill.poll(dies) == FAILED)
        assert prefill.why(dies)
        pair.end(goes_on)


def test_a_prefill_that_is_killed_is_told_to_its_requests(pair):
    """The last of this pair."""
    (prefill,), (decode,) = pair.prefills, pair.decodes
    room = pair.begin(2, 13, (10, 26))
    before = decode.image()
    prefill.kill()
    until(lambda: decode.poll(room) == FAILED)
    assert "Lost connection with prefill instance" in decode.why(room)
    assert decode.image() == before


@pytest.mark.parametrize(
    ("prefill", "decode", "path"),
    [(2, 1, "cross-memory"), pytest.param(1, 2, "tcp", marks=pytest.mark.wide)],
)
def test_tp_ranks_may_be_unequal(tmp_path, prefill, decode, path):
    """And small data goes as the KV does, in place of SGLang's own connection."""
    fabric = tmp_path / "fabric.toml"
    fabric.write_text(f'paths = ["{path}"]\n')
    env = {"SGLANG_MORI_SEND_AUX_RDMA": "1", "KVFERRY_FABRIC": str(fabric)}
    with servers(prefill, decode, ("mamba",), **env) as both:
        rooms = [both.begin(3, nth, (3 * nth, 40 - 3 * nth)) for nth in range(4)]
        for room in rooms:
            for one in both.prefills:
                one.send(room, 0, 2)
                one.send(room, 2, 3)
        for room in rooms:
            both.end(room)
        assert both.are_exact()


@pytest.mark.wide
def test_ranks_that_have_the_same_kv_send_it_once():
    """MLA: the second prefill rank has nothing to send, and is done all the same."""
    with servers(2, 1, ("mla",)) as both:
        rooms = [both.begin(3, nth, (3 * nth, 40 - 3 * nth)) for nth in range(4)]
        for room in rooms:
            for one in both.prefills:
                one.send(room)
        for room in rooms:
            both.end(room)
        assert both.are_exact()
