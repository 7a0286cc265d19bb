"""What a model supports is what works, what is listed and what is refused, whatever its family."""

import dataclasses
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from torch import Tensor
from torchvision.models import resnet18 as torchvision_resnet18

from tests.kit.forms import every_view
from tests.lens.tiny import images, model_of, ours, shaken, timm_model, torchvision_swin, torchvision_vit
from vitlens import ablate, attack, compare, evaluate, explain, features, profile, rollout, statistics
from vitlens.analysis.attention.weights import attention_maps
from vitlens.analysis.walkthrough.public import walkthrough
from vitlens.attribution.explain import methods_for
from vitlens.attribution.look import look
from vitlens.cli import main
from vitlens.commands.registry import COMMANDS
from vitlens.commands.run import load as loading
from vitlens.commands.train import start as train_start
from vitlens.data.digits import CLASSES as DIGITS
from vitlens.data.digits import digits
from vitlens.data.split import Split
from vitlens.errors import UnknownNameError, UnsupportedError
from vitlens.models.model import Model
from vitlens.models.naming import ModelName, parse_model
from vitlens.models.rebuild import for_classes
from vitlens.models.resnet import build_resnet
from vitlens.models.support import CHECKS, supported


def library(name: str, *, size: int = 64, **options: object) -> Model:
    """A model of timm at its own width, where it is small."""
    model = shaken(lambda: timm.create_model(name, num_classes=10, **options), scale=0.01)
    return model_of(model, alias=name, size=(size, size))


MODELS: dict[str, Callable[[], Model]] = {
    "cls": partial(ours, size=(32, 32), patch_size=(8, 8), classes=10),
    "mean": partial(timm_model, "vit_wee_patch16_reg1_gap_256", num_classes=10),
    "distilled": partial(timm_model, "deit_tiny_distilled_patch16_224", num_classes=10),
    "class-attention": partial(timm_model, "cait_xxs24_224", num_classes=10),
    "map-pooling": partial(timm_model, "vit_base_patch16_siglip_224", num_classes=10),
    "headless": partial(timm_model, "vit_tiny_patch16_224", num_classes=0),
    "windows": partial(timm_model, "swin_tiny_patch4_window7_224", num_classes=10),
    "channels": partial(
        library, "xcit_nano_12_p16_224", size=32, img_size=32, patch_size=16, embed_dim=32, depth=1, num_heads=2
    ),
    "channels-alone": partial(library, "edgenext_xx_small"),
    "mixed-windows": partial(
        library, "maxvit_rmlp_pico_rw_256", img_size=64, depths=(1, 1, 1, 1), embed_dim=(32, 32, 64, 64)
    ),
    "mobilevit": partial(library, "mobilevit_xxs"),
    "pooled": partial(library, "pvt_v2_b0"),
    "no-projection": partial(library, "levit_128s", size=224),
    "hybrid": partial(library, "vit_tiny_r_s16_p8_224", img_size=64),
    "resnet20": lambda: model_of(build_resnet("resnet20", classes=10, image_size=(32, 32)), alias="resnet20"),
    "torchvision-vit": partial(torchvision_vit, classes=10),
    "torchvision-swin": partial(torchvision_swin, classes=10),
    "torchvision-resnet": lambda: model_of(shaken(lambda: torchvision_resnet18(num_classes=10)), size=(64, 64)),
}
QUICK = ("cls", "class-attention", "map-pooling", "headless", "windows", "channels", "resnet20")
WITHOUT = {  # the commands that a family lacks: from what the family is, not from the code
    "headless": {"look", "study", "audit", "predict", "evaluate", "ablate", "compare", "attack", "demo"},
    "channels": {"study", "rollout", "walkthrough"},
    "channels-alone": {"study", "rollout", "attention", "stats", "walkthrough"},
    "mixed-windows": {"study", "rollout", "walkthrough"},
    "mobilevit": {"study", "rollout", "attention", "walkthrough"},
    "pooled": {"study", "rollout", "walkthrough"},
    "no-projection": {"study", "rollout", "ablate", "walkthrough"},
    "resnet20": {"study", "rollout", "attention", "stats", "ablate", "walkthrough"},
    "torchvision-resnet": {"study", "rollout", "attention", "stats", "ablate", "walkthrough"},
    "windows": {"walkthrough"},
    "torchvision-swin": {"walkthrough"},
    "class-attention": {"walkthrough"},
}


@cache
def family(name: str) -> Model:
    model = MODELS[name]()
    model.alias = name
    outputs = model(images(model.input_size, batch=1)).shape[1]
    model.classes = () if name == "headless" else DIGITS if outputs == 10 else tuple(map(str, range(outputs)))
    return model


def few(model: Model) -> Split:
    split = digits("test").limit(4)
    if outputs_of(model) not in (0, len(DIGITS)):
        return replace(split, classes=model.classes, labels=split.labels % len(model.classes))
    return split


def outputs_of(model: Model) -> int:
    return len(model.classes)


FUNCTIONS: dict[str, Callable[[Model, Tensor, Tensor], object]] = {
    "train": lambda model, _images, _labels: for_classes(model, ("a", "b", "c")),
    "look": lambda model, batch, _labels: look(model, batch),
    "evaluate": lambda model, _images, _labels: evaluate(model, few(model)),
    "attention": lambda model, batch, _labels: attention_maps(model, batch),
    "rollout": lambda model, batch, _labels: rollout(model, batch),
    "stats": lambda model, batch, _labels: statistics(model, batch),
    "ablate": lambda model, batch, labels: ablate(model, batch, labels),
    "compare": lambda model, _images, _labels: compare(model, model, few(model)),
    "explain": lambda model, batch, _labels: explain(model, batch, method=methods_for(model)[-1]),
    "attack": lambda model, batch, _labels: attack(model, batch, "predicted", method="fgsm", epsilon=0.01),
    "features": lambda model, batch, _labels: features(model, batch),
    "profile": lambda model, _images, _labels: profile(model, batch_sizes=(1,)),
    "demo": lambda model, batch, _labels: every_view(model, batch),
    "walkthrough": lambda model, batch, _labels: walkthrough(model, batch[:1]),
}


NEEDS = {word: command.needs for word, command in COMMANDS.items() if command.needs is not None}


def test_every_command_that_takes_a_model_has_its_needs():
    fields = {word: {field.name for field in dataclasses.fields(command.options)} for word, command in COMMANDS.items()}
    takes = {word for word, names in fields.items() if {"model", "models"} & names}
    assert set(NEEDS) == takes
    assert {need for needs in NEEDS.values() for need in needs} <= set(CHECKS)
    with pytest.raises(UnknownNameError):
        family("resnet20").supports("data")


SLOW = pytest.mark.slow


def quick(name: str) -> bool:
    return name in QUICK


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if quick(name) else SLOW) for name in MODELS])
def test_a_family_supports_what_it_is_made_for(name):
    model = family(name)
    refused = {command for command in NEEDS if model.supports(command) is not None}
    assert refused == WITHOUT.get(name, set())
    assert supported(model) == tuple(command for command in NEEDS if command not in refused)
    meta = model_of(deepcopy(model.module), alias=name, size=model.input_size).to("meta")
    meta.classes = model.classes
    assert supported(meta) == supported(model)  # shapes decide
    for command in refused:
        reason = model.supports(command)
        assert reason.partition(" supports ")[2].split(", ") == list(supported(model))
        assert "expected" in reason
        assert "found" in reason
        assert "\n" not in reason


PAIRS = [pytest.param(name, command, marks=() if quick(name) else SLOW) for name in MODELS for command in FUNCTIONS]


@pytest.mark.parametrize(("name", "command"), PAIRS)
def test_what_is_supported_works_and_what_is_not_is_refused_with_the_same_reason(name, command):
    model = family(name)
    batch, labels, reason = images(model.input_size), torch.tensor([0, 1]), model.supports(command)
    if reason is None:
        assert FUNCTIONS[command](model, batch, labels) is not None
        return
    with pytest.raises(UnsupportedError) as refusal:
        FUNCTIONS[command](model, batch, labels)
    assert str(refusal.value) == reason


LINES = {  # a command line for each, as short as it can be
    "predict": "--data digits --limit 2",
    "train": "--data digits --limit 40 --epochs 1 --batch-size 20",
    "evaluate": "--data digits --limit 4",
    "attention": "--data digits --limit 2",
    "rollout": "--data digits --limit 2",
    "stats": "--data digits --limit 3",
    "ablate": "--data digits --limit 8",
    "compare": "--data digits --limit 6 --panels 2 --maps 4 --no-harder",
    "explain": "--data digits --limit 2",
    "attack": "--data digits --limit 4 --attack fgsm --epsilon 4 --no-corruptions --no-inside",
    "features": "--data digits --limit 24 --bank 60 --no-cache --k 1",
    "profile": "--batch-sizes 1",
}


# study and audit have the others as chapters; demo runs until it is stopped
ON_A_MODEL = [command for command in NEEDS if command not in ("study", "audit", "demo")]


def typed(command: str, name: str, out: Path) -> list[str]:
    if command == "look":
        picture = out.parent / "picture.png"
        Image.fromarray(np.random.default_rng(0).integers(0, 255, (40, 40, 3), dtype=np.uint8)).save(picture)
        return [command, str(picture), "--model", name, "--out", str(out), "--device", "cpu", "--quiet"]
    other = "cls" if name == "resnet20" else "resnet20"  # a model is not compared with itself
    names = [name, other] if command == "compare" else [name]
    options = LINES.get(command, "--data digits --limit 2")
    return [command, *names, *options.split(), "--out", str(out), "--device", "cpu", "--quiet"]


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command line finds the models of this file by their names."""

    def load(name: str | ModelName, **_options: object) -> Model:
        named = name if isinstance(name, ModelName) else parse_model(name)
        found = family(named.name)
        twin = model_of(found.module, alias=named.alias, size=found.input_size)
        twin.classes, twin.provenance = found.classes, found.provenance
        return twin

    monkeypatch.setattr(loading, "load", load)
    monkeypatch.setattr(train_start, "load", load)


@pytest.mark.parametrize("command", ["evaluate", "attention", "rollout"])
def test_a_command_refuses_before_it_makes_a_folder(command, named, tmp_path, capsys):
    for name in ("headless", "resnet20", "mobilevit"):
        reason = family(name).supports(command)
        if reason is not None:
            assert main.run(typed(command, name, tmp_path / "out")) == 2
            assert reason in capsys.readouterr().err
            assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize("command", ON_A_MODEL)
@pytest.mark.parametrize("name", MODELS)
def test_a_command_runs_where_it_is_supported_and_is_refused_elsewhere(name, command, named, tmp_path, capsys):
    reason = family(name).supports(command)
    code = main.run(typed(command, name, tmp_path / "out"))
    said = capsys.readouterr().err
    assert code == (0 if reason is None else 2), said
    if reason is not None:
        assert reason in said
        assert not (tmp_path / "out").exists()
