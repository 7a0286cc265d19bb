"""The losses of a distillation against a restatement in float64, and the student's training."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import vitlens
from tests.kit.trainings import CLASSES, tiny_model, tiny_recipe, tiny_split
from vitlens.data.digits import digits
from vitlens.data.split import InMemory
from vitlens.errors import InputError, NonFiniteError, UnknownNameError, UnsupportedError
from vitlens.models.loading import untrained
from vitlens.names import DISTILL_KINDS
from vitlens.training import distill
from vitlens.training.distill import (
    WEIGHTS,
    Distillation,
    StandardObjective,
    Student,
    Teacher,
    cacheable_views,
    has_distillation_token,
)
from vitlens.training.recipe import Recipe

GENERATOR = torch.Generator().manual_seed(3)
STUDENT, TEACHER = (4 * torch.randn(7, 5, generator=GENERATOR) for _ in range(2))
LABELS = torch.tensor([0, 1, 2, 3, 4, 0, 1])
IMAGES = torch.rand(7, 3, 8, 12, generator=GENERATOR)


def loss(kind: str, student: Tensor, teacher: Tensor, temperature: float = 1.0) -> Tensor:
    return Distillation(kind, temperature=temperature).loss(student, teacher)


def probabilities(logits: Tensor, temperature: float = 1.0) -> np.ndarray:
    scaled = logits.detach().double().numpy() / temperature
    raised = np.exp(scaled - scaled.max(1, keepdims=True))
    return raised / raised.sum(1, keepdims=True)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_soft_is_the_papers_formula(temperature: float) -> None:
    wanted, said = probabilities(TEACHER, temperature), probabilities(STUDENT, temperature)
    expected = temperature**2 * (wanted * np.log(wanted / said)).sum(1)
    assert loss("soft", STUDENT, TEACHER, temperature).numpy() == pytest.approx(expected, rel=1e-4)
    shifted = TEACHER + torch.arange(7.0)[:, None]  # the same probabilities
    assert loss("soft", shifted, TEACHER, temperature).abs().max() < 1e-5


def test_soft_at_a_high_temperature_matches_logits() -> None:
    """Hinton 2015, section 2.1: the gradient tends to the difference of centred logits over the classes."""
    student = STUDENT.double().requires_grad_(True)
    loss("soft", student, TEACHER.double(), 1e4).sum().backward()
    centred = [logits.double() - logits.double().mean(1, keepdim=True) for logits in (STUDENT, TEACHER)]
    assert torch.allclose(student.grad, (centred[0] - centred[1]) / 5, atol=1e-3)


def test_hard_takes_the_teachers_prediction_as_the_label() -> None:
    chosen = TEACHER.argmax(1)
    expected = -np.log(probabilities(STUDENT)[np.arange(7), chosen.numpy()])
    assert loss("hard", STUDENT, TEACHER).numpy() == pytest.approx(expected, rel=1e-4)
    sure = 1e4 * F.one_hot(chosen, 5).float()  # as soft does with a confident teacher
    assert torch.allclose(loss("soft", STUDENT, sure), loss("hard", STUDENT, sure), atol=1e-4)


@pytest.mark.parametrize(
    ("fields", "error", "match"),
    [
        ({"kind": "softt"}, UnknownNameError, "did you mean 'soft'"),
        ({"weight": 0.0}, InputError, "--distill-weight above 0 and at most 1, found 0.0"),
        ({"weight": 1.5}, InputError, "found 1.5"),
        ({"temperature": 0.0}, InputError, "--temperature above 0"),
        ({"temperature": math.inf}, InputError, "--temperature above 0"),
    ],
)
def test_invalid_settings_are_refused(fields: dict[str, Any], error: type[Exception], match: str) -> None:
    assert tuple(WEIGHTS) == DISTILL_KINDS
    with pytest.raises(error, match=match):
        Distillation(**fields)


def test_the_token_learns_from_the_teacher_and_cls_from_the_labels() -> None:
    model = tiny_model(distillation=True).train().requires_grad_(True)
    teacher = torch.randn(7, 3, generator=GENERATOR)
    for weight, reached, untouched in ((1.0, "head_dist", "head"), (1e-30, "head", "head_dist")):
        model.zero_grad()
        objective = StandardObjective(lambda _: teacher, Distillation("hard", weight))
        objective.loss(objective.module(model)(IMAGES), LABELS % 3, IMAGES, smoothing=0.0).backward()
        assert model.module.get_submodule(reached).weight.grad.abs().max() > 1e-4
        assert model.module.get_submodule(untouched).weight.grad.abs().max() < 1e-20


@pytest.mark.parametrize(("token", "kind"), [(True, "soft"), (False, "soft"), (True, "hard")])
def test_the_loss_of_a_batch_is_that_of_the_formulas(token: bool, kind: str) -> None:
    model, teacher = tiny_model(distillation=True).eval(), torch.randn(7, 3, generator=GENERATOR)
    how = Distillation(kind, 0.3, 2.0, token)
    objective = StandardObjective(lambda _: teacher, how, {"a": 1})
    outputs = objective.module(model)(IMAGES)
    for_labels = for_teacher = model(IMAGES)
    if token:
        for_labels, for_teacher = model.module.forward_heads(model.prepare(IMAGES))
    shares = torch.softmax(torch.randn(7, 3, generator=GENERATOR), 1)  # of Mixup
    target = 0.9 * shares.double().numpy() + 0.1 / 3  # smoothed
    labelled = -(target * np.log(probabilities(for_labels))).sum(1)
    wanted, said = probabilities(teacher, 2.0), probabilities(for_teacher, 2.0)
    taught = 4 * (wanted * np.log(wanted / said)).sum(1)
    if kind == "hard":
        taught = -np.log(probabilities(for_teacher)[np.arange(7), teacher.argmax(1).numpy()])
    found = objective.loss(outputs, shares, IMAGES, smoothing=0.1).item()
    assert found == pytest.approx((0.7 * labelled + 0.3 * taught).sum(), rel=1e-5)
    assert torch.allclose(objective.logits(outputs), model(IMAGES), atol=1e-6)
    assert objective.identity() == {"a": 1}
    plain = StandardObjective()  # the labels alone
    assert plain.loss(model(IMAGES), shares, IMAGES, smoothing=0.1).item() == pytest.approx(
        -(target * np.log(probabilities(model(IMAGES)))).sum(), rel=1e-5
    )


def test_the_token_of_our_models_and_of_timms() -> None:
    model = vitlens.load("timm:deit_tiny_distilled_patch16_224", random_weights=True, image_size=(32, 32))
    images = torch.rand(2, 3, 32, 32, generator=GENERATOR)
    with torch.no_grad():
        one, other = Student(model, token=True)(images)
        assert torch.allclose((one + other) / 2, model(images), atol=1e-5)
    assert not torch.allclose(one, other)
    assert has_distillation_token(tiny_model(distillation=True))
    assert not has_distillation_token(tiny_model())
    with pytest.raises(UnsupportedError, match="found vit-mini without; add --no-distill-token"):
        Student(tiny_model(), token=True)


def test_the_student_learns_from_the_teacher_rather_than_the_labels(tmp_path: Path) -> None:
    """On digits: with a teacher whose predictions are shifted by one class, so are the student's."""
    drawn = digits("train").limit(40)
    split = replace(drawn, source=InMemory(drawn.source.read(torch.arange(40))), masks=None)
    model = vitlens.load("cnn-digits")
    with torch.no_grad():
        for name in ("fc.weight", "fc.bias"):
            model.module.get_parameter(name).copy_(model.module.get_parameter(name).roll(1, 0))
    teacher = Teacher(model, classes=split.classes)
    images = next(split.batches(40)).images
    said, labels = teacher(images).argmax(1), split.labels
    assert labels is not None
    assert (said == (labels + 1) % 10).float().mean() > 0.9
    recipe = Recipe(epochs=60, batch_size=40, learning_rate=1e-2, evaluate_every=100)
    agreement = {}
    for taught in (False, True):
        shape = {"dim": 16, "depth": 1, "heads": 2, "patch_size": [8, 8], "distillation": taught}
        student = untrained("vit-mini", classes=split.classes, overrides=shape)
        objective = StandardObjective(teacher, Distillation("hard", 0.9)) if taught else None
        test = replace(split, part="test")
        vitlens.train(student, split, test, recipe=recipe, directory=tmp_path / str(taught), objective=objective)
        with torch.no_grad():
            heads = Student(student, token=True)(images) if taught else [student(images)]
        agreement[taught] = (heads[-1].argmax(1) == said).float().mean().item()
    own = heads[0].argmax(1)  # the other head learns from the labels
    assert (own == labels).float().mean() > (own == said).float().mean()
    assert agreement[False] < 0.3
    assert agreement[True] > 0.5


def test_the_teachers_logits_are_the_models_in_the_datas_order() -> None:
    model = tiny_model().train().requires_grad_(True)
    teacher = Teacher(model, classes=("c", "a", "b"))
    logits = teacher(IMAGES)
    assert not logits.requires_grad
    assert all(module.training for module in model.modules())  # its mode is restored
    with torch.no_grad():
        assert torch.equal(logits, model.eval()(IMAGES)[:, [2, 0, 1]])
    assert teacher(torch.rand(2, 3, 20, 20)).shape == (2, 3)  # images of another size are resized by it
    first, same, other = (Teacher(tiny_model(seed=seed), classes=CLASSES).identity() for seed in (0, 0, 1))
    assert first == same
    assert first["sha256"] != other["sha256"]


@pytest.mark.parametrize(
    ("classes", "match"),
    [
        (("a", "b", "d"), "has other classes than the data: .*only in the data: 'd'; only in the model: 'c'"),
        (("a", "b"), r"a teacher of the data's 2 classes, found vit-mini with 3; only in the teacher: 'c'"),
    ],
)
def test_other_classes_are_refused_with_the_difference(classes: tuple[str, ...], match: str) -> None:
    with pytest.raises(InputError, match=match):
        Teacher(tiny_model(), classes=classes)


def test_a_teacher_with_nan_is_refused() -> None:
    model = tiny_model()
    model.module.get_parameter("head.bias").data.fill_(float("nan"))
    with pytest.raises(NonFiniteError, match="from the teacher vit-mini"):
        Teacher(model, classes=CLASSES)(IMAGES)


SPLIT = tiny_split("train", 30)
SHOWN = next(SPLIT.batches(30)).images


@pytest.mark.parametrize("mirrored", [True, False])
def test_remembered_images_are_not_run_again_and_others_are(mirrored: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    teacher, plain = (Teacher(tiny_model(), classes=CLASSES) for _ in range(2))
    run, seen, told = teacher._run, list[int](), list[int]()
    monkeypatch.setattr(teacher, "_run", lambda images: seen.append(len(images)) or run(images))
    teacher.remember(SPLIT, mirrored=mirrored, advance=told.append)
    assert sum(seen) == sum(told) == 30 * (1 + mirrored)
    order = torch.randperm(30, generator=torch.Generator().manual_seed(0))
    changed = SHOWN[:4].clone()
    changed[2, 1, 3, 4] += 1e-7
    new = 0
    for images, unknown in ((SHOWN[order], 0), (SHOWN[order].flip(-1), 0 if mirrored else 30), (changed, 1)):
        assert torch.allclose(teacher(images), plain(images), atol=1e-6)
        new += unknown
        assert sum(seen) == 30 * (1 + mirrored) + new
    assert len(teacher._hashes.unique()) == 30 * (1 + mirrored)


@pytest.mark.parametrize(
    ("recipe", "views"),
    [
        (Recipe(epochs=2), 1),
        (Recipe(epochs=1), 0),
        (Recipe(epochs=3, flip=True), 2),
        (Recipe(epochs=2, flip=True), 0),
        (Recipe(epochs=9, crop_padding=1), 0),
        (Recipe(epochs=9, randaugment=1), 0),
        (Recipe(epochs=9, mixup=0.8), 0),
        (Recipe(epochs=9, cutmix=1.0), 0),
        (Recipe(epochs=9, erasing=0.1), 0),
    ],
)
def test_when_caching_is_worthwhile(recipe: Recipe, views: int) -> None:
    assert cacheable_views(recipe, SPLIT) == views


def test_no_cache_for_rendered_or_too_many_images(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = tiny_recipe(crop_padding=0, flip=False, epochs=9)
    assert cacheable_views(recipe, digits("train").limit(30)) == 0
    for most, views in ((89, 0), (90, 1)):
        monkeypatch.setattr(distill, "MAX_CACHED_LOGITS", most)
        assert cacheable_views(recipe, SPLIT) == views
