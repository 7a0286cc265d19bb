"""An attack that is added takes its file and one entry of the registry: all else finds it there."""

import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
import typer
from typer.testing import CliRunner

import vitlens
from tests.kit.attacked import perceptron, pictures, predictions
from vitlens.attacks import registry
from vitlens.attacks.algorithm import Setting
from vitlens.attacks.descent import Descent, pgd
from vitlens.attacks.registry import ATTACKS, Attack, comparisons
from vitlens.cli.build import command_function
from vitlens.cli.main import run
from vitlens.commands.attack.options import AttackOptions
from vitlens.commands.registry import COMMANDS
from vitlens.errors import UnknownNameError

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


@pytest.fixture
def attacked() -> tuple[vitlens.Model, torch.Tensor, torch.Tensor]:
    model, images = perceptron(), pictures(4)
    return model, images, predictions(model, images)


@pytest.mark.usefixtures("added")
def test_the_public_functions_find_it(attacked):
    result = vitlens.attack(*attacked, method=NAME, epsilon=1.0)
    assert result.success.any()
    assert result.forwards.max() <= ENTRY.steps + 1
    found = vitlens.attack(*attacked, method=NAME, epsilons=(0.0, 0.1, 1.0))
    assert torch.equal(found.success[-1], result.success)


def test_it_is_gone_afterwards(attacked):
    with pytest.raises(UnknownNameError, match=f"no attack '{NAME}'"):
        vitlens.attack(*attacked, method=NAME)


@pytest.mark.usefixtures("added")
def test_it_is_listed_with_its_fields():
    assert NAME in ATTACKS
    assert ATTACKS[NAME].parts == (ENTRY,)
    assert ATTACKS[NAME].slug == "pgd-again-linf"
    assert ATTACKS[NAME].passes(restarts=2) == 7 * 2


@pytest.mark.usefixtures("added")
def test_the_command_line_lists_and_takes_it(monkeypatch):
    calls: list[AttackOptions] = []
    replaced = ModuleType("vitlens.commands.attack.measure")
    replaced.measure = calls.append  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, replaced.__name__, replaced)
    assert run(["attack", "vit-digits", "--attack", f"fgsm,{NAME}", "--steps", f"{NAME}=3"]) == 0
    (options,) = calls
    assert options.attacks == ("fgsm", NAME)
    assert options.steps_for(NAME) == 3
    monkeypatch.delitem(sys.modules, "vitlens.commands.attack.options")  # read again, as a new process does
    line = typer.Typer()
    line.command()(command_function(COMMANDS["attack"]))
    shown = CliRunner().invoke(line, ["--help"], terminal_width=200).output
    assert NAME in shown.replace("\n", "")


@pytest.mark.usefixtures("added")
def test_its_checks_follow_from_its_fields():
    from vitlens.commands.attack.sweep import example_attack

    assert ATTACKS[NAME].takes_more_steps
    assert list(comparisons(["fgsm", "pgd", NAME, "square"]))[-1] == ("pgd", NAME, "a longer stride")
    assert ("fgsm", NAME, "one step against many") in comparisons(["fgsm", NAME])
    assert ("square", NAME, "without gradients against with") in comparisons(["square", NAME])
    assert example_attack([NAME]) == NAME
    assert example_attack([NAME, "cw"]) == "cw"
