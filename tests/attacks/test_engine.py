"""The engine: which images leave and enter the batch, the passes counted, and the errors."""

from itertools import product

import pytest
import torch
from torch import Tensor, nn

from tests.attacks.models import adversarial, linear, made, perceptron, pictures, predictions, setting, swept
from vitlens.attacks.algorithm import Jobs
from vitlens.attacks.attack import attack
from vitlens.attacks.descent import pgd
from vitlens.attacks.engine import Evaluator
from vitlens.attacks.plan import clean_images
from vitlens.errors import NonFiniteError, UnsupportedError
from vitlens.models.model import Model


def watched(model: Model) -> list[tuple[int, bool]]:
    """How many images each pass had, and whether with gradients."""
    passes: list[tuple[int, bool]] = []
    model.module.register_forward_pre_hook(
        lambda _module, inputs: passes.append((len(inputs[0]), inputs[0].requires_grad))
    )
    return passes


def test_the_batch_is_refilled_as_images_leave():
    model, images = perceptron(), pictures(24)
    passes = watched(model)
    result = attack(model, images, "predicted", method="pgd", epsilon=0.05, batch_size=4, steps=8)
    attack_passes = passes[6:]  # after the pass on the clean images
    assert 2 < result.success.sum() < 24
    assert result.forwards.min() < result.forwards.max() == 9
    padding = sum(size for size, _ in attack_passes) - result.forwards.sum()
    assert 0 <= padding <= len(attack_passes)  # a batch of 3 is padded to 4
    rounds = sum(gradients for _, gradients in attack_passes)
    assert max(size for size, _ in attack_passes) == 4
    assert rounds <= result.forwards.sum() / 4 + 9  # full but for the last job's steps
    assert rounds < sum(int(group.max()) for group in result.backwards.split(4))  # the passes without refilling


def test_an_image_leaves_once_broken_and_downwards_once_robust():
    model, images = linear(classes=2), pictures(6, low=0.4, high=0.6)
    result = attack(model, images, "predicted", method="pgd", epsilon=0.3, steps=20)
    assert result.success.all()
    assert result.forwards.max() <= 4
    broken = swept(model, images, "predicted", attack="pgd", epsilons=(0.3, 0.4, 0.5), steps=20)
    assert broken.forwards == int(result.forwards.sum())  # larger epsilons are not tried
    assert (broken.broken_at == 0.3).all()
    asked = {"attack": "pgd", "epsilons": (1e-5, 2e-5, 3e-5), "steps": 20}
    up, down, often = (
        swept(model, images, "predicted", **asked, **more)
        for more in ({}, {"downwards": True}, {"downwards": True, "restarts": 2})
    )
    assert torch.isinf(down.broken_at).all()
    assert up.forwards == 3 * down.forwards == 3 * 6 * 21
    assert often.forwards == 2 * down.forwards


@pytest.mark.parametrize("restarts", [1, 3])
def test_downwards_ends_where_a_linear_model_breaks(restarts):
    """All epsilons and restarts, for images that break at different epsilons."""
    model, images = linear(classes=2), pictures(12, low=0.4, high=0.6)
    asked = {"attack": "pgd", "epsilons": tuple(epsilon / 1000 for epsilon in (2, 5, 10, 20, 40, 80)), "steps": 10}
    up = swept(model, images, "predicted", **asked)
    down = swept(model, images, "predicted", **asked, downwards=True, restarts=restarts)
    assert torch.equal(up.broken_at, down.broken_at)
    assert len(up.broken_at.unique()) > 3


def test_fgsm_takes_two_forwards_and_one_backward():
    model, images = perceptron(), pictures(8)
    passes = watched(model)
    result = attack(model, images, "predicted", method="fgsm", epsilon=0.02)
    assert passes == [(8, False), (8, True), (8, False)]
    assert result.forwards.tolist() == [2] * 8
    assert result.backwards.tolist() == [1] * 8


@pytest.mark.parametrize(("count", "sizes"), [(1, [1]), (3, [4]), (5, [8]), (20, [24]), (40, [32, 8]), (45, [32, 16])])
def test_a_cpu_runs_few_shapes_and_every_image_gets_its_own_result(count, sizes):
    model, images = perceptron(), pictures(count)
    clean, rows = clean_images(model, images, "predicted"), torch.arange(count)
    jobs = Jobs(rows, rows, images, clean.labels, clean.runners_up, clean.labels, rows, torch.full((count,), 0.1), rows)
    passes = watched(model)
    evaluator, none_last = Evaluator(model, pgd(setting(1))), torch.zeros(count, dtype=torch.bool)
    seen = evaluator.evaluate(images, jobs, none_last)
    assert passes == [(size, True) for size in sizes]
    for row in range(count):
        alone = evaluator.evaluate(images[row : row + 1], jobs.select(torch.tensor([row])), none_last[:1])
        torch.testing.assert_close(seen.logits[row], alone.logits[0])
        torch.testing.assert_close(seen.gradients[:, row], alone.gradients[:, 0])
    every_other = torch.arange(count) % 2 == 0
    mixed = evaluator.evaluate(images, jobs, every_other)
    torch.testing.assert_close(mixed.logits, seen.logits)
    torch.testing.assert_close(mixed.gradients[:, ~every_other], seen.gradients[:, ~every_other])
    assert not mixed.gradients[:, every_other].any()


def test_a_model_that_is_always_wrong_gets_a_note_and_an_empty_curve():
    model, images = perceptron(), pictures(3)
    labels = (predictions(model, images) + 1) % 5
    note = "made misclassifies all 3 clean images: there is nothing to attack"
    for name in ("pgd", "cw", "auto"):
        found = swept(model, images, labels, attack=name)
        assert found.notes == (note,)
        assert found.broken_at.tolist() == found.distance.tolist() == [0.0] * 3
        assert found.forwards == 0
    assert attack(model, images, labels).notes == (note,)


def test_progress_adds_up_to_the_images(few_queries):
    model, images = perceptron(), pictures(7)
    labels = predictions(model, images)
    labels[2] = (labels[2] + 1) % 5
    for name, epsilons in product(("pgd", "fgsm", "auto", "cw"), ((0.0, 0.01, 0.1), (0.0,))):
        done: list[int] = []
        swept(model, images, labels, attack=name, epsilons=epsilons, steps=2, on_progress=done.append)
        assert sum(done) == 7


class Poisoned(nn.Module):
    """Finite for the clean images; NaN for the second as soon as it is changed, in its logits or its gradient."""

    def __init__(self, images: Tensor, *, backward: bool) -> None:
        super().__init__()
        self.images, self.backward = images, backward
        self.rest = perceptron().module

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.rest(images)
        away = (images - self.images[1]).flatten(1).abs().amax(1)
        if not self.backward:
            return torch.where(((away > 0) & (away < 0.2))[:, None], torch.nan, logits)
        rows = (away < 0.2).nonzero()[:, 0]
        nothing = (images[rows].flatten(1).amin(1) * 0).sqrt()  # 0, whose gradient is infinity times 0
        return logits.index_add(0, rows, nothing[:, None].expand(-1, 5))


@pytest.mark.parametrize("backward", [False, True])
def test_non_finite_values_are_reported_with_model_and_image(backward):
    images = pictures(3, seed=5)
    what = "gradients" if backward else "logits"
    message = f"expected finite {what}, found NaN or infinity from made on image 31 under attack"
    with pytest.raises(NonFiniteError, match=message):
        swept(
            made(Poisoned(images, backward=backward), (8, 8)), images, "predicted",
            attack="pgd", epsilons=(1e-3,), indices=[30, 31, 32],
        )  # fmt: skip


def test_a_model_that_masks_its_gradient():
    """Without a gradient it is refused; gradients of exactly 0 are reported, and score-based attacks succeed."""

    class Rounded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rest = linear(classes=2).module

        def forward(self, images: Tensor) -> Tensor:
            return self.rest((images * 32).round() / 32)  # type: ignore[no-any-return]

    model, images = made(Rounded(), (8, 8), classes=2), pictures(8, low=0.4, high=0.6)
    fgsm, square = (
        swept(model, images, "predicted", attack=name, epsilons=(0.2,), steps=2) for name in ("fgsm", "square")
    )
    assert fgsm.zero_gradients.all()
    assert fgsm.robust(0.2).all()
    assert not square.zero_gradients.any()
    assert not square.robust(0.2).any()

    class Cut(Rounded):
        def forward(self, images: Tensor) -> Tensor:
            return super().forward(images.detach())

    with pytest.raises(UnsupportedError, match=r"expected a gradient from made .* scores alone"):
        attack(made(Cut(), (8, 8), classes=2), images, "predicted", method="pgd")


@pytest.mark.parametrize(("name", "steps"), [("fgsm", None), ("pgd", 5), ("apgd-ce", 5), ("cw", 10)])
def test_success_with_bf16_gradients_is_evaluated_in_fp32(name, steps):
    model, images = perceptron(seed=2), pictures(60, seed=2)
    labels = predictions(model, images)
    passes = watched(model)
    asked = {"attack": name, "epsilons": (0.2, 0.4) if name == "cw" else (0.01, 0.02, 0.04), "steps": steps}
    exact, coarse = (swept(model, images, labels, precision=precision, **asked) for precision in ("fp32", "bf16"))
    assert any(not gradients for _, gradients in passes)
    rows, kept = adversarial(model, images, labels, precision="bf16", **asked)
    assert (predictions(model, kept) != labels[rows]).all()
    for epsilon in coarse.epsilons:
        strength = [int(curves.robust(epsilon).sum()) for curves in (exact, coarse)]
        assert abs(strength[0] - strength[1]) <= 3
