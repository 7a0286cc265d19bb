"""Holes filled from around them, against the grad-cam package's linear system in scipy's direct solver."""

import pytest
import torch
from scipy.sparse import csc_matrix
from scipy.sparse.linalg import spsolve
from torch import Tensor

from tests.lens.tiny import images
from vitlens.analysis.faithfulness.imputation import TOLERANCE, imputed
from vitlens.analysis.faithfulness.masking import pixel_masks
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
    with pytest.raises(InputError, match="removed whole"):
        imputed(images((32, 48)), torch.ones(2, 1, 32, 48, dtype=torch.bool))
