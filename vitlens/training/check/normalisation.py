"""Whether pixels are normalised once: measured from what enters the first layer."""

from typing import Final, NamedTuple

import torch
from torch import Tensor

from vitlens.models.model import Model
from vitlens.shapes import Images
from vitlens.training.check.rows import CheckRow

CLOSE: Final = 0.02  # relative difference up to which two scales are one
MOST_MEAN, LEAST_SPREAD, MOST_SPREAD = 2.5, 0.05, 5.0  # of what enters the first layer, by channel
_EXPECTED: Final = (
    f"pixels normalised once: a mean within {MOST_MEAN:g} and a standard deviation from {LEAST_SPREAD:g} to "
    f"{MOST_SPREAD:g} in every channel"
)


class Scaling(NamedTuple):
    """What enters the first layer as a linear function of the pixels, by channel: slope · pixel + offset."""

    slope: Tensor
    offset: Tensor


def normalisation_check(model: Model, images: Images, entering: Tensor | None) -> CheckRow:
    """Pixels are normalised by the model or within its module, not by both, to numbers of about the size of 1.

    images: in [0, 1]; entering: the input of the first layer for them, None where none was seen.
    """
    prepared = model.prepare(images)
    pixels = prepared * model.std + model.mean
    fitted = None if entering is None or entering.shape != pixels.shape else _linear(pixels, entering)
    if fitted is None:
        found = "a first layer whose input is not a linear function of the pixels"
        advice = "Check by hand that nothing in the module normalises the pixels that vitlens has normalised."
        return CheckRow("normalisation", "inconclusive", _EXPECTED, found, advice)
    own = (1 / model.std.flatten()).cpu()
    mean = (fitted.slope * pixels.mean((0, 2, 3)).cpu() + fitted.offset).tolist()
    spread = (fitted.slope.abs() * pixels.std((0, 2, 3)).cpu()).tolist()
    found = f"means of {_each(mean)}, standard deviations of {_each(spread)}"
    value = max(spread)
    scaled_by_model = bool((own - 1).abs().amax() > CLOSE) or bool(model.mean.abs().amax() > CLOSE)
    changed = (fitted.slope / own - 1).abs().amax() > CLOSE
    if scaled_by_model and changed:
        found += f"; vitlens multiplies by {_each(own.tolist())}, and the module once more by "
        found += _each((fitted.slope / own).tolist())
        advice = (
            "Pixels are normalised twice: remove the normalisation from the module, or wrap it with mean 0 and "
            "standard deviation 1."
        )
        return CheckRow("normalisation", "fail", _EXPECTED, found, advice, value)
    if max(map(abs, mean)) > MOST_MEAN or not LEAST_SPREAD <= min(spread) <= value <= MOST_SPREAD:
        advice = "Check --mean and --std, which are fractions of 1: 0.485, not 123.7."
        return CheckRow("normalisation", "fail", _EXPECTED, found, advice, value)
    return CheckRow("normalisation", "pass", _EXPECTED, found, value=value)


@torch.no_grad()
def _linear(pixels: Tensor, entering: Tensor) -> Scaling | None:
    """The line through the values of each channel; None where pixels are constant or the fit leaves a rest."""
    x, y = (each.float().cpu().transpose(0, 1).flatten(1) for each in (pixels, entering))  # (3, values)
    centre_x, centre_y = x.mean(1, keepdim=True), y.mean(1, keepdim=True)
    spread = (x - centre_x).square().mean(1)
    if (spread < 1e-10).any():
        return None
    slope = ((x - centre_x) * (y - centre_y)).mean(1) / spread
    offset = centre_y.squeeze(1) - slope * centre_x.squeeze(1)
    rest = (y - slope[:, None] * x - offset[:, None]).square().mean(1)
    whole = (y - centre_y).square().mean(1)
    return Scaling(slope, offset) if bool((rest <= 1e-4 * whole + 1e-12).all()) else None


def _each(values: list[float]) -> str:
    """Three numbers; one where they are equal."""
    words = [f"{value:.2f}" for value in values]
    return words[0] if len(set(words)) == 1 else " / ".join(words)
