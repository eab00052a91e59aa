"""The images that were built: what is in them, who may change it, and that they run as their user."""

import json
import os
import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from containerfiles import ROOT
from started import line_of, served

USER = 10001
MIB = 1 << 20
# Of all that the image adds to its base.
ADDED_MAX = 48 * MIB
LIMIT_S = 300
ADDED = {"usr/bin/kvferry", "usr/share/kvferry", "usr/share/doc/kvferry", "etc/ssl/certs/ca-certificates.crt"}
# What everybody may write to, of each base.
SHARED = {"tmp", "var/tmp", "run/lock"}
UNWANTED = {"curl", "wget", "cargo", "rustc", "gcc", "cc", "nc"}
PROMPT = {"model": "kvferry-tiny", "prompt": [1, 2, 3], "max_tokens": 4}


def buildah(*args: str, codes: tuple[int, ...] = (0,)) -> str:
    command = [*shlex.split(os.environ["KVFERRY_BUILDAH"]), *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode in codes, f"{args}: {done.returncode}: {done.stdout}{done.stderr}"
    return done.stdout.strip()


class Image:
    """One that was built, and a container of it."""

    def __init__(self, name: str):
        told = json.loads(buildah("inspect", "--type", "image", name))
        self.config = told["Docker"]["config"]
        self.container = buildah("from", "--pull-never", name)
        self.root = Path(buildah("mount", self.container))

    def command(self, *args: str) -> list[str]:
        return ["run", "--isolation", "chroot", self.container, "--", *args]

    def run(self, *args: str, codes: tuple[int, ...] = (0,)) -> str:
        return buildah(*self.command(*args), codes=codes)

    def start(self, *args: str) -> subprocess.Popen:
        """One whose first line is read."""
        command = [*shlex.split(os.environ["KVFERRY_BUILDAH"]), *self.command(*args)]
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)

    def files(self) -> Iterator[tuple[str, os.stat_result]]:
        """All that is in it, by its path from the root."""
        for folder, folders, names in os.walk(self.root):
            for name in [*folders, *names]:
                path = Path(folder, name)
                yield str(path.relative_to(self.root)), path.lstat()


@pytest.fixture(scope="module", params=["localhost/kvferry", "localhost/vllm-kvferry"])
def each(request) -> Iterator[Image]:
    image = Image(request.param)
    yield image
    buildah("rm", image.container)


@pytest.fixture(scope="module")
def program() -> Iterator[Image]:
    image = Image("localhost/kvferry")
    yield image
    buildah("rm", image.container)


@pytest.fixture(scope="module")
def engine() -> Iterator[Image]:
    image = Image("localhost/vllm-kvferry")
    yield image
    buildah("rm", image.container)


def version() -> str:
    return tomllib.loads((ROOT / "Cargo.toml").read_text())["workspace"]["package"]["version"]


def test_the_image_says_what_it_is(each):
    labels = {name.rpartition(".")[2]: value for name, value in each.config["Labels"].items()}
    assert labels["version"] == version()
    assert re.fullmatch("[0-9a-f]{40}", labels["revision"])
    assert each.config["User"] == f"{USER}:{USER}"
    assert each.config["Healthcheck"]["Test"][:3] == ["CMD", "kvferry", "health"]
    assert each.run("kvferry", "--version") == f"kvferry {version()}"


def test_its_user_can_change_nothing(each):
    """Each file is looked at with the rights of that user: its owner, or others."""
    home = "cache"
    writable = []
    for path, stat in each.files():
        is_link = stat.st_mode & 0o170000 == 0o120000
        is_below = any(path == shared or path.startswith(f"{shared}/") for shared in (*SHARED, home))
        if is_link or is_below or path.startswith(("dev/", "proc/", "sys/")):
            continue
        if USER in (stat.st_uid, stat.st_gid) or stat.st_mode & 0o002:
            writable.append(path)
    assert writable == []


def of_first_line(process: subprocess.Popen) -> dict[str, str]:
    """Where it listens."""
    return dict(word.split("=", 1) for word in line_of(process).split() if "=" in word)


def ended(started: list[subprocess.Popen]) -> None:
    for process in reversed(started):
        process.terminate()
    for process in started:
        process.wait(LIMIT_S)
        process.stdout.close()


ROUTER = ["kvferry", "router", *(f"--{port}=127.0.0.1:0" for port in ("listen", "admin-addr", "discovery"))]


def test_three_containers_serve_a_request(program):
    started = []
    try:
        started.append(program.start(*ROUTER, "--drain-timeout=1"))
        said = of_first_line(started[0])
        health = ("kvferry", "health", "--timeout=60")
        assert program.run(*health, f"{said['admin']}/liveness").endswith(": 200 OK")
        assert program.run(*health, f"{said['admin']}/readiness", codes=(1,)).endswith(": 503 Service Unavailable")
        proxy = said["discovery"].removeprefix("tcp://")
        for role in ("prefill", "decode"):
            started.append(program.start("kvferry", "serve", "--role", role, "--mode", "push", "--proxy", proxy))
            of_first_line(started[-1])
        answer = served(f"http://{said['http']}/v1/completions", PROMPT)
        assert answer["kvferry"]["source"] == "transferred", answer
        assert answer["kvferry"]["digest"] == answer["kvferry"]["expected"], answer
        assert program.run(*health, f"{said['admin']}/readiness").endswith(": 200 OK")
        assert Path(f"/proc/{said['pid']}").stat().st_uid == USER
    finally:
        ended(started)


def test_the_simulator_runs_the_scenarios_of_the_image(program):
    assert " held\n" in program.run("kvferry", "run", "scenarios/smoke/push.toml") + "\n"


# What a pod with `readOnlyRootFilesystem` has, in mounts of its own.
CONFINED = """
mount --bind "$1" "$1" && mount -o remount,bind,ro "$1" && mount -t tmpfs tmpfs "$1/tmp"
mount -t proc proc "$1/proc" && mount --rbind /dev "$1/dev"
exec chroot --userspec="$2:$2" "$1" "${@:3}"
"""


def test_a_root_that_is_read_only_will_do(program):
    """Processes of their own move the bytes of a scenario."""
    command = ["unshare", "--mount", "bash", "-euc", CONFINED, "-", str(program.root), str(USER)]
    command += ["kvferry", "run", "/usr/share/kvferry/scenarios/smoke/push.toml", "--fabric", "host"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0 and " held\n" in done.stdout, done


def test_the_certificates_of_the_image_are_taken(program):
    started = [program.start(*ROUTER, "--legs-ca=/etc/ssl/certs/ca-certificates.crt", "--drain-timeout=1")]
    try:
        assert of_first_line(started[0])["admin"]
    finally:
        ended(started)


def test_what_the_image_adds_is_small_and_root_s(program):
    found, size = set(), 0
    for path, stat in program.files():
        if stat.st_mode & 0o170000 != 0o100000:
            continue
        of = next((it for it in ADDED if path == it or path.startswith(f"{it}/")), None)
        if of:
            found.add(of)
            size += stat.st_size
            expected = 0o555 if path == "usr/bin/kvferry" else 0o444
            assert (stat.st_uid, stat.st_gid, stat.st_mode & 0o7777) == (0, 0, expected), path
        assert Path(path).name not in UNWANTED or not path.startswith(("usr/bin/", "usr/local/")), path
    assert found == ADDED
    assert size < ADDED_MAX, size
    print(f"{size / MIB:.1f} MiB beside the base")


def test_the_bill_of_materials_names_all_crates(program):
    bill = json.loads((program.root / "usr/share/doc/kvferry/kvferry.cdx.json").read_text())
    assert bill["bomFormat"] == "CycloneDX"
    about = bill["metadata"]["component"]
    assert (about["name"], about["version"]) == ("kvferry", version())
    listed = {f"{it['name']} v{it['version']}" for it in bill["components"]}
    tree = ["cargo", "tree", "--locked", "--offline", "-p", "kvferry", "--features", "full", "-e", "normal,no-proc-macro"]
    tree += ["--prefix", "none", "--target", "x86_64-unknown-linux-gnu", "--format", "{p}"]
    lines = subprocess.run(tree, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()
    used = {" ".join(line.split()[:2]) for line in lines if line} - {f"kvferry v{version()}"}
    assert len(used) > 100
    assert used - listed == set()
    without = {it["name"] for it in bill["components"] if "purl" not in it or not it.get("licenses")}
    assert without == set()


def test_the_engine_has_the_wheel_and_the_shim(engine):
    assert engine.config["Entrypoint"] == ["vllm", "serve"]
    script = "import kvferry.vllm, pwd, os; print(pwd.getpwuid(os.getuid()).pw_name, os.path.expanduser('~'))"
    assert engine.run("python3", "-c", script) == "kvferry /cache"
    # What the build did, seen by who can write to nothing of it.
    [shim] = (engine.root / "opt/kvferry/shim").glob("build-id-*/libkf_mori_shim.so")
    assert shim.stat().st_uid == 0
    variables = ["env", "KVFERRY_MORI_WITHOUT_DEVICES=1"]
    tried = engine.run(*variables, "kvferry", "doctor", "--fabric", "mori", codes=(0, 1))
    own = "/" + str(shim.relative_to(engine.root))
    assert re.search(rf"^ok +mori-shim +{own}, compiled earlier, for ", tried, re.M), tried
    [bill] = engine.root.glob("opt/venv/lib/python3*/site-packages/kvferry-*.dist-info/sboms/*.cyclonedx.json")
    assert json.loads(bill.read_text())["bomFormat"] == "CycloneDX"


def test_the_doctor_of_the_engine_says_what_is_missing(engine):
    lines = engine.run("kvferry", "doctor", "--json").splitlines()
    checks = {check["check"]: check["status"] for check in map(json.loads, lines)}
    assert checks["memory-file"] == "ok" and "fail" not in checks.values(), checks
