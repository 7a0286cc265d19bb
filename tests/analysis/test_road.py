"""ROAD's imputation against the grad-cam package's sparse solver, and its curves."""

import pytest
import torch
from scipy.sparse import csc_matrix
from scipy.sparse.linalg import spsolve
from torch import Tensor

from tests.analysis.linear import GRID, linear_specimen, worth
from tests.lens.tiny import images, ours
from vitlens.analysis.masking import pixel_masks
from vitlens.analysis.road import imputed, road
from vitlens.errors import InputError


def holes(kind: str, size: tuple[int, int] = (24, 20)) -> Tensor:
    """One hole in the middle, a chequered one, or all but a corner."""
    found = torch.zeros(1, 1, *size, dtype=torch.bool)
    if kind == "middle":
        found[..., 6:18, 5:15] = True
    elif kind == "chequers":
        found = pixel_masks(torch.arange(30).view(1, -1) % 2 == 0, (6, 5), size)
    else:
        found[...] = True
        found[..., :4, :4] = False
    return found


def package_fills(image: Tensor, hole: Tensor) -> Tensor:
    """The grad-cam package's linear system, solved by scipy; the package's own call stumbles over NumPy 2."""
    from pytorch_grad_cam.metrics.road import NoisyLinearImputer, neighbors_weights

    known = (~hole).float().numpy()
    matrix, right = NoisyLinearImputer.setup_sparse_system(known, image.numpy(), neighbors_weights)
    filled = image.clone()
    filled[:, hole] = torch.from_numpy(spsolve(csc_matrix(matrix), right)).float().T
    return filled


@pytest.mark.parametrize("kind", ["middle", "chequers", "corner"])
def test_holes_are_filled_as_the_grad_cam_package_does(kind):
    batch, hole = images((24, 20)), holes(kind)
    found = imputed(batch, hole.expand(2, -1, -1, -1), noise=0.0)
    for image, own in zip(batch, found):
        torch.testing.assert_close(own, package_fills(image, hole[0, 0]), atol=2e-3, rtol=0.0)


def test_what_is_known_stays_and_what_is_even_is_even():
    batch, hole = images((24, 20)), holes("middle").expand(2, -1, -1, -1)
    found = imputed(batch, hole)
    assert torch.equal(found[~hole.expand(-1, 3, -1, -1)], batch[~hole.expand(-1, 3, -1, -1)])
    even = torch.full_like(batch, 0.4)
    torch.testing.assert_close(imputed(even, hole, noise=0.0), even, atol=1e-3, rtol=0.0)
    noisy = imputed(even, hole)[hole.expand(-1, 3, -1, -1)]
    assert 0.005 < noisy.std() < 0.015


def test_an_image_does_not_depend_on_its_neighbours():
    batch = images((24, 20), batch=3)
    hole = torch.cat([holes(kind) for kind in ("middle", "chequers", "corner")])
    together = imputed(batch, hole)
    for index in range(3):
        alone = imputed(batch[index : index + 1], hole[index : index + 1])
        torch.testing.assert_close(together[index : index + 1], alone, atol=1e-3, rtol=0.0)


def test_the_curves_are_a_plain_loops():
    specimen, batch, targets = ours(), images((32, 48)), torch.tensor([1, 4])
    maps = torch.rand(2, 4, 3, generator=torch.Generator().manual_seed(0))
    (found,) = road(specimen, batch, targets, [maps], shares=(0.25, 0.5))
    assert found.deletion.shares.tolist() == [0.25, 0.5]
    for curve, sign in ((found.deletion, 1), (found.least_first, -1)):
        for point, count in enumerate((3, 6)):
            gone = torch.zeros(2, 12, dtype=torch.bool)
            gone.scatter_(1, (sign * maps).flatten(1).topk(count, 1).indices, True)
            seen = imputed(batch, pixel_masks(gone, (4, 3), (32, 48)))
            with torch.no_grad():
                expected = specimen(seen).softmax(-1).gather(1, targets[:, None])[:, 0]
            torch.testing.assert_close(curve.probability[:, point], expected, atol=1e-4, rtol=1e-3)


def test_a_true_map_beats_its_opposite():
    specimen = linear_specimen()
    batch = images((16, 16), batch=4)
    truth = worth(specimen, batch)
    found, opposite = road(specimen, batch, torch.zeros(4, dtype=torch.long), [truth, -truth])
    assert found.gaps.mean() > 0.05
    torch.testing.assert_close(found.gaps, -opposite.gaps)
    assert GRID == (8, 8)


def test_wrong_calls():
    specimen, batch, targets = ours(), images((32, 48)), torch.tensor([1, 4])
    maps = torch.rand(2, 4, 3)
    for shares in ((1.0,), (-0.1, 0.5), ()):
        with pytest.raises(InputError, match="shares from 0 to below 1"):
            road(specimen, batch, targets, [maps], shares=shares)
    with pytest.raises(InputError, match="removed whole"):
        imputed(batch, torch.ones(2, 1, 32, 48, dtype=torch.bool))
