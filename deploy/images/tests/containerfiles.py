"""What is wrong with a Containerfile, and between it and the manifests that run its image, as a list of texts."""

import io
import json
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import yaml
from dockerfile_parse import DockerfileParser

IMAGES = Path(__file__).resolve().parents[1]
ROOT = IMAGES.parents[1]
# The image in a manifest, and its Containerfile.
FILES = {"kvferry": "kvferry.Containerfile", "vllm-kvferry": "vllm-rocm.Containerfile"}
LABELS = {"title", "description", "source", "licenses", "version", "revision"}
# Clients that do what `kvferry health` does, and more that nobody needs there.
CLIENTS = re.compile(r"\b(curl|wget|nc|netcat)\b")


def lint(text: str) -> list[str]:
    """By hadolint."""
    command = [Path(sys.executable).with_name("hadolint"), "--no-fail", "--format", "json", "-"]
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=True)
    return [f"line {it['line']}: {it['code']}: {it['message']}" for it in json.loads(done.stdout)]


class Containerfile:
    """Its instructions, with what is said of them."""

    def __init__(self, text: str):
        parser = DockerfileParser(fileobj=io.BytesIO(text.encode()))
        self.text = text
        self.found = lint(text)
        self.instructions = [it for it in parser.structure if it["instruction"] != "COMMENT"]
        starts = [n for n, it in enumerate(self.instructions) if it["instruction"] == "FROM"]
        self.before = self.instructions[: starts[0]]
        ends = [*starts[1:], len(self.instructions)]
        self.stages = [self.instructions[start:end] for start, end in zip(starts, ends, strict=True)]

    def last(self, name: str) -> str:
        """Its value in the stage that becomes the image; empty if it is not there."""
        return next((it["value"] for it in reversed(self.stages[-1]) if it["instruction"] == name), "")

    def command(self, name: str) -> list[str]:
        """What an instruction has started, without a shell."""
        text = self.last(name)
        text = text.partition(" CMD ")[2] if name == "HEALTHCHECK" else text
        try:
            return json.loads(text)
        except ValueError:
            self.found.append(f"{name} {text}: give a list, which needs no shell")
            return []

    def problems(self, context: Path) -> list[str]:
        self.bases()
        self.user()
        self.health()
        self.copied(context)
        for name in ("ENTRYPOINT", "CMD") if self.last("CMD") else ("ENTRYPOINT",):
            self.command(name)
        said = " ".join(it["value"] for it in self.stages[-1] if it["instruction"] == "LABEL")
        for label in sorted(LABELS - set(re.findall(r"org\.opencontainers\.image\.(\w+)=", said))):
            self.found.append(f"there is no label org.opencontainers.image.{label}")
        return self.found

    def bases(self) -> None:
        """Each an argument before the first stage, which pins one."""
        given = dict(it["value"].partition("=")[::2] for it in self.before if it["instruction"] == "ARG")
        for stage in self.stages:
            name = re.fullmatch(r"\$\{(\w+)\}( AS \w+)?", stage[0]["value"])
            image = given.get(name[1], "") if name else ""
            pinned = re.fullmatch(r"[a-z.]+\.[a-z]+/[a-z0-9/-]+(:(?P<tag>[\w.-]+)|@sha256:[0-9a-f]{64})", image)
            if not pinned or pinned["tag"] == "latest":
                self.found.append(f"FROM {stage[0]['value']}: {image or 'no argument'}: pin it by an argument")

    def user(self) -> None:
        if not re.fullmatch(r"[1-9]\d*:[1-9]\d*", self.last("USER")):
            self.found.append(f"USER {self.last('USER')}: give numbers, and not root's")

    def health(self) -> None:
        if self.command("HEALTHCHECK")[:2] != ["kvferry", "health"]:
            self.found.append("HEALTHCHECK: ask by kvferry health")
        for it in self.instructions:
            if client := CLIENTS.search(it["value"]):
                self.found.append(f"line {it['startline'] + 1}: {client[0]}: images have kvferry health")

    def copied(self, context: Path) -> None:
        """Sources in the context that are there, and stages that are."""
        for stage in self.stages:
            for it in stage:
                if it["instruction"] not in ("COPY", "ADD"):
                    continue
                words = shlex.split(it["value"])
                options = dict(word.partition("=")[::2] for word in words if word.startswith("--"))
                sources = [word for word in words if not word.startswith("--")][:-1]
                named = {other[0]["value"].partition(" AS ")[2] for other in self.stages}
                if options.get("--from", next(iter(named))) not in named:
                    self.found.append(f"COPY {it['value']}: there is no stage {options['--from']}")
                for source in sources if "--from" not in options else []:
                    if source != "." and not any(context.glob(source)):
                        self.found.append(f"COPY {it['value']}: {source} is not there")


def ignored(text: str, root: Path) -> list[str]:
    """What is wrong with `.containerignore`, which leaves out all that it does not name."""
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    kept = {line[1:] for line in lines if line.startswith("!")}
    found = [] if lines[:1] == ["*"] else [".containerignore: leave out all, and then name what is kept"]
    found += [f".containerignore: {name} is not there" for name in sorted(kept) if not (root / name).exists()]
    workspace = tomllib.loads((root / "Cargo.toml").read_text())["workspace"]
    needed = {member.split("/")[0] for member in workspace["members"]} | {"Cargo.toml", "Cargo.lock", "LICENSE"}
    return found + [f".containerignore: {name} is left out" for name in sorted(needed - kept)]


@cache
def documents() -> list[dict]:
    """All that is written in the manifests, as it lies there."""
    files = sorted(IMAGES.parent.rglob("*.yaml"))
    texts = [file.read_text() for file in files if "tests" not in file.parts and "schemas" not in file.parts]
    return [it for text in texts for it in yaml.safe_load_all(text) if isinstance(it, dict)]


def below(value, key: str) -> Iterator:
    """What has that name, at any depth."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, item in items:
        if name == key:
            yield item
        yield from below(item, key)


def disagreements(image: str, file: Containerfile) -> list[str]:
    """Between a Containerfile and the manifests."""
    found = []
    user, group = (int(number) for number in file.last("USER").split(":"))
    for key, number in (("runAsUser", user), ("runAsGroup", group), ("fsGroup", group)):
        for value in set(below(documents(), key)) - {number}:
            found.append(f"{image}: USER has {number}, and a manifest {key} {value}")
    containers = [it for some in below(documents(), "containers") for it in some if it.get("image") == image]
    if not containers:
        found.append(f"{image}: no manifest has it")
    exposed = {int(port) for port in file.last("EXPOSE").split()}
    asked = file.command("HEALTHCHECK")[2]
    for container in containers:
        ports = {it["name"]: it["containerPort"] for it in container["ports"]}
        entry = file.command("ENTRYPOINT")
        if container["command"][: len(entry)] != entry:
            found.append(f"{image}: ENTRYPOINT is {entry}, and a manifest starts {container['command']}")
        probe = container["livenessProbe"]["httpGet"]
        if asked != f"127.0.0.1:{ports[probe['port']]}{probe['path']}":
            found.append(f"{image}: HEALTHCHECK asks {asked}, and livenessProbe {probe}")
        # That of the host's metrics is asked for by the manifest alone.
        for port in {ports[name] for name in ports if name != "host-metrics"} - exposed:
            found.append(f"{image}: EXPOSE has no {port}")
    return found
