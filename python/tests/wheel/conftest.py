"""The wheel as it is shipped, alone in a virtual environment of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

# Longest wait for a command that ends by itself.
LIMIT_S = 300


class Installed:
    """A Python that has the wheel, and what the wheel depends on."""

    def __init__(self, folder: Path, wheel: Path):
        self.folder = folder
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        self.run("pip", "install", "--quiet", str(wheel))

    def environment(self, **more: str) -> dict[str, str]:
        """With neither Rust nor anything of the checkout in it, and as if nobody had activated it."""
        ours = ("PYTHON", "MORI", "KVFERRY")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        return {**kept, "PATH": "/usr/local/bin:/usr/bin:/bin", **more}

    def command(self, name: str, *args: str) -> list[str]:
        return [f"{self.folder}/bin/{name}", *args]

    def start(self, name: str, *args: str) -> subprocess.Popen:
        """One whose output is read."""
        return subprocess.Popen(
            self.command(name, *args),
            cwd=self.folder,
            env=self.environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, name: str, *args: str, codes: tuple[int, ...] = (0,), **more: str) -> str:
        """What it says."""
        ended = subprocess.run(
            self.command(name, *args),
            cwd=self.folder,
            env=self.environment(**more),
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        assert ended.returncode in codes, f"{name} {args}: {ended.returncode}: {ended.stdout}{ended.stderr}"
        return ended.stdout


@pytest.fixture(scope="session")
def wheel() -> Path:
    """The file that was built."""
    [file] = Path(os.environ["KVFERRY_WHEEL"]).glob("*.whl")
    return file.resolve()


@pytest.fixture(scope="session")
def installed(wheel, tmp_path_factory) -> Installed:
    return Installed(tmp_path_factory.mktemp("installed") / "venv", wheel)
