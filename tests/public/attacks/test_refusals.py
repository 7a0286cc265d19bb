"""Refusals of attacks, the images that are run, and messages about models without gradients."""

import pytest
import torch
from torch import Tensor, nn

import vitlens
from tests.kit.attacked import asked, linear, made, perceptron, pictures, predictions
from tests.kit.commands import ran
from tests.kit.making import save
from tests.kit.select import select_one
from vitlens.errors import InputError, NonFiniteError, UnsupportedError

LABELS = torch.tensor([0, 1, 2])
IMAGES = pictures(3)
TARGETED = {"method": "pgd-targeted"}
PATCH = {"method": "patch"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epsilon": 1.01}, "4 / 255"),
        ({"epsilon": float("nan")}, "nan"),
        ({"epsilon": -1.0, "method": "cw"}, "-1"),
        ({"epsilon": float("inf"), "method": "pgd-l2"}, "inf"),
        ({"epsilon": 0.1, **PATCH}, "side"),
        ({"epsilons": [0.1, 0.05]}, "ascending"),
        ({"epsilons": [1.0, 1.0], "method": "pgd-l2"}, "ascending"),
        ({"epsilons": []}, "epsilons=["),
        ({"epsilons": [0.1], "epsilon": 0.1}, "epsilons or epsilon"),
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
def test_invalid_arguments(options, message):
    with pytest.raises(InputError) as refused:
        vitlens.attack(linear(), IMAGES, **{"labels": LABELS, **options})
    assert message in str(refused.value)


@pytest.mark.parametrize(
    "options", [{"epsilon": 1.0}, {"epsilon": 0.0}, {"side": 8, **PATCH}, {"side": 1, **PATCH}]
)
def test_what_is_at_the_limit_is_taken(options):
    assert vitlens.attack(linear(), IMAGES, "predicted", steps=1, **options).tried.all()


@pytest.mark.parametrize(
    ("name", "classes"),
    [("pgd", 1), ("deepfool", 1), ("pgd-dlr", 2), ("apgd-dlr", 2), ("apgd-targeted", 3)],
)
def test_losses_that_need_more_classes(name, classes):
    with pytest.raises((UnsupportedError, InputError), match=f"at least {classes + 1} classes"):
        vitlens.attack(perceptron(classes=classes), IMAGES, "predicted", method=name)
    enough = perceptron(classes=classes + 1)
    assert vitlens.attack(enough, IMAGES, "predicted", method=name, steps=1).tried.all()


def test_the_batch_is_refilled_as_images_leave():
    model = perceptron()
    images = pictures(24)
    with asked(model) as seen:
        result = vitlens.attack(
            model, images, "predicted", method="pgd", epsilon=0.05, batch_size=4, steps=8
        )
    passes = seen[6:]  # after the clean images
    assert 2 < result.success.sum() < 24
    assert result.forwards.min() < result.forwards.max() == 9
    # a batch of 3 is padded to 4
    assert 0 <= sum(map(len, passes)) - result.forwards.sum() <= len(passes)
    # but for the last job's steps
    assert sum(batch.requires_grad for batch in passes) <= result.forwards.sum() / 4 + 9


def test_a_model_that_is_always_wrong_gets_a_note_and_an_empty_curve():
    model = perceptron()
    images = pictures(3)
    labels = (predictions(model, images) + 1) % 5
    for name in ("pgd", "cw", "auto"):
        curve = vitlens.attack(model, images, labels, method=name, epsilons=[0.1])
        assert len(curve.notes) == 1
        assert curve.broken_at.tolist() == curve.distance.tolist() == [0.0] * 3
        result = vitlens.attack(model, images, labels, method=name)
        assert (result.notes, int(result.forwards.sum()), result.robust_accuracy) == (
            curve.notes,
            0,
            0.0,
        )
    assert vitlens.attack(model, images, "predicted", epsilon=1e-5).notes == ()


class Poisoned(nn.Module):
    """A model that is finite for clean images, and NaN for the second one once it changes.

    Either its logits or its gradient are NaN.
    """

    def __init__(self, images: Tensor, *, backward: bool) -> None:
        super().__init__()
        self.images = images
        self.backward = backward
        self.rest = perceptron().module

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.rest(images)
        away = (images - self.images[1]).flatten(1).abs().amax(1)
        if not self.backward:
            return torch.where(((away > 0) & (away < 0.2))[:, None], torch.nan, logits)
        rows = (away < 0.2).nonzero()[:, 0]
        nothing = (
            images[rows].flatten(1).amin(1) * 0
        ).sqrt()  # 0, whose gradient is infinity times 0
        return logits.index_add(0, rows, nothing[:, None].expand(-1, 5))


@pytest.mark.parametrize(("backward", "what"), [(False, "logits"), (True, "gradients")])
def test_values_that_are_not_finite_are_reported_with_model_and_image(backward, what):
    images = pictures(3, seed=5)
    model = made(Poisoned(images, backward=backward), (8, 8))
    with pytest.raises(NonFiniteError, match=f"{what}.* made on image 1 "):
        vitlens.attack(model, images, "predicted", epsilons=[1e-3])
    with torch.no_grad():
        model.module.rest[1].bias.fill_(torch.nan)
    with pytest.raises(NonFiniteError, match="made on image 0"):
        vitlens.attack(model, images, "predicted")


def test_a_model_without_a_gradient_is_attacked_by_its_scores_alone():
    class Cut(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rest = linear(classes=2).module

        def forward(self, images: Tensor) -> Tensor:
            return self.rest(images.detach())  # type: ignore[no-any-return]

    model = made(Cut(), (8, 8), classes=2)
    images = pictures(8, low=0.4, high=0.6)
    with pytest.raises(UnsupportedError, match="noise, square"):
        vitlens.attack(model, images, "predicted", method="pgd")
    assert vitlens.attack(
        model, images, "predicted", method="square", epsilon=0.2, steps=2
    ).success.all()


def test_gradients_of_zero_are_told(tiny_vit, tmp_path):
    model = vitlens.load(str(tiny_vit))
    model.module.head.weight.data.zero_()
    model.module.head.bias.data.copy_(torch.arange(10))
    save(model, tmp_path / "silent" / "model.safetensors")
    line = (
        f"attack {tmp_path / 'silent'} --data digits --limit 4 --predicted --attack fgsm,noise "
        "--no-corruptions"
    )
    checks = ran(tmp_path / "run", f"{line} --no-inside --no-transfer").checks
    # of noise there are none
    check = select_one(checks, name="gradients read")
    assert (check.state, check.against, check.of) == ("failed", 4, 4)


@pytest.mark.parametrize("options", [{"epsilon": 0.5}, {"epsilons": [0, 4 / 255, 1.0]}])
def test_an_epsilon_that_is_far_above_usual_ones_is_warned_of(options):
    model = linear(classes=2)
    images = pictures(2)
    with pytest.warns(UserWarning, match="/ 255"):
        vitlens.attack(model, images, "predicted", steps=1, **options)


def test_usual_epsilons_and_those_of_other_norms_are_not_warned_of():
    model = linear(classes=2)
    images = pictures(2)
    for method, epsilon in (("pgd", 32 / 255), ("pgd-l2", 2.0)):
        assert (
            len(
                vitlens.attack(
                    model, images, "predicted", method=method, epsilon=epsilon, steps=1
                ).success
            )
            == 2
        )
