"""ROAD's curves against a plain loop."""

import pytest
import torch
from scipy.sparse import csc_matrix
from scipy.sparse.linalg import spsolve
from torch import Tensor

from tests.analysis.linear import GRID, linear_model, worth
from tests.lens.tiny import images, ours
from vitlens.analysis.faithfulness.removal import pixel_masks
from vitlens.analysis.faithfulness.road import TOLERANCE, imputed, road
from vitlens.errors import InputError


def test_the_curves_are_a_plain_loops():
    model, batch, targets = ours(), images((32, 48)), torch.tensor([1, 4])
    maps = torch.rand(2, 4, 3, generator=torch.Generator().manual_seed(0))
    (found,) = road(model, batch, targets, [maps], shares=(0.25, 0.5))
    assert found.deletion.shares.tolist() == [0.25, 0.5]
    for curve, sign in ((found.deletion, 1), (found.least_first, -1)):
        for point, count in enumerate((3, 6)):
            gone = torch.zeros(2, 12, dtype=torch.bool)
            gone.scatter_(1, (sign * maps).flatten(1).topk(count, 1).indices, True)
            seen = imputed(batch, pixel_masks(gone, (4, 3), (32, 48)))
            with torch.no_grad():
                expected = model(seen).softmax(-1).gather(1, targets[:, None])[:, 0]
            torch.testing.assert_close(curve.probability[:, point], expected, atol=1e-4, rtol=1e-3)


def test_a_true_map_beats_its_opposite():
    model = linear_model()
    batch = images((16, 16), batch=4)
    truth = worth(model, batch)
    found, opposite = road(model, batch, torch.zeros(4, dtype=torch.long), [truth, -truth])
    assert found.gaps.mean() > 0.05
    torch.testing.assert_close(found.gaps, -opposite.gaps)
    assert GRID == (8, 8)


def test_wrong_calls():
    model, batch, targets = ours(), images((32, 48)), torch.tensor([1, 4])
    maps = torch.rand(2, 4, 3)
    for shares in ((1.0,), (-0.1, 0.5), ()):
        with pytest.raises(InputError, match="shares from 0 to below 1"):
            road(model, batch, targets, [maps], shares=shares)


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
    filled[:, hole] = torch.from_numpy(spsolve(csc_matrix(matrix), right)).to(image).T
    return filled


@pytest.mark.parametrize("size", [(24, 20), (23, 17), (96, 80)], ids=str)  # one, no and three coarser grids
@pytest.mark.parametrize("kind", ["middle", "chequers", "corner"])
def test_holes_are_filled_as_the_grad_cam_package_does(kind, size):
    batch, hole = images(size).double(), holes(kind, size)  # one corner of 96 x 80 is beyond float32's rounding
    found = imputed(batch, hole.expand(2, -1, -1, -1), noise=0.0)
    for image, own in zip(batch, found):
        torch.testing.assert_close(own, package_fills(image, hole[0, 0]), atol=TOLERANCE, rtol=0.0)


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


def test_an_image_that_is_all_hole_is_refused():
    with pytest.raises(InputError, match="without any"):
        imputed(images((32, 48)), torch.ones(2, 1, 32, 48, dtype=torch.bool))
