"""The Containerfiles are right, and mistakes in them are found. It takes seconds, and builds nothing."""

from pathlib import Path

import pytest
import yaml
from containerfiles import FILES, IMAGES, ROOT, Containerfile, disagreements, ignored

MISTAKES = yaml.safe_load(Path(__file__).with_name("mistakes.yaml").read_text())


def problems(image: str, text: str) -> list[str]:
    file = Containerfile(text)
    # The other one is built in a folder with a wheel.
    return file.problems(ROOT if image == "kvferry" else IMAGES) or disagreements(image, file)


@pytest.mark.parametrize("image", FILES)
def test_nothing_is_wrong(image: str):
    assert problems(image, (IMAGES / FILES[image]).read_text()) == []


@pytest.mark.parametrize(("image", "old", "new", "said"), MISTAKES["containerfiles"])
def test_a_mistake_is_found(image: str, old: str, new: str, said: str):
    text = (IMAGES / FILES[image]).read_text()
    assert old in text
    found = problems(image, text.replace(old, new))
    assert any(said in it for it in found), found


def test_all_that_is_built_is_in_the_context():
    assert ignored((ROOT / ".containerignore").read_text(), ROOT) == []


@pytest.mark.parametrize(("old", "new", "said"), MISTAKES["containerignore"])
def test_a_mistake_in_the_context_is_found(old: str, new: str, said: str):
    text = (ROOT / ".containerignore").read_text()
    assert old in text
    assert any(said in it for it in ignored(text.replace(old, new, 1), ROOT))
