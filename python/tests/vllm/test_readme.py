"""Runs the README's commands for vLLM unchanged, except for the ports."""

import json
import os
import re
import subprocess
from pathlib import Path

import model as tiny
import pytest
from ports import free_ports
from server import START_S

README = Path(__file__).parents[3] / "README.md"
PORTS = ("8000", "36367", "8100", "8200")


def commands() -> str:
    """The commands from the router to the metrics of the decode, as one script."""
    section = README.read_text().split("\n## Serve vLLM\n", 1)[1].split("\n## ", 1)[0]
    blocks = re.findall(r"```console\n(.*?)```", section, re.S)
    [started] = [block for block in blocks if "kvferry router" in block]
    [asked] = [block for block in blocks if "/v1/completions" in block]
    script = re.sub(r"^\$ ", "", started + asked, flags=re.M)
    _, script = script.split("\nkvferry router", 1)
    admin, *ports = free_ports(1 + len(PORTS))
    script = f"kvferry router --admin-addr 127.0.0.1:{admin}" + script
    for port, free in zip(PORTS, ports, strict=True):
        script = re.sub(rf"\b{port}\b", str(free), script)
    return script


@pytest.mark.wide
def test_commands_of_the_readme_serve_a_request(tmp_path):
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "kvferry").symlink_to(os.environ["KVFERRY_BIN"])
    path = f"{programs}:{os.environ['PATH']}"
    model = tiny.main([str(tmp_path / "tiny-model")])
    script = f"set -m\n{commands()}\nkill %1 %2 %3\nwait\n"
    log = tmp_path / "log"
    environment = os.environ | {"MODEL": model, "PATH": path}
    with log.open("w") as errors:
        ended = subprocess.run(["bash", "-c", script], env=environment, cwd=tmp_path, text=True,
                               stdout=subprocess.PIPE, stderr=errors, timeout=START_S + 120)
    told = f"{ended.stdout}\n{log.read_text(errors='replace')[-4000:]}"
    # The servers write to the same place.
    begin = ended.stdout.find('{"id":"cmpl-')
    assert begin >= 0, told
    answer, _ = json.JSONDecoder().raw_decode(ended.stdout, begin)
    assert answer["choices"][0]["finish_reason"] == "length", told
    moved = re.findall(r"vllm:kvferry_transfer_bytes_total\{[^}]*\} ([0-9.e+]+)", ended.stdout)
    assert moved and sum(map(float, moved)) > 0, told
