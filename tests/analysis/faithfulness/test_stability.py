"""Maps under shifts and flips: one that moves along is equal, one that stays is not, and one that jumps is flagged."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.lens.tiny import images, ours
from vitlens.analysis.faithfulness.checks import DISTURBANCES, judged_stability
from vitlens.analysis.faithfulness.stability import Stability, disturbed, shifted, stability
from vitlens.errors import InputError
from vitlens.models.model import Model
from vitlens.uncertainty import Estimate, wilson

TARGETS = torch.zeros(12, dtype=torch.long)
BATCH = F.interpolate(images((8, 12), batch=12), size=(32, 48), mode="bicubic").clamp(0, 1)


def follows(_model: Model, batch: Tensor, _targets: Tensor) -> Tensor:
    """Pixel by pixel and linear, so it follows every shift and flip exactly."""
    return batch.mean(1)


def stays(_model: Model, batch: Tensor, _targets: Tensor) -> Tensor:
    down, right = torch.linspace(0, 1, 32), torch.linspace(0, 2, 48)
    return (down[:, None] + right).expand(len(batch), 32, 48)


def noise(_model: Model, batch: Tensor, _targets: Tensor) -> Tensor:
    """Depends on the pixels without any continuity."""
    seeds = (batch.double().sum((1, 2, 3)) * 1e6).long().tolist()
    return torch.stack([torch.rand(4, 3, generator=torch.Generator().manual_seed(seed)) for seed in seeds])


def found(explain, **more) -> Stability:
    return stability(ours(), BATCH, TARGETS, explain, **more)


def test_a_map_that_moves_along_is_equal():
    result = found(follows)
    assert result.correlation.shape == (len(DISTURBANCES), 12)
    torch.testing.assert_close(result.correlation, torch.ones_like(result.correlation), atol=1e-3, rtol=0)
    assert not result.jumped.any()
    assert result.judged().state == "pass"


def test_a_map_that_stays_when_its_image_is_flipped_jumps():
    result = found(stays)
    names = list(DISTURBANCES)
    assert result.jumped[names.index("flip")].all()  # from one side to the other
    assert (result.correlation[names.index("flip")] < 0).all()
    assert not result.jumped[:3].any()  # a pixel is not far
    assert result.judged().state == "pass"  # a flip is not judged


def test_noise_jumps():
    result = found(noise)
    assert result.judged().lack == "jumps"
    assert result.judged().value.value > 0.7


def test_known_maps_are_not_computed_again():
    calls = []

    def counted(model: Model, batch: Tensor, targets: Tensor) -> Tensor:
        calls.append(len(batch))
        return follows(model, batch, targets)

    result = found(counted, maps=follows(ours(), BATCH, TARGETS))
    assert len(calls) == len(DISTURBANCES)
    assert torch.equal(result.correlation, found(follows).correlation)


def test_maps_that_cannot_be_ranked_are_left_out():
    def some(_model: Model, batch: Tensor, _targets: Tensor) -> Tensor:
        maps = batch.mean(1)
        maps[0], maps[1] = 1.0, torch.nan
        return maps

    result = found(some)
    assert result.correlation.isnan().any(0).tolist() == [True] * 2 + [False] * 10
    assert [(own.n, jumped.n) for _, own, jumped in result.rows()] == [(10, 10)] * 5
    none = found(lambda _m, batch, _t: torch.ones(len(batch), 3, 3))
    assert (none.rows(), none.judged().state) == ([("shifts", None, None)], "inconclusive")
    with pytest.raises(InputError, match=r"expected maps of shape \(12, 3, 3\)"):
        found(follows, maps=torch.rand(12, 3, 3))


def test_whole_pixels_are_moved_exactly_and_halves_are_means():
    values = torch.arange(12.0).view(1, 1, 3, 4)
    assert shifted(values, 1.0, 0.0)[0, 0, :, 0].tolist() == [0, 0, 4]
    assert shifted(values, 0.0, -2.0)[0, 0, 0].tolist() == [2, 3, 3, 3]
    assert shifted(values, 0.0, 0.5)[0, 0, 0].tolist() == [0, 0.5, 1.5, 2.5]
    assert torch.equal(shifted(values, 0.0, 0.0), values)
    padded = F.pad(values, (2, 2, 2, 2), mode="replicate")
    theta = torch.tensor([[[1.0, 0, -2 * 0.3 / 8], [0, 1, -2 * 0.7 / 7]]])
    grid = F.affine_grid(theta, [1, 1, 7, 8], align_corners=False)
    expected = F.grid_sample(padded, grid, align_corners=False)[..., 2:-2, 2:-2]
    torch.testing.assert_close(shifted(values, 0.7, 0.3), expected, atol=1e-5, rtol=0)


def test_a_flip_twice_is_nothing():
    flip = DISTURBANCES["flip"]
    assert torch.equal(disturbed(disturbed(BATCH, flip), flip), BATCH)


@pytest.mark.parametrize(
    ("correlation", "jumped", "state"),
    [
        (Estimate(0.9, 0.8, 0.95), wilson(0, 16), "pass"),
        (Estimate(0.9, 0.8, 0.95), wilson(12, 16), "fail"),
        (Estimate(0.3, 0.2, 0.4), wilson(0, 16), "fail"),
        (Estimate(0.9, 0.8, 0.95), wilson(4, 16), "inconclusive"),
        (Estimate(0.6, 0.4, 0.8), wilson(0, 16), "inconclusive"),
        (Estimate(0.9, 0.8, 0.95), wilson(9, 9), "inconclusive"),  # few images
        (None, None, "inconclusive"),
    ],
)
def test_the_rule(correlation, jumped, state):
    assert judged_stability(correlation, jumped).state == state
