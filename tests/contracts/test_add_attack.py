"""An attack that is added takes its file and one entry of the registry: all else finds it there."""

import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

import vitlens
from tests.kit.odd import odd_images, shared_odd
from vitlens.attacks import registry
from vitlens.attacks.algorithm import Setting
from vitlens.attacks.descent import Descent, pgd
from vitlens.attacks.registry import ATTACKS, Attack, comparisons
from vitlens.cli.main import run
from vitlens.commands.registry import COMMANDS
from vitlens.commands.run.publish import read_folder

NAME = "pgd-again"
ENTRY = Attack(
    NAME, "PGD again", "linf", "budget", "nobody 2000", "PGD of a longer stride", function="throw_away_attack:again",
    options={"stride": 4.0}, random_start=True, steps=7, iterative=True, strong=True,
    stronger_than={"pgd": "a longer stride"},
)  # fmt: skip


def again(setting: Setting, *, stride: float) -> Descent:
    return pgd(setting, stride=stride)


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A throw-away attack: its file, and its entry in the one mapping."""
    file = ModuleType("throw_away_attack")
    file.again = again  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, file.__name__, file)
    monkeypatch.setitem(registry._BY_NAME, NAME, ENTRY)
    yield
    monkeypatch.undo()


@pytest.mark.usefixtures("added")
def test_the_public_function_finds_it_and_a_curve_is_the_attack_at_each_epsilon():
    given = shared_odd(), odd_images(4), "predicted"
    result = vitlens.attack(*given, method=NAME, epsilon=1.0)
    assert result.success.any()
    assert result.forwards.max() <= ENTRY.steps + 1
    curve = vitlens.attack(*given, method=NAME, epsilons=(0.0, 0.1, 1.0))
    assert torch.equal(curve.success[-1], result.success)
    assert not curve.success[0].any()


@pytest.mark.usefixtures("added")
def test_its_parts_passes_and_checks_follow_from_its_fields():
    assert ATTACKS[NAME].parts == (ENTRY,)
    assert ATTACKS[NAME].slug == "pgd-again-linf"
    assert ATTACKS[NAME].passes(restarts=2) == 7 * 2
    assert ATTACKS[NAME].takes_more_steps
    assert list(comparisons(["fgsm", "pgd", NAME, "square"]))[-1] == ("pgd", NAME, "a longer stride")
    assert ("fgsm", NAME, "one step against many") in comparisons(["fgsm", NAME])
    assert ("square", NAME, "without gradients against with") in comparisons(["square", NAME])


@pytest.mark.usefixtures("added")
def test_the_command_line_lists_it(monkeypatch, capsys):
    assert COMMANDS["attack"].options  # imported, so that it is put back as it was
    monkeypatch.delitem(sys.modules, "vitlens.commands.attack.options")  # read again, as a new process does
    monkeypatch.setenv("COLUMNS", "200")
    assert run(["attack", "--help"]) == 0
    assert NAME in capsys.readouterr().out


@pytest.mark.usefixtures("added")
def test_the_command_runs_and_reports_it(tiny_vit, tmp_path):
    line = ["attack", str(tiny_vit), "--data", "digits", "--limit", "2", "--attack", f"fgsm,{NAME}", "--device", "cpu"]
    line += ["--steps", f"{NAME}=3", "--epsilon", "0,8", "--no-corruptions", "--no-inside", "--quiet"]
    assert run([*line, "--out", str(tmp_path / "out")]) == 0
    record = read_folder(tmp_path / "out")
    assert {"fgsm", NAME} <= {row.name for row in record.attacks}
    assert COMMANDS["attack"].report(record).claims
    assert ENTRY.title in (tmp_path / "out" / "report.md").read_text()
