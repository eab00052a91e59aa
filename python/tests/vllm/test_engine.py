"""What the connector starts in vLLM's processes."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from halves import config
from kvferry.start import unbound
from kvferry.vllm.check import check

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


def test_socket_that_no_host_can_make_is_an_error_where_the_keys_are_checked(model, tmp_path, monkeypatch):
    for path, says in [
        ("/proc/k.sock", "socket /proc/k.sock: nothing can be made in its folder by user .* XDG_RUNTIME_DIR"),
        (tmp_path / "absent" / "k.sock", "its folder .*/absent: No such file.* make it, or give another path"),
        (tmp_path / ("k" * 108), "can have 107: give a shorter one"),
    ]:
        made = config(model, "prefill", {"socket": str(path)})
        with pytest.raises(ValueError, match=says):
            check(made, before_start=True)
        # Such a host is there, or comes.
        made.kv_transfer_config.kv_connector_extra_config["host"] = "connect"
        check(made, before_start=True)
    check(config(model, "prefill", {"socket": str(tmp_path / "k.sock")}), before_start=True)
    assert not list(tmp_path.iterdir())
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/proc")
    with pytest.raises(ValueError, match="no folder for the socket of the kvferry host: .*/proc/kvferry-"):
        check(config(model, "prefill", {}), before_start=True)
