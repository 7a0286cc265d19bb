"""Maps that know nothing of the model: what every method must beat."""

import torch

from vitlens.shapes import Maps

CENTRE = 1 / 4  # standard deviation of the centre Gaussian as a share of each side


def random_maps(count: int, grid: tuple[int, int], *, seed: int = 0) -> Maps:
    """A map of uniform noise for each of count images; the first ones do not depend on how many follow."""
    return torch.rand(count, *grid, generator=torch.Generator().manual_seed(seed))


def centre_maps(count: int, grid: tuple[int, int]) -> Maps:
    """The same map for every image: a Gaussian at its centre, as photographers place their object."""
    rows, columns = (torch.linspace(-0.5, 0.5, side + 1)[:-1] + 0.5 / side for side in grid)
    one = torch.exp(-(rows[:, None] ** 2 + columns[None, :] ** 2) / (2 * CENTRE**2))
    return one.expand(count, *grid).clone()
