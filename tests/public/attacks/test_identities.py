"""Attacks compared with closed-form results, with planted boundaries and with each other."""

import pytest
import torch
from torch import Tensor, nn

import vitlens
from tests.kit.attacked import INF, asked, linear, made, perceptron, pictures, predictions
from tests.kit.commands import quick_attacks, ran
from tests.kit.select import values_of
from vitlens.attacks.registry import ATTACKS

GREY = torch.full((300, 3, 4, 4), 0.5)


# C&W's step: 0.01
@pytest.mark.parametrize(("name", "slack"), [("deepfool", (0.002, 0.0)), ("cw", (0.03, 0.012))])
def test_the_smallest_change_of_a_linear_model_is_the_distance_to_its_boundary(name, slack):
    model = linear(classes=2)
    images = pictures(4, low=0.4, high=0.6)
    with torch.no_grad():
        exact = model(images).diff(dim=1)[:, 0].abs() / model.module[1].weight.diff(dim=0).norm()
    result = vitlens.attack(model, images, "predicted", method=name, steps=60)
    assert result.success.all()
    assert (result.distance >= exact).all()
    assert (result.distance <= exact * (1 + slack[0]) + slack[1]).all()


class Planted(nn.Module):
    """A model that errs in an interval of brightness; DeepFool's first step goes to 0.918."""

    def __init__(self, *intervals: tuple[float, float]) -> None:
        super().__init__()
        self.intervals = intervals

    def forward(self, images: Tensor) -> Tensor:
        bright = images.flatten(1).mean(1)
        wrong = sum(((bright > low) & (bright < high)).float() for low, high in self.intervals)
        lead = 1.9 * wrong - 0.9 + bright - bright.detach()
        return torch.stack([torch.zeros_like(lead), lead], 1)


@pytest.mark.parametrize(
    "intervals",
    [[(0.0005, 2.0)], [(0.3, 0.5), (0.8, 2.0)], [(0.9175, 2.0)]],  # of several the first
)
def test_the_result_lies_just_beyond_the_boundary(intervals):
    model = made(Planted(*intervals), (4, 4), classes=2)
    black = torch.zeros(1, 3, 4, 4)
    with asked(model) as seen:
        result = vitlens.attack(model, black, torch.tensor([0]), method="deepfool")
    assert result.success.all()
    # three rounds of eight points
    assert 0 < result.images.mean().item() - intervals[0][0] <= 0.92 * 9**-3 + 1e-6
    assert result.images.std() < 1e-6
    assert result.forwards.item() == 2 + 24
    # no nearer image is adversarial: the one found is returned bit for bit
    if intervals[0][0] > 0.9:
        assert torch.equal(result.images, seen[2].detach())


def test_deepfool_stays_where_no_class_has_a_gradient():
    class Constant(nn.Module):
        def forward(self, images: Tensor) -> Tensor:
            return torch.tensor([[1.0, 0.0]]).expand(len(images), -1) + 0 * images.flatten(1)[:, :2]

    result = vitlens.attack(
        made(Constant(), (4, 4), classes=2), pictures(2, (4, 4)), "predicted", method="deepfool"
    )
    assert not result.success.any()
    assert torch.isfinite(result.images).all()


def test_auto_is_the_worst_case_of_its_members():
    model = perceptron(seed=1)
    images = pictures(8, seed=1)
    options = {"steps": 2, "seed": 4, "epsilons": (0.005, 0.01, 0.02)}
    auto = vitlens.attack(model, images, "predicted", method="auto", **options)
    parts = [
        vitlens.attack(model, images, "predicted", method=name, **options)
        for name in ATTACKS["auto"].members
    ]
    assert torch.equal(auto.broken_at, torch.stack(values_of(parts, "broken_at")).amin(0))
    assert len(auto.broken_at.unique()) > 2
    one = {"steps": 2, "seed": 4, "epsilon": 0.02}
    spent = [
        int(vitlens.attack(model, images, "predicted", method=name, **one).forwards.sum())
        for name in ("auto", *ATTACKS["auto"].members)
    ]
    assert spent[0] < sum(spent[1:])  # each attacks what the ones before left


@pytest.mark.parametrize("name", ["pgd-targeted", "apgd-targeted"])
def test_targets_are_reached(name):
    model = perceptron()
    images = pictures(10)
    targets = (predictions(model, images) + 2) % 5
    result = vitlens.attack(
        model, images, "predicted", method=name, epsilon=0.5, targets=targets, steps=10
    )
    assert result.success.all()
    assert torch.equal(result.reached, result.success)
    assert torch.equal(predictions(model, result.images), targets)
    close = vitlens.attack(
        model, images, "predicted", method=name, epsilon=1e-5, targets=targets, steps=2
    )
    assert not close.reached.any()
    untargeted = vitlens.attack(model, images, "predicted", method=name, epsilon=0.5, steps=10)
    assert untargeted.success.all()
    assert not untargeted.reached.any()


class Tie(nn.Module):
    """Class 1 leads by a share of the logits wherever an image is changed."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share

    def forward(self, images: Tensor) -> Tensor:
        changed = (images - 0.5).flatten(1).abs().amax(1) > 1e-3
        lead = 100 * (1 + torch.where(changed, self.share, -0.5)) + 0 * images.flatten(1).sum(1)
        return torch.stack(
            [torch.full_like(lead, 100), lead, torch.zeros_like(lead), -lead, -lead], 1
        )


@pytest.mark.parametrize(("share", "fooled"), [(5e-6, False), (2e-5, True)])
def test_a_lead_within_rounding_is_no_success(share, fooled):
    """Logits that differ by less than 1e-5 of the largest may change their order in another
    batch."""
    model = made(Tie(share), (4, 4))
    for name, targets in (("noise", None), ("pgd-targeted", torch.tensor([1, 1]))):
        result = vitlens.attack(
            model, GREY[:2], "predicted", method=name, epsilon=0.1, targets=targets, steps=2
        )
        assert result.success.tolist() == [fooled, fooled]


def test_an_attack_sees_the_gradient_of_a_model_that_saturates_the_softmax():
    """The cross-entropy of a confident model has a gradient of 0 in fp32; its log odds do not."""
    plain = perceptron()
    model = perceptron()
    for parameter in model.module[3].parameters():
        parameter.mul_(1000)
    images = pictures(12, low=0.2, high=0.8)
    expected = vitlens.attack(plain, images, "predicted", method="fgsm", epsilon=0.05).success
    fooled = vitlens.attack(model, images, "predicted", method="fgsm", epsilon=0.05).success
    assert fooled.sum() >= expected.sum() > 0


def test_noise_is_uniform_independent_and_of_its_seed():
    model = linear((4, 4))
    how = {"method": "noise", "epsilon": 1e-3, "steps": 3, "batch_size": 300}
    with asked(model) as seen:
        for seed in (0, 0, 1):
            vitlens.attack(model, GREY, "predicted", seed=seed, **how)
    changes = torch.cat(seen).flatten(1).sub(0.5).div(1e-3)
    drawn = changes[changes.abs().amax(1) > 0].unique(dim=0)
    # but for images that were fooled; the same seed gives the same
    assert abs(len(drawn) - 2 * 3 * 300) <= 60
    assert 0.99 < drawn.abs().max() <= 1.001
    assert drawn.mean().abs() < 0.01
    assert abs(drawn.var() - 1 / 3) < 0.01
    correlation = torch.corrcoef(drawn.T) - torch.eye(48)
    assert correlation.abs().max() < 0.13  # 5.5 standard errors of 1,800 independent pairs


def test_random_starts_in_l2_fill_the_ball():
    """The share of a ball within a radius grows as its power of the dimension."""
    model = linear((1, 1))
    images = GREY[:, :, :1, :1]
    with asked(model) as seen:
        vitlens.attack(
            model, images, "predicted", method="pgd-l2", epsilon=1e-3, steps=1, batch_size=300
        )
    starts = torch.cat(seen).detach()[300:600]
    lengths = ((starts - 0.5).flatten(1).norm(dim=1) / 1e-3).sort().values
    expected = ((torch.arange(300) + 0.5) / 300) ** (1 / 3)
    assert (lengths - expected)[20:].abs().max() < 0.1
    assert (starts - 0.5).div(1e-3).mean((0, 2, 3)).abs().max() < 0.12


@pytest.mark.parametrize(
    ("name", "epsilon"), [("fgsm", 0.015), ("pgd", 0.015), ("pgd-targeted", 0.09), ("cw", 0.4)]
)
def test_with_bf16_gradients_success_is_evaluated_in_fp32(name, epsilon):
    model = perceptron(seed=2)
    images = pictures(60, seed=2)
    labels = predictions(model, images)
    options = {"targets": (labels + 1) % 5} if name == "pgd-targeted" else {}
    exact = vitlens.attack(
        model, images, labels, method=name, epsilon=epsilon, steps=10, precision="fp32", **options
    )
    coarse = vitlens.attack(
        model, images, labels, method=name, epsilon=epsilon, steps=10, precision="bf16", **options
    )
    predicted = predictions(model, coarse.images)
    assert torch.equal(
        predicted == options["targets"] if options else predicted != labels, coarse.success
    )
    assert 3 < exact.success.sum() < 57
    assert abs(int(exact.success.sum() - coarse.success.sum())) <= 3
    assert not torch.equal(exact.images, coarse.images)


def test_downwards_an_image_is_attacked_down_to_the_first_epsilon_at_which_it_withstands(
    sharp_vit, tmp_path
):
    """In parts of five images, whose random starts are those of the whole."""
    line = (
        f"attack {sharp_vit} --data digits --limit 12 --batch-size 5 --predicted --attack pgd "
        "--steps 2 --restarts 2"
    )
    more = (
        "--downwards --self-checks few --no-transfer --no-inside --no-corruptions --epsilon "
        "1,2,4,8,16"
    )
    with quick_attacks(part=1):
        (attacked,) = ran(tmp_path / "run", f"{line} {more}").attacked.values()
    (broken_at,) = attacked.broken_at.values()
    images = vitlens.load_data("digits", limit=12)
    model = vitlens.load(str(sharp_vit))
    falling = torch.ones(12, dtype=torch.bool)
    expected = torch.full((12,), INF, dtype=torch.float64)
    for level in (16, 8, 4, 2, 1):
        falling &= vitlens.attack(
            model, images, "predicted", epsilon=level / 255, steps=2, restarts=2
        ).success
        expected[falling] = level / 255
    assert broken_at == pytest.approx(expected.numpy(), rel=1e-5)
    assert len(expected.unique()) > 2
