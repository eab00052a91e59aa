"""The command that makes the tiny model of the README."""

import json
import subprocess
import sys

import model


def made(*folders: object) -> subprocess.CompletedProcess:
    command = [sys.executable, model.__file__, *map(str, folders)]
    return subprocess.run(command, capture_output=True, text=True, timeout=600)


def test_command_writes_a_model_once_and_prints_its_folder(tmp_path):
    folder = tmp_path / "tiny-model"
    ended = made(folder)
    assert (ended.returncode, ended.stdout) == (0, f"{folder}\n"), ended
    names = {file.name for file in folder.iterdir()}
    assert names == {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    written = (folder / "model.safetensors").stat().st_mtime_ns
    assert made(folder).stdout == f"{folder}\n"
    assert (folder / "model.safetensors").stat().st_mtime_ns == written


def test_command_does_not_overwrite_another_model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "other"}))
    ended = made(tmp_path)
    assert ended.returncode == 1 and "give a new folder" in ended.stderr, ended
    assert [file.name for file in tmp_path.iterdir()] == ["config.json"]
    assert made().returncode == 1
