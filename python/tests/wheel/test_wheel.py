"""What is in the wheel, and that it is all that has to be installed."""

import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from elftools.elf.elffile import ELFFile
from ports import free_ports
from started import line_of, served

MIB = 1 << 20

# Of the wheel, and of the library in it. With symbols they are 38 and 150.
WHEEL_MAX = 16 * MIB
LIBRARY_MAX = 32 * MIB

# glibc of Ubuntu 22.04, in which vLLM's images for ROCm are: 2.35.
GLIBC_MAX = 35

# Those that need nothing but the wheel; the others import vLLM or vLLM-Omni when they are asked for a class.
MODULES = ["kvferry", "kvferry.codes", "kvferry.host", "kvferry.line", "kvferry.omni", "kvferry.vllm"]


def test_the_name_says_which_pythons_and_systems_it_is_for(wheel):
    pattern = r"kvferry-[0-9a-z.]+-cp310-abi3-manylinux_2_(\d+)_(x86_64|aarch64)\.whl"
    name = re.fullmatch(pattern, wheel.name)
    assert name, wheel.name
    assert int(name[1]) <= GLIBC_MAX, wheel.name
    show = [sys.executable, "-m", "auditwheel", "show", str(wheel)]
    shown = subprocess.run(show, check=True, capture_output=True, text=True).stdout
    tag = re.search(r"tag:\s+\"(manylinux_2_\d+)_", " ".join(shown.split()))
    assert tag and int(tag[1].rsplit("_", 1)[1]) <= int(name[1]), shown


def test_the_library_is_stripped(wheel):
    assert wheel.stat().st_size < WHEEL_MAX, wheel.stat().st_size
    with zipfile.ZipFile(wheel) as files:
        [library] = [file for file in files.infolist() if file.filename.endswith(".so")]
        assert library.filename == "kvferry/_native.abi3.so"
        assert library.file_size < LIBRARY_MAX, library.file_size
        sections = {section.name for section in ELFFile(io.BytesIO(files.read(library))).iter_sections()}
    assert ".text" in sections
    assert not [name for name in sections if name.startswith((".debug", ".symtab"))]


def test_the_program_runs(installed):
    script = "from importlib.metadata import version; print(version('kvferry'))"
    version = installed.run("python", "-c", script)
    assert installed.run("kvferry", "--version") == f"kvferry {version}"
    checks = installed.run("kvferry", "doctor", "--json", codes=(0, 1)).splitlines()
    checks = {check["check"]: check["status"] for check in map(json.loads, checks)}
    assert checks["memory-file"] == "ok" and len(checks) > 8, checks
    # The scenario that is in the program.
    assert " held\n" in installed.run("kvferry", "run")


@pytest.mark.parametrize("module", MODULES)
def test_what_needs_no_vllm_is_imported_without_it(installed, module):
    installed.run("python", "-c", f"import {module}")


def test_the_connector_says_that_vllm_is_missing(installed):
    script = (
        "import kvferry.vllm\n"
        "try: kvferry.vllm.KvferryConnector\n"
        "except ModuleNotFoundError as why: print(why.name)"
    )
    assert installed.run("python", "-c", script) == "vllm\n"


def test_the_module_mori_is_in_it(installed):
    folder = installed.run("python", "-m", "kvferry.dropin").strip()
    script = (
        "from mori.io import BackendType, IOEngine, IOEngineConfig, RdmaBackendConfig\n"
        "engine = IOEngine('e', IOEngineConfig('127.0.0.1', 0))\n"
        "engine.create_backend(BackendType.RDMA, RdmaBackendConfig(1, -1, 1))\n"
        "print(engine.get_engine_desc().key)\n"
    )
    assert installed.run("python", "-c", script, PYTHONPATH=folder) == "e\n"


def of_the_readme(mode: str) -> tuple[list[list[str]], str, str, dict]:
    """Its commands, where it asks for readiness and for completions, and for what; with ports that are free."""
    readme = Path(__file__).parents[3] / "README.md"
    section = readme.read_text().split("\n## Try it without vLLM\n", 1)[1].split("\n## ", 1)[0]
    assert "--mode push" in section
    ports = sorted(set(re.findall(r"127\.0\.0\.1:(\d+)", section)))
    for port, free in zip(ports, free_ports(len(ports)), strict=True):
        section = section.replace(f"127.0.0.1:{port}", f"127.0.0.1:{free}")
    lines = re.findall(r"^\$ (.*)$", section.replace("--mode push", f"--mode {mode}"), re.M)
    started = [shlex.split(line)[:-1] for line in lines if line.endswith(" &")]
    assert [command[:2] for command in started] == [["kvferry", "router"], *[["kvferry", "serve"]] * 2]
    [ready] = re.findall(r"^\$ until kvferry health (\S+); do sleep 1; done$", section, re.M)
    [asked] = [shlex.split(line) for line in lines if line.startswith("curl ")]
    return started, ready, asked[1], json.loads(asked[asked.index("-d") + 1])


@pytest.mark.parametrize("mode", ["push", "pull"])
def test_three_commands_serve_a_request(installed, mode):
    commands, ready, at, body = of_the_readme(mode)
    started = []
    try:
        for command in commands:
            started.append(installed.start(*command))
            line_of(started[-1])
        answer = served(f"http://{at}", body)
        assert answer["kvferry"]["source"] == "transferred", answer
        assert answer["kvferry"]["digest"] == answer["kvferry"]["expected"], answer
        assert installed.run("kvferry", "health", "--timeout=60", ready) == f"{ready}: 200 OK\n"
    finally:
        for process in started:
            process.kill()
            process.wait()
            process.stdout.close()


def test_the_shim_for_mori_is_compiled_without_rust(installed, tmp_path):
    stand_in = Path(os.environ["KVFERRY_MORI_SHIM"]).parent
    site = installed.run("python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    package = Path(site) / "mori"
    shutil.copytree(stand_in / "include", package / "_jit-sources" / "include")
    shutil.copy(stand_in / "lib" / "libmori_io.so", package)
    mori = {"KVFERRY_CACHE": str(tmp_path), "KVFERRY_MORI_WITHOUT_DEVICES": "1"}
    tried = installed.run("kvferry", "doctor", "--fabric", "mori", codes=(0, 1), **mori)
    assert re.search(rf"^ok +mori-shim +{tmp_path}/shim/\S+, compiled now in \S+ s, for ", tried, re.M), tried
    assert re.search(r"^ok +mori-rdma-try .*every byte compared$", tried, re.M), tried
    fixed = installed.run("kvferry", "doctor", "--fix", "mori", **mori)
    assert re.search(r"^ok +mori-fix +compiled .* found as a Python package, build-id:", fixed, re.M), fixed
