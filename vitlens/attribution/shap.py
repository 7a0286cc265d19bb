"""KernelSHAP over patches (Lundberg & Lee 2017): each patch's Shapley value for the target's logit.

captum's KernelShap samples and solves image by image; here all images share the same coalitions, sampled in pairs of
complements (Covert & Lee 2021), so that one small system is solved for all of them. The values sum to F(image) -
F(its mean colour) exactly, by constraint.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from vitlens.analysis.faithfulness.maps import removal_grid
from vitlens.attribution.defaults import COALITIONS
from vitlens.attribution.occlusion import scores_without
from vitlens.errors import InputError
from vitlens.models.model import Model
from vitlens.names import DEFAULT_SEED
from vitlens.shapes import Images, Labels, Maps

Coalitions = Bool[Tensor, "coalitions players"]


def kernel_shap(
    model: Model, images: Images, targets: Labels, *, coalitions: int | None = None, seed: int = DEFAULT_SEED
) -> Maps:
    """Estimated Shapley values of the patches for the target's logit: (batch, rows, columns), signed.

    coalitions: forwards per image (None: 512, or four per patch where that is more). Where there are no more coalitions
    than that, all are evaluated and the values are exact. Raises InputError for fewer than three per patch.
    """
    rows, columns = removal_grid(model)
    players = rows * columns
    count = coalitions or max(COALITIONS, 4 * players)
    if players < 2:
        raise InputError("expected at least two patches to share the logit between, found one")
    exact = 2**players - 2 <= count
    if not exact and count < 3 * players:  # pairs of complements: the system needs two per patch
        raise InputError(f"expected at least {3 * players} coalitions of {players} patches, found {count}")
    chosen, weights = _all_coalitions(players) if exact else _sampled_coalitions(players, count, seed)
    ends = torch.tensor([[False], [True]]).expand(2, players)
    scores = scores_without(model, images, targets, ~torch.cat((ends, chosen))).double().cpu()
    empty, full, sampled = scores[:, 0], scores[:, 1], scores[:, 2:]  # the coalitions of no patch, all, and some
    values = shapley_values(chosen, weights, sampled - empty[:, None], full - empty)
    return values.float().view(-1, rows, columns).to(images.device)


def shapley_values(
    chosen: Coalitions,
    weights: Float[Tensor, " coalitions"],
    gains: Float[Tensor, "batch coalitions"],
    whole: Float[Tensor, " batch"],
) -> Float[Tensor, "batch players"]:
    """The weighted least-squares solution whose sum is constrained to `whole` (Covert & Lee 2021, eq. 7).

    chosen: the players of each coalition; gains: of each coalition over the empty one; whole: of all players over it.
    """
    design = chosen.double()
    weighted = design * weights[:, None]
    inverse = torch.linalg.inv(design.T @ weighted)
    unconstrained = gains @ weighted @ inverse  # (batch, players)
    ones = inverse.sum(0)
    values: Tensor = unconstrained + (whole - unconstrained.sum(1))[:, None] * ones / ones.sum()
    return values


def _all_coalitions(players: int) -> tuple[Coalitions, Float[Tensor, " coalitions"]]:
    """All coalitions except the empty and the full one, with the Shapley kernel's weights."""
    numbers = torch.arange(1, 2**players - 1)
    chosen = (numbers[:, None] >> torch.arange(players)) % 2 == 1
    size = chosen.sum(1).double()
    ways = (torch.lgamma(torch.tensor(players + 1.0)) - torch.lgamma(size + 1) - torch.lgamma(players - size + 1)).exp()
    return chosen, (players - 1) / (ways * size * (players - size))


def _sampled_coalitions(players: int, count: int, seed: int) -> tuple[Coalitions, Float[Tensor, " coalitions"]]:
    """Coalitions sampled with the Shapley kernel's weights, and their complements."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.arange(1, players).double()
    sizes = torch.multinomial(1 / (size * (players - size)), count // 2, replacement=True, generator=generator) + 1
    ranks = torch.rand(count // 2, players, generator=generator).argsort(1).argsort(1)
    half = ranks < sizes[:, None]
    return torch.cat((half, ~half)), torch.ones(2 * (count // 2), dtype=torch.float64)
