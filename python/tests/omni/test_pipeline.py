"""Three stages in the processes that vLLM-Omni starts."""

import json
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent

# As vLLM-Omni has it by default, and longer than all of the rest.
INPUT_WAIT_S = 600


def run(folder: Path) -> tuple[list[dict], str]:
    """What the pipeline says, and its log."""
    log = folder / "log"
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(HERE), os.environ["PYTHONPATH"]]),
        # All at their default: the socket is in a folder of this test alone.
        "XDG_RUNTIME_DIR": str(folder),
        # Each process that is spawned imports vLLM again.
        "VLLM_WORKER_MULTIPROC_METHOD": "fork",
        "VLLM_OMNI_INPUT_WAIT_TIMEOUT_S": str(INPUT_WAIT_S),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
    }
    with log.open("w") as output:
        done = subprocess.run(
            [sys.executable, str(HERE / "three_stages.py"), str(folder)],
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            check=False,
        )
    text = log.read_text()
    assert done.returncode == 0, text[-5000:]
    said = [line.split("SAID ", 1)[1] for line in text.splitlines() if "SAID " in line]
    return [json.loads(line) for line in said], text


def test_three_stages_answer_and_a_lost_chunk_is_an_error_at_once(folder):
    said, log = run(folder)
    started = [line for line in log.splitlines() if "KvferryOmniConnector of stage" in line]
    # One in the scheduler of each stage, and one in its worker; all of one deployment, at one host.
    assert [sum(f"of stage {stage}: fabric host" in line for line in started) for stage in range(3)] == [2, 2, 2]
    assert len({line.split("deployment ")[1] for line in started}) == 1
    assert "SharedMemoryConnector" not in "".join(line for line in log.splitlines() if "Created connector" in line)
    # Two prompts through three stages.
    answers = [what for what in said if "tokens" in what]
    assert sorted(what["stage"] for what in answers) == [0, 0, 1, 1, 2, 2]
    assert all(what["tokens"] == 4 for what in answers)
    # The third one's chunks have no room: who sent it gets an error, and the log has the reason.
    (error,) = [what for what in said if "error" in what]
    assert error["seconds"] < INPUT_WAIT_S / 2
    assert "is lost (given-up): its producer gave it up" in log
    assert said[-1] == {"over": True}
