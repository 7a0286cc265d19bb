"""Activation patching: the logit difference that activations of a clean run restore.

Heads and single tokens are patched from the clean run into a corrupted one, one at a time; the
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
from vitlens.analysis.patching.contribution import stack_layers
from vitlens.errors import InputError, UnknownNameError
from vitlens.lens.replay import patch
from vitlens.lens.trace import blocks, depth
from vitlens.models.model import Model
from vitlens.references import import_without_compiler
from vitlens.shapes import Images, Labels

transforms = import_without_compiler("torchvision.transforms.v2.functional")

# logits: a smaller gap would be mostly rounding, which is about a hundredth of this
SMALLEST_GAP = 1e-3
NOISE = 0.5  # standard deviation, pixels in [0, 1]


@dataclass(frozen=True)
class Patching:
    """The effect of patching each head and token of the clean runs into the corrupted ones.

    heads, positions: change of the logit difference (logits), positive towards the clean image's;
        NaN where a layer has fewer heads or tokens than the widest.
    positions: the residual stream at a block's input, one token.
    clean, corrupted (pairs,): the logit difference target minus other in each run.
    targets, others: the classes.

    All on the CPU.
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
    """Patch every head and token of each clean image's run into its corrupted partner's.

    They are patched one at a time.

    clean, corrupted: pairs, in the same order (see `corrupt`).
    targets, others: the classes of the logit difference, by default the clean image's prediction
        and the corrupted one's.

    Raises InputError where both runs have the same logit difference, for images that are not pairs
    and classes that do not exist; UnsupportedError for a model without attention.
    """
    size = tuple(clean.shape[2:])
    other_size = tuple(corrupted.shape[2:])
    if size != other_size:
        raise InputError(f"expected pairs of images of one size, found {size} and {other_size} px")
    layers = blocks(model)
    head_places = []
    for layer in layers:
        head_places += [f"blocks.{layer.index}.head.{head}" for head in range(layer.heads)]
    token_places = [f"blocks.{layer.index}.tokens[*]" for layer in layers]
    patched = patch(model, corrupted, clean, head_places + token_places)
    target_classes = check_targets(targets, patched.other)
    other_classes = check_targets(others, patched.clean)
    pairs = torch.arange(len(clean), device=model.device)
    # `patch` calls the run that it changes clean; here this is the corrupted one
    logits = torch.cat((patched.other[None], patched.clean[None], patched.logits))
    differences = (logits[:, pairs, target_classes] - logits[:, pairs, other_classes]).T
    of_clean = differences[:, 0]
    of_corrupted = differences[:, 1]
    small = ((of_clean - of_corrupted).abs() < SMALLEST_GAP).nonzero()
    if len(small):
        pair = int(small[0])
        target = model.classes[int(target_classes[pair])]
        other = model.classes[int(other_classes[pair])]
        raise InputError(
            "expected clean and corrupted runs that differ, found the same logit difference "
            f"({target} - {other}) in both runs of pair {pair}; choose other images or classes, "
            "or a stronger corruption"
        )
    changes = (differences[:, 2:] - differences[:, 1:2]).cpu()
    of_heads, of_tokens = changes.split([len(head_places), changes.shape[1] - len(head_places)], 1)
    numbers = [layer.index for layer in layers]
    heads = of_heads.split([layer.heads for layer in layers], 1)
    tokens = of_tokens.split([layer.tokens for layer in layers], 1)
    return Patching(
        heads=stack_layers(dict(zip(numbers, heads)), depth(model)),
        positions=stack_layers(dict(zip(numbers, tokens)), depth(model)),
        clean=of_clean.cpu(),
        corrupted=of_corrupted.cpu(),
        targets=target_classes.cpu(),
        others=other_classes.cpu(),
    )


def corrupt(images: Images, how: str = "noise", *, seed: int = 0) -> Images:
    """Return images with their content removed, in [0, 1].

    noise: Gaussian noise of standard deviation 0.5 added; blur: a Gaussian of an eighth of the
    shorter side; shuffle: 4 x 4 tiles (more where 4 does not divide the sides) in random order.
    seed: the seed of noise and shuffle; an image's corruption depends on its index in the batch,
        not on the other images. Raises UnknownNameError for another name.
    """
    if how not in CORRUPTIONS:
        raise UnknownNameError("corruption", how, CORRUPTIONS)
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([CORRUPTIONS[how](image, generator) for image in images]).clamp(0, 1)


def _noise(image: Tensor, generator: Generator) -> Tensor:
    return image + NOISE * torch.randn(image.shape, generator=generator).to(image)


def _blur(image: Tensor, _generator: Generator) -> Tensor:
    side = min(image.shape[-2:])
    preferred_size = 2 * (side // 4) + 1
    largest_size = 2 * ((side - 1) // 2) + 1  # the padding must be smaller than the image
    size = min(preferred_size, largest_size)  # of the kernel, odd
    blurred: Tensor = transforms.gaussian_blur(image, [size, size], [side / 8, side / 8])
    return blurred


def _shuffle(image: Tensor, generator: Generator) -> Tensor:
    height, width = image.shape[-2:]
    divisor = math.gcd(height, width)
    counts = [count for count in range(4, divisor + 1) if divisor % count == 0]
    parts = counts[0] if counts else divisor  # of each side
    on_grid = image.unflatten(1, (parts, height // parts)).unflatten(3, (parts, width // parts))
    tiles = on_grid.permute(1, 3, 0, 2, 4).flatten(0, 1)
    order = torch.randperm(len(tiles), generator=generator).to(image.device)
    # (3, parts, rows of a tile, parts, columns of a tile)
    moved = tiles[order].unflatten(0, (parts, parts)).permute(2, 0, 3, 1, 4)
    shuffled: Tensor = moved.reshape(image.shape)
    return shuffled


CORRUPTIONS: Final[dict[str, Callable[[Tensor, Generator], Tensor]]] = {
    "noise": _noise,
    "blur": _blur,
    "shuffle": _shuffle,
}
