"""`python -m kvferry`: the program inside the interpreter."""

import subprocess
import sys


def kvferry(*args: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "kvferry", *args], capture_output=True, text=True, timeout=120
    )


def test_the_doctor_starts_processes_of_the_program():
    # They look at one another; a Python without kvferry's arguments would fail at once.
    said = kvferry("doctor").stdout.splitlines()
    assert [line for line in said if line.startswith("ok    memory-file ")], said


def test_a_bench_within_the_host_has_its_other_side():
    ended = kvferry("bench", "--fabric", "host", "--seconds", "0.05", "--sizes", "4096", "--batches", "1")
    assert ended.returncode == 0, ended.stderr
