"""The manifests are right, and mistakes in them are found."""

import copy
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from manifests import (
    DEPLOY,
    METRIC,
    Fleet,
    by_schema,
    connector_keys,
    document,
    metrics,
    name,
    render,
    router_flags,
)

OVERLAYS = ["base", "overlays/plain", "overlays/leaderworkerset", "overlays/llm-d", "ray"]
# Maps whose keys are the user's.
FREE = {"labels", "annotations", "matchLabels", "data", "limits", "requests", "rayStartParams"}


@pytest.fixture(scope="module")
def rendered() -> dict[str, list[dict]]:
    return {folder: render(folder) for folder in OVERLAYS}


@pytest.mark.parametrize("folder", OVERLAYS)
def test_nothing_is_wrong(rendered, folder: str):
    assert Fleet(rendered[folder]).problems() == []


def test_the_first_commands_are_right(tmp_path):
    """The kustomization that the page has one write, with the images of a registry."""
    text = re.search(r"```yaml\n(resources: .*?)```", document("kubernetes.md"), re.S)[1]
    (tmp_path / "fleet").mkdir()
    (tmp_path / "fleet/kustomization.yaml").write_text(text)
    shutil.copytree(DEPLOY, tmp_path / "deploy")
    things = render(tmp_path / "fleet")
    images = re.findall(r'"image": "([^"]+)"', json.dumps(things))
    assert sorted(set(images)) == ["REGISTRY/kvferry:TAG", "REGISTRY/vllm-kvferry:TAG"]
    assert {thing["metadata"]["namespace"] for thing in things} == {"kvferry"}


def test_metrics_of_the_page_are_there():
    said = set(METRIC.findall(document("kubernetes.md"))) - {"kvferry_app"}
    assert said and said <= metrics().keys()


def test_what_the_documents_say_is_read():
    assert {
        "vllm:kvferry_transfers_total",
        "kvferry_blocks_held",
        "kvferry_router_in_flight",
    } <= metrics().keys()
    assert metrics()["kvferry_router_instances"] == {"role", "state"}
    assert {"read_mode", "host_ip", "proxy_ping_port", "protocol"} <= connector_keys()
    assert {"--listen", "--admin-addr", "--drain-timeout", "--tls-key", "--log-format"} <= router_flags()


def fields(value, path: tuple = ()) -> Iterator[tuple]:
    """The paths of all fields that have a name."""
    if isinstance(value, list):
        for n, item in enumerate(value):
            yield from fields(item, (*path, n))
    elif isinstance(value, dict):
        for key, item in value.items():
            yield (*path, key)
            if key not in FREE:
                yield from fields(item, (*path, key))


def at(value, path: tuple):
    for step in path:
        value = value[step]
    return value


def misspelt(value, path: tuple):
    value = copy.deepcopy(value)
    of = at(value, path[:-1])
    of[path[-1] + "s"] = of.pop(path[-1])
    return value


def test_a_typo_in_any_field_of_any_kind_is_found(rendered):
    tried, missed = {}, []
    for thing in (thing for folder in OVERLAYS for thing in rendered[folder]):
        for path in fields(thing):
            shape = (thing["kind"], *("#" if isinstance(step, int) else step for step in path))
            if shape in tried or shape[1] in ("apiVersion", "kind"):
                continue
            # A map of labels.
            if shape[:3] == ("Service", "spec", "selector") and len(shape) > 3:
                continue
            tried[shape] = True
            if not by_schema(misspelt(thing, path)):
                missed.append(shape)
    assert not missed
    assert len({shape[0] for shape in tried}) == 12


def test_a_typo_in_what_is_within_a_text_is_found(rendered):
    config = next(it for it in rendered["overlays/plain"] if name(it) == "ConfigMap kvferry-dashboard")
    ray = next(it for it in rendered["ray"] if it["kind"] == "RayService")
    for thing, path, read, write in [
        (config, ("data", "kvferry.json"), json.loads, json.dumps),
        (ray, ("spec", "serveConfigV2"), yaml.safe_load, yaml.safe_dump),
    ]:
        text = read(at(thing, path))
        for field in fields(text):
            if "kv_connector_extra_config" in field[:-1]:
                continue
            changed = copy.deepcopy(thing)
            at(changed, path[:-1])[path[-1]] = write(misspelt(text, field))
            assert by_schema(changed), field


MISTAKES = yaml.safe_load(Path(__file__).with_name("mistakes.yaml").read_text())


@pytest.mark.parametrize(("folder", "called", "old", "new", "said"), MISTAKES)
def test_a_mistake_is_found(rendered, folder: str, called: str, old: str, new: str, said: str | None):
    things = {name(thing): json.dumps(thing) for thing in rendered[folder]}
    assert old in things[called]
    things[called] = things[called].replace(old, new)
    found = Fleet([json.loads(text) for text in things.values()]).problems()
    assert any(said in text for text in found) if said else found == []


def test_a_field_that_kustomize_does_not_know_is_found(tmp_path):
    for file in sorted(DEPLOY.rglob("kustomization.yaml")):
        copied = tmp_path / "deploy"
        shutil.copytree(DEPLOY, copied, dirs_exist_ok=True)
        file = copied / file.relative_to(DEPLOY)
        file.write_text(file.read_text().replace("\nresources:", "\nresource:"))
        folder = OVERLAYS[1] if "components" in file.parts else file.parent
        with pytest.raises(ValueError, match="unknown field"):
            render(copied / folder)
