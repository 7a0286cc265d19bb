"""Invalid images, labels and arguments are refused; what they ask to be typed instead is a literal."""

import pytest
import torch

import vitlens
from tests.kit.attacked import linear, perceptron, pictures
from vitlens.errors import InputError, UnsupportedError

LABELS = torch.tensor([0, 1, 2])
IMAGES = pictures(3)
TARGETED = {"method": "pgd-targeted"}
PATCH = {"method": "patch"}


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"epsilon": 8.0}, "4 / 255"),
        ({"epsilon": 1.01}, "1.01"),
        ({"epsilon": float("nan")}, "nan"),
        ({"epsilon": -1.0, "method": "cw"}, "-1"),
        ({"epsilon": float("inf"), "method": "pgd-l2"}, "inf"),
        ({"epsilon": 0.1, **PATCH}, "side"),
        ({"epsilons": [0.1, 0.05]}, "ascending"),
        ({"epsilons": [1.0, 1.0], "method": "pgd-l2"}, "ascending"),
        ({"epsilons": []}, "epsilons=["),
        ({"epsilons": [0.1], "epsilon": 0.1}, "epsilon;"),
        ({"epsilons": [0.1], "targets": LABELS + 1, **TARGETED}, "targets"),
        ({"epsilons": [0.1], **PATCH}, "side"),
        ({"steps": 0}, "steps"),
        ({"restarts": 0}, "restarts"),
        ({"batch_size": 0}, "batch size"),
        ({"targets": LABELS, **TARGETED}, "image 0"),
        ({"targets": LABELS + 5, **TARGETED}, "0 to 4"),
        ({"targets": LABELS[:2], **TARGETED}, "(3)"),
        ({"targets": LABELS + 1}, "pgd-targeted or apgd-targeted"),
        ({"maps": torch.rand(2, 4, 4), **PATCH}, "(3, rows, columns)"),
        ({"maps": torch.rand(3, 4), **PATCH}, "(3, rows, columns)"),
        ({"maps": torch.full((3, 4, 4), torch.nan), **PATCH}, "finite"),
        ({"maps": torch.ones(3, 4, 4), **PATCH}, "image 0"),
        ({"side": 0, **PATCH}, "1 to 8 px"),
        ({"side": 9, **PATCH}, "1 to 8 px"),
        ({"labels": "guessed"}, "'guessed'"),
        ({"labels": LABELS[:2]}, "3 and 2"),
        ({"labels": LABELS + 3}, "0 to 4"),
        ({"labels": LABELS - 1}, "-1"),
    ],
)
def test_invalid_arguments(options, told):
    given = {"labels": LABELS, **options}
    with pytest.raises(InputError) as refused:
        vitlens.attack(linear(), IMAGES, **given)
    assert told in str(refused.value)


def test_what_is_at_the_limit_is_taken():
    for options in ({"epsilon": 1.0}, {"epsilon": 0.0}, {"side": 8, **PATCH}, {"side": 1, **PATCH}):
        vitlens.attack(linear(), IMAGES, "predicted", steps=1, **options)
    two = vitlens.attack(perceptron(classes=2), IMAGES, "predicted", method="deepfool", steps=1)
    assert two.tried.all()


@pytest.mark.parametrize(
    ("name", "classes"), [("pgd", 1), ("pgd-dlr", 2), ("apgd-dlr", 2), ("apgd-targeted", 3), ("auto", 3)]
)
def test_losses_that_need_more_classes(name, classes):
    with pytest.raises((UnsupportedError, InputError), match=f"at least {classes + 1} classes"):
        vitlens.attack(perceptron(classes=classes), IMAGES, "predicted", method=name)
    enough = perceptron(classes=classes + 1)
    assert vitlens.attack(enough, IMAGES, "predicted", method=name, steps=1).tried.all()
