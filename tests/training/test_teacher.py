"""A teacher answers in the order of the data's classes, changes nothing, and is refused where it knows others."""

import pytest
import torch

from tests.training.tiny import CLASSES, tiny_model
from vitlens.errors import InputError, NonFiniteError
from vitlens.models.identity import fingerprint
from vitlens.models.loading import untrained
from vitlens.training.teacher import Teacher

IMAGES = torch.rand(4, 3, 8, 12, generator=torch.Generator().manual_seed(0))


def test_it_answers_as_the_model_does_in_the_datas_order() -> None:
    model = tiny_model().train().requires_grad_(True)
    teacher = Teacher(model, classes=("c", "a", "b"))
    logits = teacher(IMAGES)
    assert not logits.requires_grad
    assert all(module.training for module in model.modules())  # as it was, although it answered without dropout
    with torch.no_grad():
        expected = model.eval()(IMAGES)[:, [2, 0, 1]]
    assert torch.equal(logits, expected)


def test_images_of_another_size_are_resized_by_it() -> None:
    teacher = Teacher(tiny_model(), classes=CLASSES)
    assert teacher(torch.rand(2, 3, 20, 20)).shape == (2, 3)


@pytest.mark.parametrize(
    ("classes", "match"),
    [
        (("a", "b", "d"), "knows other classes than the data: .*only in the data: 'd'; only in the model: 'c'"),
        (("a", "b"), r"a teacher of the data's 2 classes, found vit-mini with 3; only in the teacher: 'c'"),
    ],
)
def test_other_classes_are_refused_with_the_difference(classes: tuple[str, ...], match: str) -> None:
    with pytest.raises(InputError, match=match):
        Teacher(tiny_model(), classes=classes)


def test_a_broken_teacher_is_refused() -> None:
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
