"""Activation patching: the logit difference that activations of a clean run restore.

Heads and single tokens are patched from the clean run into a corrupted one, one at a time. The
metric is the difference of two logits (Wang 2023; Heimersheim and Nanda 2024).
"""

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

# smallest difference between both runs, in logits: rounding is about a hundredth of it
SMALLEST_GAP = 1e-3
NOISE = 0.5  # standard deviation of noise, for pixels in [0, 1]
_TILES = 4  # least number of tiles along a side


@dataclass(frozen=True)
class Patching:
    """The effect of patching each head and token of the clean runs into the corrupted ones.

    All tensors are on the CPU. The effect is the change of the logit difference, positive towards
    that of the clean image. NaN fills up layers with fewer heads or tokens.

    heads: the effect of each head.
    positions: the effect of each token of the residual stream at a block's input.
    clean, corrupted (pairs,): the logit of the target minus that of the other class in each run.
    targets, others: the classes.
    """

    heads: Float[Tensor, "pairs layers heads"]
    positions: Float[Tensor, "pairs layers tokens"]
    clean: Float[Tensor, " pairs"]
    corrupted: Float[Tensor, " pairs"]
    targets: Int[Tensor, " pairs"]
    others: Int[Tensor, " pairs"]

    def restored(self, part: Literal["heads", "positions"]) -> Float[Tensor, "layers places"]:
        """Return the restored share of the gap (clean minus corrupted): 1 is all of it, 0 none.

        It is the mean over pairs, weighted by the size of their gaps.
        """
        gaps = self.clean - self.corrupted
        effects = self.heads if part == "heads" else self.positions
        # the sum over pairs p of |gap| * (effect / gap) is the sum of sign(gap) * effect
        weighted_sum = torch.einsum("p,p...->...", gaps.sign(), effects)
        return weighted_sum / gaps.abs().sum()


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

    clean, corrupted: the pairs of images, in the same order (see `corrupt`).
    targets: the first class of the logit difference (None: the prediction for the clean image).
    others: the second class (None: the prediction for the corrupted image).

    Raises InputError if both runs have the same logit difference, for images that are not pairs,
    and for classes that do not exist. Raises UnsupportedError for a model without attention.
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
    # `patch` calls the run that it changes "clean"; here this is the corrupted run
    clean_logits = patched.other
    corrupted_logits = patched.clean
    target_classes = check_targets(targets, clean_logits)
    other_classes = check_targets(others, corrupted_logits)
    pairs = torch.arange(len(clean), device=model.device)
    # (runs, pairs, classes): the clean run, the corrupted run, then one for each patched place
    logits = torch.cat((clean_logits[None], corrupted_logits[None], patched.logits))
    # one row for each pair, and one column for each run
    differences = (logits[:, pairs, target_classes] - logits[:, pairs, other_classes]).T
    clean_difference = differences[:, 0]
    corrupted_difference = differences[:, 1]
    small = ((clean_difference - corrupted_difference).abs() < SMALLEST_GAP).nonzero()
    if len(small):
        pair = int(small[0])
        target = model.classes[int(target_classes[pair])]
        other = model.classes[int(other_classes[pair])]
        raise InputError(
            "expected clean and corrupted runs that differ, found the same logit difference "
            f"({target} - {other}) in both runs of pair {pair}; choose other images or classes, "
            "or a stronger corruption"
        )
    changes = (differences[:, 2:] - corrupted_difference[:, None]).cpu()
    head_changes = changes[:, : len(head_places)]
    token_changes = changes[:, len(head_places) :]
    layer_numbers = [layer.index for layer in layers]
    heads = head_changes.split([layer.heads for layer in layers], 1)
    tokens = token_changes.split([layer.tokens for layer in layers], 1)
    return Patching(
        heads=stack_layers(dict(zip(layer_numbers, heads)), depth(model)),
        positions=stack_layers(dict(zip(layer_numbers, tokens)), depth(model)),
        clean=clean_difference.cpu(),
        corrupted=corrupted_difference.cpu(),
        targets=target_classes.cpu(),
        others=other_classes.cpu(),
    )


def corrupt(images: Images, how: str = "noise", *, seed: int = 0) -> Images:
    """Return images with their content removed, in [0, 1].

    how: the corruption:
        - "noise" adds Gaussian noise of standard deviation 0.5;
        - "blur" is a Gaussian with an eighth of the shorter side as standard deviation;
        - "shuffle" puts 4 x 4 tiles in random order, or more along a side that 4 does not divide.
    seed: the seed of noise and shuffle. The corruption of an image depends on its index in the
        batch, not on the other images.

    Raises UnknownNameError for another corruption.
    """
    if how not in CORRUPTIONS:
        raise UnknownNameError("corruption", how, CORRUPTIONS)
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([CORRUPTIONS[how](image, generator) for image in images]).clamp(0, 1)


def _noise(image: Tensor, generator: Generator) -> Tensor:
    return image + NOISE * torch.randn(image.shape, generator=generator).to(image)


def _blur(image: Tensor, _generator: Generator) -> Tensor:
    side = min(image.shape[-2:])
    sigma = side / 8
    # sizes of the kernel, odd: up to 2 sigma on both sides, but the padding, half of the kernel,
    # must be smaller than the image
    preferred_size = 2 * (side // 4) + 1
    largest_size = 2 * ((side - 1) // 2) + 1
    size = min(preferred_size, largest_size)
    blurred: Tensor = transforms.gaussian_blur(image, [size, size], [sigma, sigma])
    return blurred


def _shuffle(image: Tensor, generator: Generator) -> Tensor:
    height, width = image.shape[-2:]
    rows = _tiles_along(height)
    columns = _tiles_along(width)
    # as (3, rows, tile height, columns, tile width)
    on_grid = image.unflatten(1, (rows, height // rows)).unflatten(3, (columns, width // columns))
    # as (rows * columns, 3, tile height, tile width)
    tiles = on_grid.permute(1, 3, 0, 2, 4).flatten(0, 1)
    order = torch.randperm(len(tiles), generator=generator).to(image.device)
    # back to (3, rows, tile height, columns, tile width)
    moved = tiles[order].unflatten(0, (rows, columns)).permute(2, 0, 3, 1, 4)
    shuffled: Tensor = moved.reshape(image.shape)
    return shuffled


def _tiles_along(side: int) -> int:
    """Return the smallest number of equal tiles from 4 on, or one a pixel for a shorter side."""
    counts = [count for count in range(_TILES, side + 1) if side % count == 0]
    return counts[0] if counts else side


CORRUPTIONS: Final[dict[str, Callable[[Tensor, Generator], Tensor]]] = {
    "noise": _noise,
    "blur": _blur,
    "shuffle": _shuffle,
}
