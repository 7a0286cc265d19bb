"""ROAD (Rong 2022): removal whose holes are filled from their surroundings, so that their shape tells nothing.

How holes are filled stands in imputation.py.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from vitlens.analysis.evaluate import fitting_batch_size
from vitlens.analysis.faithfulness import Faithfulness, Plan, curves_of
from vitlens.analysis.imputation import imputed
from vitlens.analysis.masking import Cells, once, pixel_masks, resized
from vitlens.analysis.resampled import AnyMaps, removal_grid
from vitlens.devices import evaluating
from vitlens.errors import InputError
from vitlens.models.specimen import Specimen
from vitlens.shapes import Images, Labels

SHARES = (0.2, 0.4, 0.6, 0.8)  # of the patches removed


def road(
    specimen: Specimen,
    images: Images,
    targets: Labels,
    maps: Sequence[AnyMaps],
    *,
    shares: Sequence[float] = SHARES,
    grid: Cells | None = None,
    seed: int = 0,
    batch_size: int | None = None,
    advance: Callable[[int], object] = lambda _: None,
) -> tuple[Faithfulness, ...]:
    """The curves of several methods' maps with imputed holes, at these shares of the patches removed.

    Arguments as for faithfulness; its gaps are ROAD's LeRF minus MoRF (grad-cam's combined score is half of it). Raises
    InputError for a share that is not between 0 and 1.
    """
    cells = grid or removal_grid(specimen)
    patches = cells[0] * cells[1]
    counts = torch.tensor(sorted({round(share * patches) for share in shares}))
    if not len(counts) or not 0 <= int(counts[0]) <= int(counts[-1]) < patches:
        raise InputError(f"expected shares from 0 to below 1 of {patches} patches, found {list(shares)}")
    size = batch_size or fitting_batch_size(specimen)

    @torch.no_grad()
    def answer(some: Images, which: Tensor, removed: Tensor) -> Tensor:
        some = resized(specimen, some)
        place, back = once(which, removed)
        found = []
        with evaluating(specimen):
            for few in place.split(size):
                few = few.to(removed.device)
                holes = pixel_masks(removed[few], cells, specimen.input_size)
                found.append(specimen(imputed(some[which[few]], holes, seed=seed)).float())
        return torch.cat(found)[back.to(removed.device)]

    return curves_of(images, targets, maps, Plan(cells, counts, len(specimen.classes), seed), answer, advance=advance)
