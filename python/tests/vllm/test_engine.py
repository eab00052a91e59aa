"""What the connector starts in vLLM's processes."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from kvferry.start import unbound

TELL = "import os; print(*sorted(os.sched_getaffinity(0)))"
# vLLM has an OpenMP runtime loaded into each worker before anything else.
OPENMP = Path(find_spec("torch").origin).parent / "lib" / "libgomp.so.1"


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core: nothing can be bound to less")
def test_what_a_bound_worker_starts_is_not_bound():
    of_server = os.sched_getaffinity(0)
    reader, writer = os.pipe()
    if (worker := os.fork()) == 0:
        bound = {min(of_server)}
        os.sched_setaffinity(0, bound)
        os.environ |= {"LD_PRELOAD": str(OPENMP), "GOMP_CPU_AFFINITY": str(*bound)}
        with unbound() as environment:
            started = subprocess.check_output([sys.executable, "-c", TELL], env=environment)
        again = os.sched_getaffinity(0) == bound
        os.write(writer, started if again else b"the worker is not bound any more")
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as told:
        assert told.read().split() == [str(cpu) for cpu in sorted(of_server)]
    os.waitpid(worker, 0)
