"""What a model supports works, is listed, and otherwise is refused, in every family."""

import dataclasses
import re
from collections.abc import Callable
from functools import cache
from itertools import product

import pytest
import torch
from torch import Tensor

import vitlens
from tests.kit.families import FAMILIES, MADE
from tests.kit.forms import every_view
from tests.kit.marks import slow_except
from vitlens import Model, Split
from vitlens.cli.main import run
from vitlens.commands.registry import COMMANDS
from vitlens.errors import UnsupportedError
from vitlens.models.sources.registry import SOURCES

QUICK = ("cls", "class-attention", "map-pooling", "headless", "windows", "channels", "resnet20")
NEEDS = {word: command.needs for word, command in COMMANDS.items() if command.needs is not None}
ATTENTION = {"attention", "maps", "chain", "statistics", "heads", "walkthrough"}
LACKS = {  # what a family does not have, by what the family is, not by the code
    "headless": {"classifier", "classes"},
    "channels": {"chain", "walkthrough"},
    "channels-alone": {"patch tokens", "maps", "chain", "statistics", "walkthrough"},
    "mixed-windows": {"patch tokens", "chain", "walkthrough"},
    "mobilevit": {"patch tokens", "maps", "chain", "walkthrough"},
    "pooled": {"patch tokens", "chain", "walkthrough"},
    "no-projection": {"patch tokens", "chain", "heads", "walkthrough"},
    "resnet20": ATTENTION | {"patch tokens"},
    "torchvision-resnet": ATTENTION | {"patch tokens"},
    "windows": {"patch tokens", "walkthrough"},
    "torchvision-swin": {"patch tokens", "walkthrough"},
    "class-attention": {"walkthrough"},
}
EACH = pytest.mark.parametrize("name", slow_except(FAMILIES, QUICK))


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SOURCES, "made", MADE)


@cache
def family(name: str) -> Model:
    return vitlens.load(f"made:{name}")


def four() -> Split:
    return vitlens.load_data("digits", limit=4)


FUNCTIONS: dict[str, Callable[[Model, Tensor, Tensor], object]] = {
    "look": lambda model, batch, _: vitlens.look(model, batch),
    "evaluate": lambda model, _, __: vitlens.evaluate(model, four()),
    "attention": lambda model, batch, _: vitlens.attention(model, batch),
    "rollout": lambda model, batch, _: vitlens.rollout(model, batch),
    "stats": lambda model, batch, _: vitlens.statistics(model, batch),
    "ablate": vitlens.ablate,
    "compare": lambda model, _, __: vitlens.compare(model, model, four()),
    # quick ones: of any model, of one with a class, of one without
    "explain": lambda model, batch, _: vitlens.explain(
        model, batch, method="saliency" if model.has_classifier else "eigencam"
    ),
    "attack": lambda model, batch, _: vitlens.attack(
        model, batch, "predicted", method="fgsm", epsilon=0.01
    ),
    "features": lambda model, batch, _: vitlens.features(model, batch),
    "profile": lambda model, _, __: vitlens.profile(model, batch_sizes=(1,)),
    "demo": lambda model, batch, _: every_view(model, batch),
    "walkthrough": lambda model, batch, _: vitlens.walkthrough(model, batch[:1]),
}
# by default; of a plain ViT and a CNN it is in tests/ui/demo
DEMO = (
    "class-attention",
    "windows",
    "channels",
)


def test_every_command_that_takes_a_model_has_its_needs():
    fields = {
        word: {field.name for field in dataclasses.fields(command.options)}
        for word, command in COMMANDS.items()
    }
    assert set(NEEDS) == {word for word, names in fields.items() if {"model", "models"} & names}
    assert FUNCTIONS.keys() <= NEEDS.keys()


@EACH
def test_a_family_supports_what_it_is_made_for_and_the_rest_is_refused_with_the_same_reason(name):
    model = family(name)
    batch = torch.rand(2, 3, *model.input_size, generator=torch.Generator().manual_seed(0))
    reasons = {command: model.supports(command) for command in NEEDS}
    able = [command for command, reason in reasons.items() if reason is None]
    lacking = LACKS.get(name, set())
    assert set(reasons) - set(able) == {
        command for command, needs in NEEDS.items() if lacking & set(needs)
    }
    for command, reason in reasons.items():
        function = FUNCTIONS.get(command)
        if reason is None:
            if function is not None and (command != "demo" or name in DEMO or name not in QUICK):
                assert function(model, batch, torch.tensor([0, 1])) is not None
            continue
        supported = re.sub(r" \([^)]*\)", "", reason.partition(" supports ")[2])  # without methods
        assert supported.split(", ") == able
        assert "\n" not in reason
        if function is not None:
            with pytest.raises(UnsupportedError) as refusal:
                function(model, batch, torch.tensor([0, 1]))
            assert str(refusal.value) == reason


LINES = {  # a command line for each, as short as it can be; another is given two digits
    "train": "--data digits --limit 40 --epochs 1 --batch-size 20",
    "ablate": "--data digits --limit 8",
    "compare": "--data digits --limit 6 --panels 2 --maps 4 --no-harder",
    "attack": "--data digits --limit 4 --attack fgsm --epsilon 4 --no-corruptions --no-inside",
    "features": "--data digits --limit 24 --bank 60 --no-cache --k 1",
    "profile": "--batch-sizes 1",
}
# study and audit have the others as chapters; demo runs until it is stopped
ON_A_MODEL = [command for command in NEEDS if command not in ("study", "audit", "demo")]
PAIRS = [("headless", "evaluate"), ("resnet20", "rollout"), ("cls", "predict")]
MORE = [
    pytest.param(*pair, marks=pytest.mark.slow)
    for pair in product(FAMILIES, ON_A_MODEL)
    if pair not in PAIRS
]


@pytest.mark.parametrize(("name", "command"), [*PAIRS, *MORE])
def test_a_command_runs_where_it_is_supported_and_is_refused_elsewhere(
    name, command, pictures, tmp_path, capsys
):
    reason = family(name).supports(command)
    out = tmp_path / "out"
    line = [f"made:{name}", *LINES.get(command, "--data digits --limit 2").split()]
    if command == "look":
        line = [str(pictures / "0.png"), "--model", f"made:{name}"]
    elif command == "compare":  # a model is not compared with itself
        line.insert(1, "made:cls" if name == "resnet20" else "made:resnet20")
    code = run([command, *line, "--out", str(out), "--device", "cpu", "--quiet"])
    said = capsys.readouterr().err
    assert code == (0 if reason is None else 2), said
    assert reason is None or (reason in said and not out.exists())
