"""Stages of a pipeline: processes with a connector each, which do what a test says."""

import contextlib
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from kvferry.omni import KvferryOmniConnector, PayloadLost, receiving

# Nobody waits so long but for what does not come.
PATIENCE_S = 120

CONTEXT = multiprocessing.get_context("fork")


def serve(pipe: Any, extra: dict[str, Any] | None) -> None:
    here = SimpleNamespace(kept={}, connector=None, lives={})
    # What may have become of an earlier request is the outcome of the next one sooner than for users.
    receiving.UNSURE_S["perhaps"] = 0.5
    try:
        if extra is not None:
            here.connector = KvferryOmniConnector(extra)
        pipe.send((True, os.getpid()))
    except BaseException as error:
        pipe.send((False, error))
        os._exit(1)
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            os._exit(0)
        try:
            pipe.send((True, function(here, *args)))
        except BaseException as error:
            error.add_note(traceback.format_exc())
            pipe.send((False, error))


class Stage:
    """One process; `extra` is what its connector is made with."""

    def __init__(self, extra: dict[str, Any] | None = None):
        self.pipe, its = CONTEXT.Pipe()
        self.process = CONTEXT.Process(target=serve, args=(its, extra), daemon=True)
        self.process.start()
        its.close()
        self.pid = self.result()

    def begin(self, function: Callable, *args: Any) -> "Stage":
        """`function(here, *args)` there: `here` has the connector, and what earlier calls kept."""
        self.pipe.send((function, args))
        return self

    def result(self) -> Any:
        if not self.pipe.poll(PATIENCE_S):
            raise TimeoutError(f"process {self.process.pid} does not answer")
        done, what = self.pipe.recv()
        if not done:
            raise what
        return what

    def __call__(self, function: Callable, *args: Any) -> Any:
        return self.begin(function, *args).result()

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def end(self) -> None:
        self.pipe.close()
        self.kill()


class Pipeline:
    def __init__(self, folder: Path):
        self.folder = folder
        self.socket = folder / "host"
        self.stages: list[Stage] = []

    def extra(self, stage: int, **more: Any) -> dict[str, Any]:
        given = {"stage_id": stage, "socket": str(self.socket), "deployment": "tests", "pool_bytes": 16 << 20}
        return {key: value for key, value in (given | more).items() if value is not None}

    def stage(self, stage: int, **more: Any) -> Stage:
        made = Stage(self.extra(stage, **more))
        self.stages.append(made)
        return made

    def bare(self) -> Stage:
        """One that makes its connectors itself."""
        made = Stage(None)
        self.stages.append(made)
        return made

    def host(self) -> int:
        """The process of the host."""
        (found,) = hosts(self.folder)
        return found

    def lose_host(self) -> None:
        gone = os.pidfd_open(self.host())
        signal.pidfd_send_signal(gone, signal.SIGKILL)
        wait_for(lambda: not hosts(self.folder))
        os.close(gone)

    def end(self) -> None:
        for stage in self.stages:
            stage.end()
        kill(hosts(self.folder))


def kill(processes: list[int]) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def hosts(folder: Path, name: str = "") -> list[int]:
    """Processes of hosts whose socket is in this folder, and has a name that begins so."""
    found = []
    for line in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = line.read_bytes().split(b"\0")
            if b"kvferry.host" in words and any(word.startswith(bytes(folder / name)) for word in words):
                found.append(int(line.parent.name))
    return found


def wait_for(condition: Callable[[], Any]) -> Any:
    """What it returns as soon as that is something."""
    deadline = time.monotonic() + PATIENCE_S
    while not (what := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(condition.__qualname__)
        time.sleep(0.002)
    return what


# What stages do.


def put(here: Any, key: str, data: Any, stages: tuple[str, str] = ("0", "1")) -> Any:
    return here.connector.put(*stages, key, data)


def put_chunk(
    here: Any, request: str, chunk: int, data: Any, stages: tuple[str, str] = ("0", "1"), goes_on: bool = False
) -> Any:
    """As vLLM-Omni's adapter of chunks puts: the first chunk is one of another request, unless it goes on."""
    if chunk == 0 and not goes_on:
        here.lives[request] = object()
    with here.connector.chunks_of((*stages, request), here.lives[request]):
        return put(here, f"{request}_{stages[0]}_{chunk}", data, stages)


def plain(obj: Any) -> Any:
    """A copy of a payload that outlives its slot, and goes through a pipe."""
    if hasattr(obj, "release"):
        made = obj.object()
        kind = obj.kind
        return kind, made.clone() if isinstance(made, torch.Tensor) else bytes(made)
    if isinstance(obj, torch.Tensor):
        return obj.clone()
    if isinstance(obj, dict):
        return {key: plain(value) for key, value in obj.items()}
    if isinstance(obj, list):
        return [plain(value) for value in obj]
    return obj


def poll(here: Any, key: str, stages: tuple[str, str] = ("0", "1"), metadata: Any = None) -> Any:
    """One `get`: None, or (what was put, bytes)."""
    got = here.connector.get(*stages, key, metadata)
    return got and (plain(got[0]), got[1])


def get(here: Any, key: str, stages: tuple[str, str] = ("0", "1"), metadata: Any = None) -> Any:
    """What was put, when it is there."""
    return wait_for(lambda: poll(here, key, stages, metadata))[0]


def want(here: Any, key: str, stages: tuple[str, str] = ("0", "1")) -> None:
    """What is not there; when this returns the host knows."""
    assert here.connector.get(*stages, key) is None
    settle(here)


def settle(here: Any) -> None:
    """Returns when the host has done what this process said. What it said others may overtake."""
    if (channel := here.connector._channels.current()) is not None:
        slot, _ = channel.link.reserve(20_000, PATIENCE_S)
        channel.link.give_back(slot)


def clean_up(here: Any, key: str, stages: tuple[str, str] = ("0", "1")) -> None:
    here.connector.cleanup(key, *stages)
    settle(here)


def keep(here: Any, key: str, stages: tuple[str, str] = ("0", "1")) -> None:
    """Gets it, and reads it until `drop`."""
    here.kept[key] = wait_for(lambda: here.connector.get(*stages, key))[0]


def kept(here: Any, key: str) -> Any:
    return plain(here.kept[key])


def drop(here: Any, key: str) -> None:
    del here.kept[key]


def lost(here: Any, key: str, stages: tuple[str, str] = ("0", "1"), metadata: Any = None) -> str:
    """Of a payload that does not come: the kind of the loss."""

    def raised() -> str | None:
        try:
            assert here.connector.get(*stages, key, metadata) is None
        except PayloadLost as error:
            return error.kind
        return None

    return wait_for(raised)


def health(here: Any) -> dict[str, Any]:
    return here.connector.health()


def close(here: Any) -> float:
    """Seconds that it takes."""
    begun = time.monotonic()
    here.connector.close()
    return time.monotonic() - begun
