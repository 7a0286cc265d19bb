"""Trials: forward passes of noise that show a model's structure, and what can be computed quickly.

A trial compares logits, so they must depend on the image. A head of zeros, such as that of
torchvision's untrained ViT, would pass every trial. Inside a trial, weights of zeros are therefore
replaced by noise.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import torch
from torch import Tensor, nn

TOLERANCE: Final = 1e-4  # in fp32, times the largest logit or, if that is smaller, times 1
# the two factors in the formula of `largest_allowed`
_TOLERANCES_OF_SPREAD: Final = 100.0
_TOLERANCES_OF_LARGEST: Final = 0.1
# a smaller difference between images, over the largest logit, is rounding
_LEAST_SPREAD: Final = 1e-6
_FIRST_ELEMENTS: Final = 64  # they show for nearly every weight that it is not zero


def zero_weights(module: nn.Module) -> tuple[nn.Parameter, ...]:
    """Return the parameters that are all zeros, except for biases."""
    zeros = []
    for name, parameter in module.named_parameters():
        if parameter.is_meta or parameter.is_inference() or not parameter.is_floating_point():
            continue
        values = parameter.detach()
        if "bias" in name.rpartition(".")[2] or not values.numel():
            continue
        starts_with_zeros = not values.flatten()[:_FIRST_ELEMENTS].any()
        if starts_with_zeros and not values.any():
            zeros.append(parameter)
    return tuple(zeros)


@contextmanager
def with_noise(zeros: Sequence[nn.Parameter]) -> Iterator[None]:
    """Put noise into some parameters inside.

    On exit they get their original memory back, so that they count as unchanged.
    """
    originals = [parameter.data for parameter in zeros]
    generator = torch.Generator().manual_seed(0)
    try:
        for parameter, values in zip(zeros, originals):
            fan_in = values.numel() // len(values) if values.dim() > 1 else 1
            # outputs of such weights have about the variance of the inputs
            noise = torch.randn(values.shape, generator=generator) / fan_in**0.5
            parameter.data = torch.empty_like(values).copy_(noise)
        yield
    finally:
        for parameter, values in zip(zeros, originals):
            parameter.data = values


def depends_on_image(logits: Tensor) -> bool:
    """Return True if logits (images, classes) differ between images by more than rounding."""
    wide = logits.detach().float()
    return bool((wide - wide[:1]).abs().max() > _LEAST_SPREAD * wide.abs().max())


def largest_allowed(logits: Tensor, tolerance: float = TOLERANCE) -> float:
    """Return the largest difference from the logits of several images that rounding explains.

    A larger difference shows another computation. It is 0 for logits that do not depend on the
    image, so that no trial can pass on them. It is small for a head with small logits.

    With the spread (largest difference between images) and the largest logit, it is
    tolerance x min(max(1, largest), max(100 spread, 0.1 largest)).
    """
    if not depends_on_image(logits):
        return 0.0
    wide = logits.detach().float()
    largest = wide.abs().max().item()
    spread = (wide - wide[:1]).abs().max().item()  # the largest difference from the first image
    # rounding is relative to the largest logit; below 1 it is counted as absolute
    limit_by_size = max(1.0, largest)
    # Another computation changes the logits by a share of their spread, so that a large limit would
    # hide it. Rounding may still be a tenth of a tolerance of the largest logit.
    limit_by_spread = max(_TOLERANCES_OF_SPREAD * spread, _TOLERANCES_OF_LARGEST * largest)
    return tolerance * min(limit_by_size, limit_by_spread)
