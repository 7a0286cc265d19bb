"""A model without a classifier: what needs a class is refused with what to type, what needs none works."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from torch import Tensor

import vitlens
from vitlens.analysis.attention.registry import ATTENTION_METHODS
from vitlens.attacks.attack import sweep
from vitlens.attribution.explain import methods_for
from vitlens.attribution.registry import ATTRIBUTIONS
from vitlens.cli.main import run
from vitlens.data.digits import digits
from vitlens.errors import UnsupportedError
from vitlens.models.anatomy import is_headless
from vitlens.models.model import Model
from vitlens.models.saved import save

NAME = "timm:eva02_tiny_patch14_224"  # timm's own configuration of it has no classes
RANDOM = ("--random-weights", "--image-size", "28", "--device", "cpu", "--quiet")


@pytest.fixture(scope="module")
def headless() -> Model:
    return vitlens.load(NAME, random_weights=True, image_size=(28, 28))


def some_images(model: Model) -> Tensor:
    return torch.rand(2, 3, *model.input_size, generator=torch.Generator().manual_seed(0))


FAMILIES = (
    "vit_tiny_patch16_224",
    "deit_tiny_distilled_patch16_224",
    "swin_tiny_patch4_window7_224",
    "crossvit_tiny_240",
    "convnext_atto",
    "resnet10t",
)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_classifier_is_read_from_the_model_and_not_from_its_name(name):
    with torch.device("meta"):
        assert is_headless(timm.create_model(name, num_classes=0))
        assert not is_headless(timm.create_model(name, num_classes=7))


def test_its_features_are_no_classes(headless, tmp_path):
    assert not headless.has_classifier
    assert headless.classes == ()
    assert headless.architecture["classes"] == 0
    assert headless(some_images(headless)).shape == (2, 192)
    save(headless, tmp_path / "model.safetensors")
    again = vitlens.load(str(tmp_path / "model.safetensors"))
    assert again.classes == ()
    assert torch.equal(again(some_images(again)), headless(some_images(headless)))
    changed = vitlens.load(NAME, random_weights=True, image_size=(28, 28), mean=(0.5, 0.5, 0.5), std=(0.2, 0.2, 0.2))
    assert changed.preprocessing.std == (0.2, 0.2, 0.2)


LABELS = torch.tensor([0, 1])
REFUSED: dict[str, Callable[[Model], object]] = {
    "ablate": lambda vit: vitlens.ablate(vit, some_images(vit), LABELS),
    "attack": lambda vit: vitlens.attack(vit, some_images(vit), "predicted"),
    "choose_method": lambda vit: vitlens.choose_method(vit, some_images(vit)),
    "compare": lambda vit: vitlens.compare(vit, vitlens.load("vit-digits"), digits("test").limit(2)),
    "compare, as the second": lambda vit: vitlens.compare(vitlens.load("vit-digits"), vit, digits("test").limit(2)),
    "evaluate": lambda vit: vitlens.evaluate(vit, digits("test").limit(2)),
    "failures": lambda vit: vitlens.failures(vit, digits("test").limit(2)),
    "load with classes": lambda _: vitlens.load(NAME, random_weights=True, classes=tuple(map(str, range(192)))),
    "relevance": lambda vit: vitlens.relevance(vit, some_images(vit)),
    "shape_bias": lambda vit: vitlens.shape_bias(vit, digits("test").limit(2)),
    "sweep": lambda vit: sweep(vit, some_images(vit), "predicted"),
    **{
        name: lambda vit, name=name: vitlens.explain(vit, some_images(vit), method=name)
        for name, method in ATTRIBUTIONS.items()
        if method.needs_class
    },
    "explain a class": lambda vit: vitlens.explain(vit, some_images(vit), method="rollout", targets=LABELS),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_needs_a_class_is_refused(headless, what):
    with pytest.raises(UnsupportedError, match=rf"no classifier.*vitlens train {NAME} --freeze-backbone") as told:
        REFUSED[what](headless)
    assert "\n" not in str(told.value)


def test_what_needs_no_class_works(headless):
    batch = some_images(headless)
    assert vitlens.attention(headless, batch)[-1].shape == (2, 3, 5, 5)
    assert vitlens.rollout(headless, batch).shape == (2, 2, 2)
    assert vitlens.statistics(headless, batch).distance.isfinite().all()
    assert vitlens.features(headless, batch).at(-1).shape == (2, 192)
    assert set(methods_for(headless)) == {"rollout", "attention", "eigencam"}
    for name in methods_for(headless):
        assert vitlens.explain(headless, batch, method=name).isfinite().all()


def test_a_method_needs_a_class_where_its_maps_change_with_it():
    """The registry's field is what the functions do: maps of two classes differ, or are the same to the bit."""
    vit = vitlens.load("vit-digits")
    batch = some_images(vit)
    for name in ("relevance", "rollout", "gradient-rollout", "attention", "legrad", "gradcam", "eigencam", "saliency"):
        one, two = (vitlens.explain(vit, batch, method=name, targets=torch.full((2,), k)) for k in (3, 8))
        assert torch.equal(one, two) != ATTRIBUTIONS[name].needs_class


DIGITS = ("--data", "digits", "--limit", "2")
COMMANDS_REFUSED = {
    "look": ("look", "cat.jpg", "--model", NAME),
    "predict": ("predict", NAME, *DIGITS),
    "evaluate": ("evaluate", NAME, *DIGITS),
    "ablate": ("ablate", NAME, *DIGITS),
    "attack": ("attack", NAME, *DIGITS, "--predicted"),
    "compare": ("compare", "vit-digits@random", NAME, *DIGITS),
    "explain": ("explain", NAME, *DIGITS, "--method", "gradcam"),
    "explain a class": ("explain", NAME, *DIGITS, "--target", "3"),
    "explain --auto": ("explain", NAME, *DIGITS, "--auto"),
    "explain --verify": ("explain", NAME, *DIGITS, "--verify"),
    "rollout": ("rollout", NAME, *DIGITS, "--method", "rollout,relevance"),
    "rollout of a class": ("rollout", NAME, *DIGITS, "--target", "3"),
    "study": ("study", NAME, "--data", "digits"),
    "audit": ("audit", NAME, *DIGITS),
}


@pytest.mark.parametrize("what", COMMANDS_REFUSED)
def test_a_command_that_needs_a_class_is_refused_before_anything_is_written(what, tmp_path, capsys):
    options = ("--image-size", "28", "--device", "cpu", "--quiet") if what == "compare" else RANDOM
    command = [f"{word}@random" if word == NAME and what == "compare" else word for word in COMMANDS_REFUSED[what]]
    assert run([*command, *options, "--out", str(tmp_path / "out")]) == 2
    told = capsys.readouterr().err.strip().splitlines()
    assert len(told) == 1
    assert "no classifier" in told[0]
    assert f"vitlens train {NAME} --freeze-backbone" in told[0]
    assert not (tmp_path / "out").exists()


def report_of(command: str, out: Path, *options: str) -> tuple[dict, str]:
    assert run([command, NAME, *DIGITS, *RANDOM, *options, "--out", str(out)]) == 0
    return json.loads((out / "results.json").read_text()), (out / "report.md").read_text()


def test_rollout_without_a_classifier_takes_the_methods_that_need_none(tmp_path):
    results, report = report_of("rollout", tmp_path / "out")
    used = {row["method"] for row in results["tables"]["methods"]}
    assert used == {"rollout"}
    assert not any(ATTENTION_METHODS[name].gradients for name in used)
    assert [row.get("prediction") for row in results["tables"]["shown"]] == [None, None]
    assert "no classifier" in report
    assert "| prediction" not in report


def test_explain_without_a_classifier_takes_the_methods_that_need_none(tmp_path):
    results, report = report_of("explain", tmp_path / "out", "--method", "all")
    assert {row["method"] for row in results["tables"]["methods"]} == {"rollout", "attention", "eigencam"}
    assert [(row.get("prediction"), row.get("target")) for row in results["tables"]["shown"]] == [(None, None)] * 2
    assert "no classifier" in report
    assert "| prediction" not in report


@pytest.mark.slow
@pytest.mark.parametrize("command", ["attention", "stats", "features", "profile"])
def test_commands_that_need_no_class_work(command, tmp_path):
    data = () if command == "profile" else ("--data", "digits", "--limit", "40")
    assert run([command, NAME, *data, *RANDOM, "--out", str(tmp_path / "out")]) == 0
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results["status"] == "done"


@pytest.mark.slow
def test_a_head_is_added_by_training_it(tmp_path):
    """What the message says: the trained model has a classifier, and predicts."""
    weights = tmp_path / "eva.safetensors"
    from safetensors.torch import save_file

    save_file(timm.create_model("eva02_tiny_patch14_224", img_size=28).state_dict(), weights)
    learn = ["--freeze-backbone", "--data", "digits", "--limit", "60", "--epochs", "1", "--image-size", "28"]
    out = ["--device", "cpu", "--quiet", "--out", str(tmp_path / "run")]
    assert run(["train", f"{NAME}@{weights}", *learn, *out]) == 0
    trained = vitlens.load(str(tmp_path / "run"))
    assert len(trained.classes) == 10
    assert "added a head" in (tmp_path / "run" / "report.md").read_text()
    assert np.isfinite(trained(some_images(trained)).numpy()).all()
