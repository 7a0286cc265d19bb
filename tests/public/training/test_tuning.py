"""Partial fine-tuning, and a head on cached features, equal to one trained with the backbone."""

import math
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import vitlens
from tests.kit.commands import gone_on, ran, refusal
from tests.kit.making import CLASSES, digits, save, untrained
from tests.kit.training_runs import interrupted
from tests.kit.trainings import (
    EnoughError,
    plain_recipe,
    recipe_of,
    state,
    tiny_cnn,
    tiny_model,
    trained,
)
from vitlens import load_data

PLAIN = (
    "--data digits --limit 40 --batch-size 8 --precision fp32 --freeze-backbone --warmup 0 "
    "--clip 0 --average 0 --label-smoothing 0 --weight-decay 0.1 --learning-rate 0.03 --set "
    "minimum=1 --set crop_padding=0 --set flip=false"
)


def different(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> set[str]:
    return {name for name, value in one.items() if not torch.equal(value, other[name])}


def changed(model: vitlens.Model, last: int | None, folder: Path) -> set[str]:
    """Return the weights that a training changes."""
    before = state(model)
    trained(folder, model, train_last=last, recipe=plain_recipe(epochs=1))
    return different(state(model), before)


def test_everything_the_last_blocks_or_the_head_is_trained(tmp_path):
    names = set(state(tiny_model()))
    for last, start in (
        (None, ""),
        (0, "head."),
        (1, ("blocks.1.", "norm.", "head.")),
        (2, ("blocks.", "norm.", "head.")),
    ):
        assert changed(tiny_model(), last, tmp_path) == {
            name for name in names if name.startswith(start)
        }
    assert changed(tiny_model(distillation=True), 0, tmp_path) == {
        f"{head}.{part}" for head in ("head", "head_dist") for part in ("weight", "bias")
    }


def test_of_a_cnn_the_last_stages_with_their_statistics(tmp_path):
    names = changed(tiny_cnn(), 3, tmp_path)
    assert {name.split(".")[0] for name in names} == {"layer3", "fc"}
    assert any(name.endswith("running_mean") for name in names)
    assert changed(tiny_cnn(), 0, tmp_path) == {"fc.weight", "fc.bias"}
    model, _ = trained(tmp_path, tiny_cnn(), recipe=plain_recipe(epochs=1, average=0.9))
    assert state(model)["bn1.num_batches_tracked"] == 5  # counters are not averaged
    assert "conv1.weight" in different(state(model), state(tiny_cnn()))


@pytest.mark.parametrize("last", [0, 1])
def test_frozen_modules_are_in_evaluation_mode_and_modes_are_restored(last, tmp_path):
    model = tiny_model().eval().requires_grad_(False)
    modes = {}
    names = ("pos_drop", "blocks.0.mlp", "blocks.1.mlp", "head")
    for name in names:
        model.module.get_submodule(name).register_forward_hook(
            lambda module, *_, name=name: modes.update(
                {name: module.training} if name not in modes else {}
            )
        )
    trained(tmp_path, model, train_last=last, recipe=plain_recipe(epochs=1))
    assert [modes[name] for name in names] == [False, False, last == 1, True]
    for module in model.modules():
        assert not module.training
    for parameter in model.parameters():
        assert not parameter.requires_grad


class HeadFirst(nn.Module):
    """A module that defines its head before its blocks, and has dropout in and after them."""

    def __init__(self):
        super().__init__()
        self.head = nn.Sequential(nn.Dropout(), nn.Linear(8, 3))
        self.drop = nn.Dropout()
        self.stem = nn.Conv2d(3, 8, 4, stride=4)
        self.blocks = nn.ModuleList()
        for _ in range(2):
            self.blocks.append(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Dropout()))

    def forward(self, images):
        tokens = self.drop(self.stem(images).flatten(2).transpose(1, 2))
        for block in self.blocks:
            tokens = tokens + block(tokens)
        return self.head(tokens.mean(1))


@pytest.mark.parametrize(
    ("last", "names"),
    [(0, {"head.0"}), (1, {"head.0", "blocks.1.2"}), (2, {"head.0", "blocks.0.2", "blocks.1.2"})],
)
def test_dropout_of_frozen_blocks_is_off_with_a_head_that_is_defined_before_them(
    last, names, tmp_path
):
    model = vitlens.wrap(
        HeadFirst(),
        image_size=(8, 12),
        classes=("a", "b", "c"),
        mean=(0, 0, 0),
        std=(1, 1, 1),
        blocks=("blocks.0", "blocks.1"),
    )
    active = set()

    def stop(_: object) -> None:
        raise EnoughError

    for name, module in model.module.named_modules():
        if isinstance(module, nn.Dropout):
            module.register_forward_hook(
                lambda module, *_, name=name: active.update({name} if module.training else ())
            )
    with pytest.raises(EnoughError):
        trained(tmp_path, model, train_last=last, recipe=plain_recipe(epochs=1), on_progress=stop)
    assert active == names


@pytest.mark.parametrize(
    "more",
    ["--epochs 3", "--epochs 2 --average 0.9", "--epochs 3 --set crop_padding=1 --cached-views 3"],
)
def test_a_head_on_cached_features_is_the_head_trained_with_the_backbone(
    more, still, tiny_vit, tmp_path
):
    """With as many cached views as epochs, each epoch sees what a training without a cache would
    see.
    """
    line = f"{PLAIN} {more}".replace("--data digits --limit 40", f"--data {still}")
    record = ran(tmp_path / "cached", f"train {tiny_vit} {line}")
    data = {"train": load_data(str(still), part="train"), "test": load_data(str(still))}
    how = {
        "recipe": recipe_of({row.setting: row.value for row in record.recipe}),
        "precision": "fp32",
    }
    model, expected = trained(
        tmp_path / "uncached", vitlens.load(str(tiny_vit)), train_last=0, **how, **data
    )
    before = state(vitlens.load(str(tiny_vit)))
    one = state(vitlens.load(str(record.folder)))
    assert different(one, before) == different(state(model), before) == {"head.weight", "head.bias"}
    for name, value in state(model).items():
        assert torch.allclose(one[name], value, rtol=1e-4, atol=1e-5), name
    for epoch, expected_epoch in zip(record.history, expected.history, strict=True):
        assert epoch.train_loss == pytest.approx(expected_epoch.train_loss, rel=1e-4)
        assert epoch.test_loss == pytest.approx(expected_epoch.test_loss, rel=1e-4)
        assert epoch.gradient_norm == pytest.approx(expected_epoch.gradient_norm, rel=1e-3)
        assert (epoch.step, epoch.images) == (expected_epoch.step, expected_epoch.images)
    best = state(vitlens.load(str(record.folder / "best.safetensors")))
    assert torch.equal(best["head.weight"], one["head.weight"]) == (
        expected.best_epoch == len(record.history) - 1
    )


def test_a_new_head_starts_at_zero(learned, tmp_path):
    """Of three classes the head is replaced by one of ten: the first loss is that of equal
    probabilities.
    """
    record = ran(
        tmp_path / "out", f"train {learned} {PLAIN.replace('size 8', 'size 40')} --epochs 1"
    )
    assert record.history[0].train_loss == pytest.approx(math.log(10), rel=1e-6)
    assert len(vitlens.load(str(record.folder)).classes) == 10
    (row,) = record.started
    assert (row.last, row.trained, "all zeros" in row.notes) == (0, 170, True)
    assert "features computed once" in " ".join(record.setup[0].computed)
    assert not (record.folder / "features").exists()


SHAPE = {"dim": 16, "depth": 1, "heads": 2, "patch_size": [8, 8], "distillation": True}
KINDS = {
    "two heads": lambda: untrained("vit-mini", classes=CLASSES, overrides=SHAPE),
    "a CNN": lambda: untrained("resnet20", classes=CLASSES),
    "timm, two heads": lambda: vitlens.load(
        "timm:deit_tiny_distilled_patch16_224@random", image_size=32
    ),
    "torchvision": lambda: vitlens.load("torchvision:mobilenet_v3_small@random"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_of_every_kind_is_what_features_are_read_for(kind, tmp_path):
    save(KINDS[kind](), tmp_path / "model" / "model.safetensors")
    line = f"train {tmp_path / 'model'} {PLAIN.replace('limit 40', 'limit 10')} --epochs 1"
    record = ran(tmp_path / "out", line)
    model = vitlens.load(str(record.folder))
    split = digits("test").limit(10)
    new = different(state(model), state(vitlens.load(str(tmp_path / "model"))))
    assert new
    for name in new:
        assert name.startswith(("head", "fc.", "classifier."))
    expected = vitlens.evaluate(model, split)
    (epoch,) = record.history
    assert epoch.test_accuracy == expected.correct.double().mean()
    assert epoch.test_loss == pytest.approx(
        F.cross_entropy(expected.logits, split.labels).item(), rel=1e-4
    )


@pytest.mark.usefixtures("progress_every_step")
def test_a_stopped_head_goes_on_to_the_same_bits_and_with_no_other_backbone(
    tiny_vit, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr("vitlens.training.loop.CHECKPOINT_INTERVAL", 0.0)
    model = vitlens.load(str(tiny_vit))
    cut = tmp_path / "cut"
    steps = list[int]()
    backbone = tmp_path / "backbone" / "model.safetensors"
    save(model, backbone)
    line = f"train {backbone.parent} {PLAIN} --epochs 4"
    uninterrupted = ran(tmp_path / "whole", line).folder
    with interrupted(lambda _, facts: facts.step == 12):
        ran(cut, line, code=130)
    with interrupted(lambda _, facts: steps.append(facts.step)):
        gone_on(cut, "train")
    assert min(steps) == 11  # the epoch that was cut is begun again
    for name in ("model.safetensors", "best.safetensors"):
        assert (cut / name).read_bytes() == (uninterrupted / name).read_bytes()
    for part in (model.module.head, model.module.norm):
        part.bias.data.add_(1.0)
    save(model, backbone)
    assert "frozen.backbone" in refusal(capsys, f"train --resume {cut} --device cpu --quiet")


TWICE = """
import vitlens
from torch import nn


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Conv2d(3, 4, 8, stride=8), nn.Linear(4, 10)

    def forward(self, images):
        maps = self.first(images).flatten(2).transpose(1, 2)
        return {logits}


def twice():
    classes = list("0123456789")
    return vitlens.wrap(Twice(), image_size=32, mean=(0,) * 3, std=(1,) * 3, classes=classes)
"""


@pytest.mark.parametrize(
    ("logits", "message"),
    [
        ("(self.head(maps[:, 0]), self.head(maps.mean(1)))[1]", "--train-last 1"),
        ("2 * self.head(maps.mean(1))", "end forward in an nn.Linear"),
    ],
)
def test_a_head_that_is_not_the_last_step_on_one_vector_an_image_is_refused(
    logits, message, tmp_path, capsys
):
    (tmp_path / "models.py").write_text(TWICE.replace("{logits}", logits))
    name = f"{tmp_path / 'models.py'}:twice"
    assert message in refusal(
        capsys, f"train {name} --model-file {name} {PLAIN} --quiet --out {tmp_path / 'out'}"
    )
