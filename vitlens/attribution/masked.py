"""Attributions by removing parts of the image: occlusion, RISE and KernelSHAP.

KernelSHAP is over patches (Lundberg & Lee 2017). captum's KernelShap samples and solves image by
image; here all images share the same coalitions, sampled in pairs of complements (Covert & Lee
2021), so that one small system is solved for all of them. The values sum to F(image) - F(its mean
colour) exactly, by constraint.
"""

from math import ceil

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F

from vitlens.analysis.evaluation.evaluate import fitting_batch_size
from vitlens.analysis.faithfulness.maps import removal_grid
from vitlens.analysis.faithfulness.removal import Variants
from vitlens.attribution.registry import COALITIONS, MASKS
from vitlens.devices import evaluating
from vitlens.errors import InputError
from vitlens.models.language_image import class_scores
from vitlens.models.model import Model
from vitlens.names import DEFAULT_SEED
from vitlens.shapes import Images, Labels, Maps

Coalitions = Bool[Tensor, "coalitions players"]
_CELLS = 7  # along each side of a mask before it is enlarged, as in the paper
_VISIBLE = 0.5  # share of cells that stay visible


def occlusion(model: Model, images: Images, targets: Labels) -> Maps:
    """Return the fall of the target's logit when a patch takes the mean colour of the image.

    Maps are (batch, rows, columns), signed (Zeiler & Fergus 2014). For a CNN the image is divided
    into patches as for a ViT. One forward per patch and image, and one for the image.
    """
    rows, columns = removal_grid(model)
    one_patch = torch.eye(rows * columns, dtype=torch.bool)
    no_patch = torch.zeros_like(one_patch[:1])
    scores = scores_without(model, images, targets, torch.cat((no_patch, one_patch)))
    falls: Tensor = (scores[:, :1] - scores[:, 1:]).unflatten(1, (rows, columns))
    return falls


def scores_without(
    model: Model, images: Images, targets: Labels, removed: Bool[Tensor, "variants patches"]
) -> Float[Tensor, "batch variants"]:
    """Return the target's logit of every image without each set of patches.

    The patches take the mean colour of the image.
    """
    variants = Variants(model, images, substrate="mean")
    # all variants of the first image, then all of the second, ...
    image_of_variant = torch.arange(len(images)).repeat_interleave(len(removed))
    logits = variants.logits(image_of_variant, removed.repeat(len(images), 1))
    classes = targets.to(logits.device).repeat_interleave(len(removed))
    scores: Tensor = logits.gather(1, classes[:, None]).view(len(images), len(removed))
    return scores


def rise(
    model: Model, images: Images, targets: Labels, *, masks: int = MASKS, seed: int = DEFAULT_SEED
) -> Maps:
    """Return the target's mean probability over the masks in which a pixel is visible.

    Maps are (batch, height, width), a fraction. Every image gets the same masks: 7 x 7 cells, each
    visible with probability one half, enlarged bilinearly and shifted at random; masked pixels take
    the mean colour of the model, which its normalisation turns into 0. One forward per mask and
    image. Raises InputError for less than one mask.
    """
    if masks < 1:
        raise InputError(f"expected masks of at least 1, found {masks}")
    size = (int(images.shape[2]), int(images.shape[3]))
    at_once = max(1, fitting_batch_size(model) // len(images))
    generator = torch.Generator().manual_seed(seed)
    covered = images.new_zeros(size)
    total = images.new_zeros(len(images), *size)
    with evaluating(model), torch.no_grad():
        for start in range(0, masks, at_once):
            count = min(at_once, masks - start)
            visible = torch.stack([_mask(size, generator) for _ in range(count)]).to(images)
            # shape: masks, batch, 3, height, width
            masked = model.mean + visible[:, None, None] * (images - model.mean)
            probabilities = class_scores(model, model(masked.flatten(0, 1)))
            scores = probabilities.gather(1, targets.repeat(count)[:, None]).view(count, -1)
            # m: masks, b: batch, h: height, w: width
            total += torch.einsum("mb,mhw->bhw", scores.to(visible), visible)
            covered += visible.sum(0)
    # the paper divides by the expected share of visible pixels; the actual share leaves no pattern
    # of uneven masks
    return total / covered.clamp_min(torch.finfo(covered.dtype).tiny)


def _mask(size: tuple[int, int], generator: torch.Generator) -> Float[Tensor, "height width"]:
    """Return one soft mask, cropped at random from one that is a cell larger in both directions."""
    height, width = size
    cell_height = ceil(height / _CELLS)
    cell_width = ceil(width / _CELLS)
    coarse = (torch.rand(1, 1, _CELLS, _CELLS, generator=generator) < _VISIBLE).float()
    larger = ((_CELLS + 1) * cell_height, (_CELLS + 1) * cell_width)
    fine = F.interpolate(coarse, size=larger, mode="bilinear", align_corners=False)[0, 0]
    top = int(torch.randint(cell_height, (1,), generator=generator))
    left = int(torch.randint(cell_width, (1,), generator=generator))
    return fine[top : top + height, left : left + width]


def kernel_shap(
    model: Model,
    images: Images,
    targets: Labels,
    *,
    coalitions: int | None = None,
    seed: int = DEFAULT_SEED,
) -> Maps:
    """Return estimated Shapley values of the patches for the target's logit.

    Maps are (batch, rows, columns), signed. coalitions: forwards per image (None: 512, or four per
    patch where that is more). Where there are no more coalitions than that, all are evaluated and
    the values are exact. Raises InputError for fewer than three per patch.
    """
    rows, columns = removal_grid(model)
    players = rows * columns
    count = max(COALITIONS, 4 * players) if coalitions is None else coalitions
    if players < 2:
        raise InputError("expected at least two patches to share the logit between, found one")
    is_exact = 2**players - 2 <= count
    if not is_exact and count < 3 * players:  # pairs of complements: the system needs two per patch
        raise InputError(
            f"expected at least {3 * players} coalitions of {players} patches, found {count}"
        )
    if is_exact:
        chosen, weights = _all_coalitions(players)
    else:
        chosen, weights = _sampled_coalitions(players, count, seed)
    none_and_all = torch.tensor([[False], [True]]).expand(2, players)
    removed = ~torch.cat((none_and_all, chosen))
    scores = scores_without(model, images, targets, removed).double().cpu()
    empty = scores[:, 0]
    full = scores[:, 1]
    gains = scores[:, 2:] - empty[:, None]
    values = shapley_values(chosen, weights, gains, full - empty)
    return values.float().view(-1, rows, columns).to(images.device)


def shapley_values(
    chosen: Coalitions,
    weights: Float[Tensor, " coalitions"],
    gains: Float[Tensor, "batch coalitions"],
    total: Float[Tensor, " batch"],
) -> Float[Tensor, "batch players"]:
    """Return the weighted least-squares solution with a constrained sum (Covert & Lee 2021, eq. 7).

    chosen: the players of each coalition.
    gains: the gain of each coalition over the empty one.
    total: the gain of all players over the empty coalition, the sum of the solution.
    """
    design = chosen.double()  # the paper's z
    weighted = design * weights[:, None]
    inverse = torch.linalg.inv(design.T @ weighted)  # A⁻¹
    unconstrained = gains @ weighted @ inverse  # A⁻¹ b: (batch, players)
    inverse_sums = inverse.sum(0)  # A⁻¹ 1
    missing = (total - unconstrained.sum(1))[:, None]
    values: Tensor = unconstrained + missing * inverse_sums / inverse_sums.sum()
    return values


def _all_coalitions(players: int) -> tuple[Coalitions, Float[Tensor, " coalitions"]]:
    """Return all coalitions but the empty and the full one, with weights of the Shapley kernel."""
    # bit i of a coalition's number says if player i is in it
    numbers = torch.arange(1, 2**players - 1)
    chosen = (numbers[:, None] >> torch.arange(players)) % 2 == 1
    size = chosen.sum(1).double()
    # the number of coalitions of this size, players over size
    equally_large = (
        torch.lgamma(torch.tensor(players + 1.0))
        - torch.lgamma(size + 1)
        - torch.lgamma(players - size + 1)
    ).exp()
    return chosen, (players - 1) / (equally_large * size * (players - size))


def _sampled_coalitions(
    players: int, count: int, seed: int
) -> tuple[Coalitions, Float[Tensor, " coalitions"]]:
    """Return coalitions sampled by the weights of the Shapley kernel, and their complements."""
    generator = torch.Generator().manual_seed(seed)
    pairs = count // 2
    # the kernel's total weight of all coalitions of a size
    possible_sizes = torch.arange(1, players).double()
    weights = 1 / (possible_sizes * (players - possible_sizes))
    indices = torch.multinomial(weights, pairs, replacement=True, generator=generator)
    sizes = indices + 1
    # a random order of the players for each coalition, which takes the first ones
    ranks = torch.rand(pairs, players, generator=generator).argsort(1).argsort(1)
    sampled = ranks < sizes[:, None]
    equal_weights = torch.ones(2 * pairs, dtype=torch.float64)
    return torch.cat((sampled, ~sampled)), equal_weights
