"""KernelSHAP over patches (Lundberg & Lee 2017): each patch's fair share in the target's logit.

captum's KernelShap draws and solves image by image; here all images answer to the same coalitions, drawn in pairs of
complements (Covert & Lee 2021), so that one small system is solved for all of them. The shares sum to F(image) -
F(its mean colour) exactly, by constraint.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from vitlens.analysis.faithfulness.resampled import removal_grid
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
    """Shapley values of the patches for the target's logit, estimated: (batch, rows, columns), signed.

    coalitions: forwards per image (None: 512, or four a patch where those are more). Where all coalitions are no more
    than that, all are taken and the values are exact. Raises InputError for fewer than three a patch.
    """
    rows, columns = removal_grid(model)
    players = rows * columns
    count = coalitions or max(COALITIONS, 4 * players)
    if players < 2:
        raise InputError("expected at least two patches to share the logit between, found one")
    exact = 2**players - 2 <= count
    if not exact and count < 3 * players:  # pairs of complements: fewer than two a patch cannot tell them apart
        raise InputError(f"expected at least {3 * players} coalitions of {players} patches, found {count}")
    chosen, weights = _every(players) if exact else _drawn(players, count, seed)
    ends = torch.tensor([[False], [True]]).expand(2, players)
    scores = scores_without(model, images, targets, ~torch.cat((ends, chosen))).double().cpu()
    none, every, drawn = scores[:, 0], scores[:, 1], scores[:, 2:]  # of the patches are there
    shares = shapley_values(chosen, weights, drawn - none[:, None], every - none)
    return shares.float().view(-1, rows, columns).to(images.device)


def shapley_values(
    chosen: Coalitions,
    weights: Float[Tensor, " coalitions"],
    gains: Float[Tensor, "batch coalitions"],
    whole: Float[Tensor, " batch"],
) -> Float[Tensor, "batch players"]:
    """The weighted least-squares shares of the players whose sum is what all of them gain (Covert & Lee 2021, eq. 7).

    chosen: who takes part in each coalition; gains: what each coalition gains over none.
    """
    design = chosen.double()
    weighted = design * weights[:, None]
    inverse = torch.linalg.inv(design.T @ weighted)
    free = gains @ weighted @ inverse  # (batch, players), the sum not yet held
    ones = inverse.sum(0)
    shares: Tensor = free + (whole - free.sum(1))[:, None] * ones / ones.sum()
    return shares


def _every(players: int) -> tuple[Coalitions, Float[Tensor, " coalitions"]]:
    """All coalitions but none and all, with the Shapley kernel's weights."""
    numbers = torch.arange(1, 2**players - 1)
    chosen = (numbers[:, None] >> torch.arange(players)) % 2 == 1
    size = chosen.sum(1).double()
    ways = (torch.lgamma(torch.tensor(players + 1.0)) - torch.lgamma(size + 1) - torch.lgamma(players - size + 1)).exp()
    return chosen, (players - 1) / (ways * size * (players - size))


def _drawn(players: int, count: int, seed: int) -> tuple[Coalitions, Float[Tensor, " coalitions"]]:
    """Coalitions drawn with the Shapley kernel's weights, each beside its complement."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.arange(1, players).double()
    sizes = torch.multinomial(1 / (size * (players - size)), count // 2, replacement=True, generator=generator) + 1
    places = torch.rand(count // 2, players, generator=generator).argsort(1).argsort(1)
    half = places < sizes[:, None]
    return torch.cat((half, ~half)), torch.ones(2 * (count // 2), dtype=torch.float64)
