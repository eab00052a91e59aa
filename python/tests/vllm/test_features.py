"""The table of vLLM's features in docs/connector.md: what it says is refused is, and its tests are there."""

import copy
import re
from pathlib import Path

import pytest
from halves import config, drafts
from kvferry.vllm.check import check
from test_specs import REFUSED, group, refusal

TESTS = Path(__file__).parent
DOCUMENT = TESTS.parents[2] / "docs" / "connector.md"
STATES = {"supported", "refused", "untried"}


def rows() -> list[tuple[str, str, str, str]]:
    """Feature, state, what there is to say, and tests."""
    table = DOCUMENT.read_text().split("## What vLLM features work")[1].split("\n## ")[0]
    cells = [line[1:-1].split("|") for line in table.splitlines() if line.startswith("| ")]
    return [tuple(cell.strip() for cell in row) for row in cells[1:]]


def parallel(**changed):
    def change(made) -> None:
        made.parallel_config = copy.copy(made.parallel_config)
        for name, value in changed.items():
            setattr(made.parallel_config, name, value)

    return change


def sleeps(made) -> None:
    made.model_config = copy.copy(made.model_config)
    made.model_config.enable_sleep_mode = True


def speculates(made) -> None:
    made.speculative_config = drafts(made, "dspark")


def speculates_with_several_modules(made) -> None:
    made.speculative_config = drafts(made, modules=2)


CONFIGURED = {
    "pipeline parallelism": parallel(pipeline_parallel_size=2),
    "context parallelism": parallel(decode_context_parallel_size=2),
    "context parallelism of prefills": parallel(prefill_context_parallel_size=2),
    "several nodes by Ray": parallel(
        data_parallel_backend="ray", data_parallel_size=4, data_parallel_size_local=2
    ),
    "TP ranks on several nodes": parallel(nnodes=2),
    "drafts of another kind": speculates,
    "several MTP modules": speculates_with_several_modules,
    "sleep mode": sleeps,
}


def refused_by_configuration(model, name: str) -> str:
    made = config(model, "prefill", {})
    check(made)
    CONFIGURED[name](made)
    with pytest.raises(ValueError) as refused:
        check(made)
    return str(refused.value)


@pytest.mark.parametrize("name", CONFIGURED)
def test_what_the_configuration_asks_for_is_refused(name, model):
    assert f"`{refused_by_configuration(model, name)}`" in "".join(said for _, _, said, _ in rows())


def test_what_is_refused_is_refused_with_that_message(model):
    said = {refused_by_configuration(model, name) for name in CONFIGURED}
    said |= {refusal(model, [group(spec)]) for spec, _ in REFUSED.values()}
    for feature, state, message, _ in rows():
        messages = re.findall("`(KvferryConnector does not .*?)`", message)
        assert bool(messages) == (state == "refused"), feature
        assert set(messages) <= said, feature


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0])
def test_a_feature_has_its_test(row):
    feature, state, _, tests = row
    assert state in STATES
    names = re.findall(r"`(\w+)::(\w+)`", tests)
    assert names or state == "untried", f"{feature} has no test"
    for file, name in names:
        source = (TESTS / f"{file}.py").read_text()
        assert re.search(rf"^def {name}\(", source, re.MULTILINE), f"{file}.py has no {name}"
