"""Activation patching: which activations of a clean run, put into a corrupted one, restore the
logit difference.

Heads and single tokens are patched from the clean run into the corrupted one, one at a time; the
metric is the difference of two logits (Wang 2023; Heimersheim and Nanda 2024).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

import torch
from jaxtyping import Float, Int
from torch import Generator, Tensor

from vitlens.analysis.attention.chain import check_targets
from vitlens.analysis.patching.contribution import stacked
from vitlens.errors import InputError, UnknownNameError
from vitlens.lens.replay import patch
from vitlens.lens.trace import blocks, depth
from vitlens.models.model import Model
from vitlens.references import import_without_compiler
from vitlens.shapes import Images, Labels

transforms = import_without_compiler("torchvision.transforms.v2.functional")

# logits: a smaller gap would be dominated by rounding, which is about a hundredth of this
SMALLEST_GAP = 1e-3
NOISE = 0.5  # standard deviation, pixels in [0, 1]


@dataclass(frozen=True)
class Patching:
    """The effect of patching each head and token of the clean runs into the corrupted ones.

    heads, positions: change of the logit difference (logits), positive towards the clean image's;
    NaN where a layer has fewer heads or tokens than the widest; positions: the residual stream at a
    block's input, one token. clean, corrupted (pairs,): the logit difference target minus other in
    each run; targets, others: the classes. All on the CPU.
    """

    heads: Float[Tensor, "pairs layers heads"]
    positions: Float[Tensor, "pairs layers tokens"]
    clean: Float[Tensor, " pairs"]
    corrupted: Float[Tensor, " pairs"]
    targets: Int[Tensor, " pairs"]
    others: Int[Tensor, " pairs"]

    def restored(self, part: Literal["heads", "positions"]) -> Float[Tensor, "layers places"]:
        """Return the restored share of the gap (clean minus corrupted): 1 is all of it, 0 none.

        Of several pairs the mean, weighted by the size of their gaps.
        """
        gaps = self.clean - self.corrupted
        return torch.einsum("p,p...->...", gaps.sign(), getattr(self, part)) / gaps.abs().sum()


def patch_parts(
    model: Model,
    clean: Images,
    corrupted: Images,
    *,
    targets: Labels | None = None,
    others: Labels | None = None,
) -> Patching:
    """Patch every head and token of each clean image's run into its corrupted partner's, one at a
    time.

    clean, corrupted: pairs, in the same order (`corrupt` makes corrupted images). targets, others:
    the classes whose logits are compared, by default the clean image's prediction and the corrupted
    one's. Raises InputError where both runs have the same logit difference, for images that are not
    pairs and classes that do not exist; UnsupportedError for a model without attention.
    """
    sizes = [tuple(each.shape[2:]) for each in (clean, corrupted)]
    if sizes[0] != sizes[1]:
        raise InputError(
            f"expected pairs of images of one size, found {sizes[0]} and {sizes[1]} px"
        )
    known = blocks(model)
    heads = [f"blocks.{layer.index}.head.{head}" for layer in known for head in range(layer.heads)]
    patched = patch(
        model, corrupted, clean, [*heads, *(f"blocks.{layer.index}.tokens[*]" for layer in known)]
    )
    chosen = check_targets(targets, patched.other), check_targets(others, patched.clean)
    pairs = torch.arange(len(clean), device=model.device)
    logits = torch.cat((patched.other[None], patched.clean[None], patched.logits))
    differences = (logits[:, pairs, chosen[0]] - logits[:, pairs, chosen[1]]).T
    whole = differences[:, 0]
    gone = differences[:, 1]
    changed = differences[:, 2:] - differences[:, 1:2]
    small = ((whole - gone).abs() < SMALLEST_GAP).nonzero()
    if len(small):
        pair = int(small[0])
        names = [model.classes[int(each[pair])] for each in chosen]
        raise InputError(
            "expected clean and corrupted runs that differ, found the same logit difference "
            f"({names[0]} - {names[1]}) in both runs of pair {pair}; choose other images or "
            "classes, or a "
            "stronger corruption"
        )
    by_layer = changed.cpu().split(
        [*(layer.heads for layer in known), *(layer.tokens for layer in known)], dim=1
    )
    numbers = [layer.index for layer in known]
    of_heads = dict(zip(numbers, by_layer[: len(known)]))
    of_tokens = dict(zip(numbers, by_layer[len(known) :]))
    tables = stacked(of_heads, depth(model)), stacked(of_tokens, depth(model))
    return Patching(*tables, *(each.cpu() for each in (whole, gone, *chosen)))


def corrupt(images: Images, how: str = "noise", *, seed: int = 0) -> Images:
    """Images with their content removed, in [0, 1].

    noise: Gaussian noise of standard deviation 0.5 added; blur: a Gaussian of an eighth of the
    shorter side; shuffle: 4 x 4 tiles (more where 4 does not divide the sides) in random order.
    seed: of noise and shuffle; an image's corruption depends on its index in the batch, not on the
    other images. Raises UnknownNameError for another name.
    """
    if how not in CORRUPTIONS:
        raise UnknownNameError("corruption", how, CORRUPTIONS)
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([CORRUPTIONS[how](image, generator) for image in images]).clamp(0, 1)


def _noise(image: Tensor, generator: Generator) -> Tensor:
    return image + NOISE * torch.randn(image.shape, generator=generator).to(image)


def _blur(image: Tensor, _generator: Generator) -> Tensor:
    side = min(image.shape[-2:])
    size = min(
        2 * (side // 4) + 1, 2 * ((side - 1) // 2) + 1
    )  # odd; the padding must be smaller than the image
    blurred: Tensor = transforms.gaussian_blur(image, [size, size], [side / 8, side / 8])
    return blurred


def _shuffle(image: Tensor, generator: Generator) -> Tensor:
    height, width = image.shape[-2:]
    common = math.gcd(height, width)
    parts = next((count for count in range(4, common + 1) if common % count == 0), common)
    split = image.unflatten(1, (parts, height // parts)).unflatten(3, (parts, width // parts))
    tiles = split.permute(1, 3, 0, 2, 4).flatten(0, 1)
    order = torch.randperm(len(tiles), generator=generator).to(image.device)
    laid = (
        tiles[order].unflatten(0, (parts, parts)).permute(2, 0, 3, 1, 4)
    )  # (3, parts, rows, parts, columns)
    shuffled: Tensor = laid.reshape(image.shape)
    return shuffled


CORRUPTIONS: Final[dict[str, Callable[[Tensor, Generator], Tensor]]] = {
    "noise": _noise,
    "blur": _blur,
    "shuffle": _shuffle,
}
