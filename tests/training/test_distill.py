"""The losses of a distillation against a restatement in float64, and the student's training."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.training.test_loop import Drawn
from tests.training.tiny import CLASSES, tiny_model, tiny_recipe, tiny_split
from vitlens.data.split import InMemory
from vitlens.errors import InputError, NonFiniteError, UnknownNameError, UnsupportedError
from vitlens.models.loading import untrained
from vitlens.models.model import Model
from vitlens.models.saved import fingerprint
from vitlens.names import DISTILL_KINDS
from vitlens.training import distill
from vitlens.training.distill import (
    LOSSES,
    WEIGHTS,
    CachedTeacher,
    Distillation,
    DistillationObjective,
    Student,
    Teacher,
    cacheable_views,
    hard,
    has_distillation_token,
    soft,
)
from vitlens.training.recipe import Recipe

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


def test_soft_is_zero_for_a_student_that_agrees() -> None:
    shifted = TEACHER + torch.arange(7.0)[:, None]  # the same probabilities
    assert soft(student=shifted, teacher=TEACHER, temperature=2.0).abs().max() < 1e-5


def test_soft_at_a_high_temperature_matches_logits() -> None:
    """Hinton 2015, section 2.1: the gradient tends to the difference of centred logits over the classes."""
    student = STUDENT.double().requires_grad_(True)
    soft(student=student, teacher=TEACHER.double(), temperature=1e4).sum().backward()
    centred = [logits.double() - logits.double().mean(1, keepdim=True) for logits in (STUDENT, TEACHER)]
    assert torch.allclose(student.grad, (centred[0] - centred[1]) / 5, atol=1e-3)


def test_hard_takes_the_teachers_prediction_as_the_label() -> None:
    chosen = TEACHER.argmax(1)
    expected = -np.log(probabilities(STUDENT)[np.arange(7), chosen.numpy()])
    assert hard(student=STUDENT, teacher=TEACHER).numpy() == pytest.approx(expected, rel=1e-4)
    # as soft does with a confident teacher
    sure = 1e4 * torch.nn.functional.one_hot(chosen, 5).float()
    one = soft(student=STUDENT, teacher=sure, temperature=1.0)
    assert torch.allclose(one, hard(student=STUDENT, teacher=sure), atol=1e-4)


@pytest.mark.parametrize("kind", DISTILL_KINDS)
@pytest.mark.parametrize("weight", [0.1, 0.5, 1.0])
def test_the_loss_is_the_weighted_sum(kind: str, weight: float) -> None:
    objective = DistillationObjective(lambda _: TEACHER, Distillation(kind, weight, 2.0), identity={})
    loss = objective.loss((STUDENT, STUDENT), LABELS, torch.zeros(7, 3, 2, 2), smoothing=0.0)
    labelled = torch.nn.functional.cross_entropy(STUDENT, LABELS, reduction="none")
    expected = (1 - weight) * labelled + weight * LOSSES[kind](student=STUDENT, teacher=TEACHER, temperature=2.0)
    assert torch.equal(loss, expected.sum())


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
def test_invalid_settings_are_refused(fields: dict, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        Distillation(**fields)


def test_the_token_learns_from_the_teacher_and_cls_from_the_labels() -> None:
    model = with_token().train().requires_grad_(True)
    images, teacher = torch.rand(7, 3, 8, 12, generator=GENERATOR), torch.randn(7, 3, generator=GENERATOR)
    for weight, reached, untouched in ((1.0, "head_dist", "head"), (1e-30, "head", "head_dist")):
        model.zero_grad()
        objective = DistillationObjective(lambda _: teacher, Distillation("hard", weight), identity={})
        answers = objective.module(model)(images)
        objective.loss(answers, LABELS % 3, images, smoothing=0.0).backward()
        assert model.module.get_submodule(reached).weight.grad.abs().max() > 1e-4
        assert model.module.get_submodule(untouched).weight.grad.abs().max() < 1e-20


@pytest.mark.parametrize("token", [True, False])
def test_the_loss_of_a_batch_is_that_of_the_formulas(token: bool) -> None:
    model = with_token()
    images, teacher = torch.rand(7, 3, 8, 12, generator=GENERATOR), torch.randn(7, 3, generator=GENERATOR)
    objective = DistillationObjective(lambda _: teacher, Distillation("soft", 0.3, 2.0, token), identity={"a": 1})
    answers = objective.module(model)(images)
    if token:
        for_labels, for_teacher = model.module.forward_heads(model.prepare(images))
    else:
        for_labels = for_teacher = model(images)
    shares = torch.softmax(torch.randn(7, 3, generator=GENERATOR), 1)  # of Mixup
    loss = objective.loss(answers, shares, images, smoothing=0.1)
    target = 0.9 * shares.double().numpy() + 0.1 / 3
    labelled = -(target * np.log(probabilities(for_labels.detach()))).sum(1)
    wanted, said = probabilities(teacher, 2.0), probabilities(for_teacher.detach(), 2.0)
    taught = 4 * (wanted * np.log(wanted / said)).sum(1)
    assert loss.item() == pytest.approx((0.7 * labelled + 0.3 * taught).sum(), rel=1e-5)
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


def test_a_model_without_the_token_is_refused() -> None:
    assert has_distillation_token(with_token())
    assert not has_distillation_token(tiny_model())
    with pytest.raises(UnsupportedError, match="found vit-mini without; add --no-distill-token"):
        Student(tiny_model(), token=True)


def test_the_student_learns_from_the_teacher_rather_than_the_labels(tmp_path) -> None:
    """On digits: with a teacher whose predictions are shifted by one class, so are the student's."""
    from dataclasses import replace

    from vitlens.data.digits import CLASSES as DIGITS
    from vitlens.data.digits import digits
    from vitlens.data.split import InMemory
    from vitlens.models.loading import load
    from vitlens.training.distill import Teacher
    from vitlens.training.loop import fit
    from vitlens.training.recipe import Recipe

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
        objective = (
            None if weight is None else DistillationObjective(teacher, Distillation("hard", weight), identity={})
        )
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
        if weight is not None:  # the other head learns from the labels
            with torch.no_grad():
                own = Student(student, token=True)(images)[0].argmax(1)
            assert (own == labels).float().mean() > (own == said).float().mean()
    assert agreement[None] < 0.3
    assert agreement[0.9] > 0.5


IMAGES = torch.rand(4, 3, 8, 12, generator=torch.Generator().manual_seed(0))


def test_the_teachers_logits_are_the_models_in_the_datas_order() -> None:
    model = tiny_model().train().requires_grad_(True)
    teacher = Teacher(model, classes=("c", "a", "b"))
    logits = teacher(IMAGES)
    assert not logits.requires_grad
    assert all(module.training for module in model.modules())  # its mode is restored
    with torch.no_grad():
        expected = model.eval()(IMAGES)[:, [2, 0, 1]]
    assert torch.equal(logits, expected)


def test_images_of_another_size_are_resized_by_it() -> None:
    teacher = Teacher(tiny_model(), classes=CLASSES)
    assert teacher(torch.rand(2, 3, 20, 20)).shape == (2, 3)


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
    with torch.no_grad():
        model.module.get_parameter("head.bias").fill_(float("nan"))
    with pytest.raises(NonFiniteError, match="from the teacher vit-mini"):
        Teacher(model, classes=CLASSES)(IMAGES)


def test_its_identity_changes_with_any_weight() -> None:
    first, same, other = (Teacher(tiny_model(seed=seed), classes=CLASSES).identity() for seed in (0, 0, 1))
    assert first == same
    assert first["sha256"] != other["sha256"]
    model = tiny_model()
    before = fingerprint(model.module)
    with torch.no_grad():
        model.module.get_parameter("head.bias")[0] += 1e-6
    assert fingerprint(model.module) != before
    assert fingerprint(untrained("resnet20", classes=CLASSES).module) == fingerprint(
        untrained("resnet20", classes=CLASSES).module
    )


SPLIT = tiny_split("train", 30)
SHOWN = next(SPLIT.batches(30)).images
CPU = torch.device("cpu")


class Counting(Teacher):
    """Counts the images on which it is run."""

    seen = 0

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        self.seen += len(images)
        return super().__call__(images)


def taught(*, mirrored: bool) -> tuple[Counting, CachedTeacher]:
    teacher = Counting(tiny_model(), classes=CLASSES)
    memory = CachedTeacher(teacher)
    memory.remember(SPLIT, mirrored=mirrored, device=CPU)
    return teacher, memory


def test_cached_images_are_not_run_again() -> None:
    teacher, memory = taught(mirrored=True)
    assert teacher.seen == 60
    order = torch.randperm(30, generator=torch.Generator().manual_seed(0))
    for images in (SHOWN[order], SHOWN[order].flip(-1)):
        assert torch.allclose(memory(images), Teacher(tiny_model(), classes=CLASSES)(images), atol=1e-6)
    assert teacher.seen == 60
    assert memory.computed == 0


def test_a_changed_pixel_makes_a_new_image() -> None:
    teacher, memory = taught(mirrored=False)
    images = SHOWN[:4].clone()
    images[2, 1, 3, 4] += 1e-7
    expected = Teacher(tiny_model(), classes=CLASSES)(images)
    assert torch.allclose(memory(images), expected, atol=1e-6)
    assert (teacher.seen, memory.computed) == (31, 1)
    assert torch.allclose(memory(SHOWN.flip(-1)), teacher(SHOWN.flip(-1)), atol=1e-6)
    assert memory.computed == 31


def test_all_images_have_different_hashes() -> None:
    _, memory = taught(mirrored=True)
    assert len(memory._hashes.unique()) == 60


def test_without_a_cache_the_teacher_is_run() -> None:
    teacher = Teacher(tiny_model(), classes=CLASSES)
    assert torch.equal(CachedTeacher(teacher)(SHOWN), teacher(SHOWN))


@pytest.mark.parametrize(
    ("recipe", "forms"),
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
def test_when_caching_is_worthwhile(recipe: Recipe, forms: int) -> None:
    assert cacheable_views(recipe, SPLIT) == forms


def test_no_cache_for_rendered_or_too_many_images(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = tiny_recipe(crop_padding=0, flip=False, epochs=9)
    assert isinstance(SPLIT.source, InMemory)
    assert cacheable_views(recipe, replace(SPLIT, source=Drawn(SPLIT.source))) == 0
    monkeypatch.setattr(distill, "MAX_CACHED_LOGITS", 89)
    assert cacheable_views(recipe, SPLIT) == 0
    monkeypatch.setattr(distill, "MAX_CACHED_LOGITS", 90)
    assert cacheable_views(recipe, SPLIT) == 1
