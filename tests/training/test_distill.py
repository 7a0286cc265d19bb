"""The losses of a distillation against a restatement in float64, and what a student learns from a teacher."""

import math

import numpy as np
import pytest
import torch

from tests.training.tiny import CLASSES, tiny_model
from vitlens.errors import InputError, UnknownNameError, UnsupportedError
from vitlens.models.loading import untrained
from vitlens.models.model import Model
from vitlens.names import DISTILL_KINDS
from vitlens.training.distill import (
    LOSSES,
    WEIGHTS,
    Distillation,
    Distilled,
    Student,
    distilled,
    hard,
    has_distillation_token,
    soft,
)

GENERATOR = torch.Generator().manual_seed(3)
STUDENT, TEACHER = (4 * torch.randn(7, 5, generator=GENERATOR) for _ in range(2))
LABELS = torch.tensor([0, 1, 2, 3, 4, 0, 1])


def with_token(*, seed: int = 0) -> Model:
    shape = {"dim": 16, "depth": 2, "heads": 2, "patch_size": [4, 4], "distillation": True}
    return untrained("vit-mini", classes=CLASSES, image_size=(8, 12), seed=seed, overrides=shape)


def probabilities(logits: torch.Tensor, temperature: float = 1.0) -> np.ndarray:
    scaled = logits.double().numpy() / temperature
    raised = np.exp(scaled - scaled.max(1, keepdims=True))
    return raised / raised.sum(1, keepdims=True)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_soft_is_the_papers_formula(temperature: float) -> None:
    wanted, said = probabilities(TEACHER, temperature), probabilities(STUDENT, temperature)
    expected = temperature**2 * (wanted * np.log(wanted / said)).sum(1)
    assert soft(student=STUDENT, teacher=TEACHER, temperature=temperature).numpy() == pytest.approx(expected, rel=1e-4)


def test_soft_is_nothing_for_a_student_that_agrees() -> None:
    shifted = TEACHER + torch.arange(7.0)[:, None]  # the same probabilities
    assert soft(student=shifted, teacher=TEACHER, temperature=2.0).abs().max() < 1e-5


def test_soft_at_a_high_temperature_matches_logits() -> None:
    """Hinton 2015, section 2.1: the gradient tends to the difference of centred logits over the classes."""
    student = STUDENT.double().requires_grad_(True)
    soft(student=student, teacher=TEACHER.double(), temperature=1e4).sum().backward()
    centred = [logits.double() - logits.double().mean(1, keepdim=True) for logits in (STUDENT, TEACHER)]
    assert torch.allclose(student.grad, (centred[0] - centred[1]) / 5, atol=1e-3)


def test_hard_takes_the_teachers_choice_as_the_label() -> None:
    chosen = TEACHER.argmax(1)
    expected = -np.log(probabilities(STUDENT)[np.arange(7), chosen.numpy()])
    assert hard(student=STUDENT, teacher=TEACHER).numpy() == pytest.approx(expected, rel=1e-4)
    # as soft does of a teacher beyond doubt
    sure = 1e4 * torch.nn.functional.one_hot(chosen, 5).float()
    one = soft(student=STUDENT, teacher=sure, temperature=1.0)
    assert torch.allclose(one, hard(student=STUDENT, teacher=sure), atol=1e-4)


@pytest.mark.parametrize("kind", DISTILL_KINDS)
@pytest.mark.parametrize("weight", [0.1, 0.5, 1.0])
def test_the_whole_is_weighed(kind: str, weight: float) -> None:
    labelled = torch.rand(7, generator=GENERATOR)
    how = Distillation(kind, weight, 2.0)
    found = distilled(labelled=labelled, student=STUDENT, teacher=TEACHER, how=how)
    expected = (1 - weight) * labelled + weight * LOSSES[kind](student=STUDENT, teacher=TEACHER, temperature=2.0)
    assert torch.equal(found, expected)


def test_names_are_the_registry() -> None:
    assert tuple(LOSSES) == DISTILL_KINDS == tuple(WEIGHTS)


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
def test_refuses_what_cannot_be_run(fields: dict, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        Distillation(**fields)


def test_the_token_learns_from_the_teacher_and_cls_from_the_labels() -> None:
    model = with_token().train().requires_grad_(True)
    images, teacher = torch.rand(7, 3, 8, 12, generator=GENERATOR), torch.randn(7, 3, generator=GENERATOR)
    for weight, reached, untouched in ((1.0, "head_dist", "head"), (1e-30, "head", "head_dist")):
        model.zero_grad()
        objective = Distilled(lambda _: teacher, Distillation("hard", weight), identity={})
        answers = objective.asked(model)(images)
        objective.loss(answers, LABELS % 3, images, smoothing=0.0).backward()
        assert model.module.get_submodule(reached).weight.grad.abs().max() > 1e-4
        assert model.module.get_submodule(untouched).weight.grad.abs().max() < 1e-20


@pytest.mark.parametrize("token", [True, False])
def test_the_loss_of_a_batch_is_that_of_the_formulas(token: bool) -> None:
    model = with_token()
    images, teacher = torch.rand(7, 3, 8, 12, generator=GENERATOR), torch.randn(7, 3, generator=GENERATOR)
    objective = Distilled(lambda _: teacher, Distillation("soft", 0.3, 2.0, token), identity={"a": 1})
    answers = objective.asked(model)(images)
    if token:
        for_labels, for_teacher = model.module.forward_heads(model.prepare(images))
    else:
        for_labels = for_teacher = model(images)
    shares = torch.softmax(torch.randn(7, 3, generator=GENERATOR), 1)  # of Mixup
    found = objective.loss(answers, shares, images, smoothing=0.1)
    target = 0.9 * shares.double().numpy() + 0.1 / 3
    labelled = -(target * np.log(probabilities(for_labels.detach()))).sum(1)
    wanted, said = probabilities(teacher, 2.0), probabilities(for_teacher.detach(), 2.0)
    taught = 4 * (wanted * np.log(wanted / said)).sum(1)
    assert found.item() == pytest.approx((0.7 * labelled + 0.3 * taught).sum(), rel=1e-5)
    assert torch.allclose(objective.logits(answers), model(images), atol=1e-6)
    assert objective.identity() == {"distillation": {"a": 1}}


def test_timms_distilled_models_have_the_token_too() -> None:
    from vitlens.models.loading import load

    model = load("timm:deit_tiny_distilled_patch16_224", random_weights=True, image_size=(32, 32))
    images = torch.rand(2, 3, 32, 32, generator=GENERATOR)
    with torch.no_grad():
        one, other = Student(model, token=True)(images)
        assert torch.allclose((one + other) / 2, model(images), atol=1e-5)
    assert not torch.allclose(one, other)


def test_a_model_without_the_token_says_so() -> None:
    assert has_distillation_token(with_token())
    assert not has_distillation_token(tiny_model())
    with pytest.raises(UnsupportedError, match="found vit-mini without; add --no-distill-token"):
        Student(tiny_model(), token=True)


def test_a_teacher_is_followed_rather_than_the_labels(tmp_path) -> None:
    """On digits: taught by a teacher whose every answer is moved by one class, a student moves with it."""
    from dataclasses import replace

    from vitlens.data.digits import CLASSES as DIGITS
    from vitlens.data.digits import digits
    from vitlens.data.split import InMemory
    from vitlens.models.loading import load
    from vitlens.training.loop import fit
    from vitlens.training.recipe import Recipe
    from vitlens.training.teacher import Teacher

    drawn = digits("train").limit(40)
    split = replace(drawn, source=InMemory(drawn.source.read(torch.arange(40))), masks=None)
    model = load("cnn-digits")
    with torch.no_grad():
        for name in ("fc.weight", "fc.bias"):
            model.module.get_parameter(name).copy_(model.module.get_parameter(name).roll(1, 0))
    teacher = Teacher(model, classes=DIGITS)
    images = next(split.batches(40)).images
    said, labels = teacher(images).argmax(1), split.labels
    assert labels is not None
    assert (said == (labels + 1) % 10).float().mean() > 0.9
    recipe = Recipe(epochs=60, batch_size=40, learning_rate=1e-2, evaluate_every=100)
    shape = {"dim": 16, "depth": 1, "heads": 2, "patch_size": [8, 8]}
    agreement = {}
    for weight in (None, 0.9):
        student = untrained("vit-mini", classes=DIGITS, overrides={**shape, "distillation": weight is not None})
        objective = None if weight is None else Distilled(teacher, Distillation("hard", weight), identity={})
        fit(
            student,
            split,
            replace(split, part="test"),
            recipe=recipe,
            directory=tmp_path / str(weight),
            objective=objective,
        )
        with torch.no_grad():
            logits = student(images) if weight is None else Student(student, token=True)(images)[1]
        agreement[weight] = (logits.argmax(1) == said).float().mean().item()
        if weight is not None:  # and the other head, which the labels teach, does not follow
            with torch.no_grad():
                own = Student(student, token=True)(images)[0].argmax(1)
            assert (own == labels).float().mean() > (own == said).float().mean()
    assert agreement[None] < 0.3
    assert agreement[0.9] > 0.5
