"""Invalid images, labels and arguments are refused."""

import pytest
import torch

from tests.attacks.models import linear, perceptron, pictures, swept
from vitlens.attacks.attack import attack
from vitlens.errors import InputError, UnknownNameError, UnsupportedError

LABELS = torch.tensor([0, 1, 2])
IMAGES = pictures(3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epsilon": -0.1}, r"epsilons from 0 to 1 .*, found -0\.1"),
        ({"epsilon": 8.0}, r"epsilons from 0 to 1 .*0 to 255\) in pixel units, found 8"),
        ({"epsilon": float("nan")}, r"epsilons from 0 to 1 .*, found nan"),
        ({"epsilon": -1.0, "method": "cw"}, r"epsilons of 0 or more in pixel units, found -1"),
        ({"epsilon": float("inf"), "method": "pgd-l2"}, r"found inf"),
        ({"epsilon": 0.1, "method": "patch"}, r"no epsilon for a patch, whose size is its side in px, found 0\.1"),
        ({"epsilons": [0.1, 0.05]}, r"ascending order, found 0\.1, 0\.05"),
        ({"epsilons": [1.0, 1.0], "method": "pgd-l2"}, r"ascending order, found 1, 1"),
        ({"steps": 0}, r"steps of at least 1, found 0"),
        ({"restarts": 0}, r"restarts of at least 1, found 0"),
        ({"batch_size": 0}, r"batch size of at least 1, found 0"),
        ({"targets": LABELS, "method": "pgd-targeted"}, r"other than the labels, found 0 for both on image 0"),
        ({"targets": LABELS + 5, "method": "pgd-targeted"}, r"targets from 0 to 4, found 5"),
        ({"targets": LABELS[:2], "method": "pgd-targeted"}, r"one target per image \(3\), found 2"),
        ({"targets": LABELS + 1}, r"pgd-targeted or apgd-targeted to reach targets, found 'pgd'"),
        ({"maps": torch.rand(2, 4, 4), "method": "patch"}, r"maps \(3, rows, columns\), found \(2, 4, 4\)"),
        ({"maps": torch.full((3, 4, 4), torch.nan), "method": "patch"}, r"finite maps"),
        ({"maps": torch.ones(3, 4, 4), "method": "patch"}, r"the map of image 0 constant"),
        ({"side": 0, "method": "patch"}, r"a patch of 1 to 8 px, found 0"),
        ({"side": 9, "method": "patch"}, r"a patch of 1 to 8 px, found 9"),
        ({"labels": None}, r"a label for each image, found none; .* or labels='predicted'"),
        ({"labels": "guessed"}, r"a label for each image, found 'guessed'"),
        ({"labels": LABELS[:2]}, r"images and a label for each, found 3 and 2"),
        ({"labels": LABELS + 3}, r"labels from 0 to 4, found 5"),
        ({"labels": LABELS - 1}, r"labels from 0 to 4, found -1"),
        ({"images": IMAGES * 255}, r"found 0\.\d+ to 25\d; divide by 255"),
        ({"images": IMAGES - 0.5}, r"found -0\.\d+ to 0\.\d+; leave out the normalisation"),
        ({"images": IMAGES * torch.nan}, r"found NaN or infinity"),
        ({"images": IMAGES[:, :1]}, r"found \(3, 1, 8, 8\)"),
    ],
)
def test_invalid_arguments(options, message):
    given = {"images": IMAGES, "labels": LABELS, **options}
    with pytest.raises(InputError, match=message):
        attack(linear(), given.pop("images"), given.pop("labels"), **given)


def test_unknown_attacks_and_indices_of_other_images():
    with pytest.raises(UnknownNameError, match="no attack 'pdg'; did you mean 'pgd'"):
        attack(linear(), IMAGES, "predicted", method="pdg")
    with pytest.raises(InputError, match=r"one index per image \(3\), found 2"):
        swept(linear(), IMAGES, "predicted", attack="pgd", indices=[1, 2])


@pytest.mark.parametrize(("name", "classes"), [("pgd-dlr", 2), ("apgd-dlr", 2), ("apgd-targeted", 3), ("auto", 3)])
def test_losses_that_need_more_classes(name, classes):
    with pytest.raises(UnsupportedError, match=rf"at least {classes + 1} classes for .*, found {classes}; try apgd-ce"):
        attack(perceptron(classes=classes), IMAGES, "predicted", method=name)
    enough = perceptron(classes=classes + 1)
    assert attack(enough, IMAGES, "predicted", method=name, steps=1).tried.all()
