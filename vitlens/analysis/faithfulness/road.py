"""ROAD (Rong 2022): removal whose holes are filled from their surroundings, so that their shape tells nothing.

How holes are filled stands in imputation.py.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from vitlens.analysis.answers.evaluate import fitting_batch_size
from vitlens.analysis.faithfulness.deletion import Faithfulness, Plan, curves_of
from vitlens.analysis.faithfulness.imputation import imputed
from vitlens.analysis.faithfulness.masking import Cells, once, pixel_masks, resized
from vitlens.analysis.faithfulness.resampled import AnyMaps, removal_grid
from vitlens.devices import evaluating
from vitlens.errors import InputError
from vitlens.models.model import Model
from vitlens.shapes import Images, Labels

SHARES = (0.2, 0.4, 0.6, 0.8)  # of the patches removed


def road(
    model: Model,
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
    cells = grid or removal_grid(model)
    patches = cells[0] * cells[1]
    counts = torch.tensor(sorted({round(share * patches) for share in shares}))
    if not len(counts) or not 0 <= int(counts[0]) <= int(counts[-1]) < patches:
        raise InputError(f"expected shares from 0 to below 1 of {patches} patches, found {list(shares)}")
    size = batch_size or fitting_batch_size(model)

    @torch.no_grad()
    def answer(some: Images, which: Tensor, removed: Tensor) -> Tensor:
        some = resized(model, some)
        place, back = once(which, removed)
        found = []
        with evaluating(model):
            for few in place.split(size):
                few = few.to(removed.device)
                holes = pixel_masks(removed[few], cells, model.input_size)
                found.append(model(imputed(some[which[few]], holes, seed=seed)).float())
        return torch.cat(found)[back.to(removed.device)]

    return curves_of(images, targets, maps, Plan(cells, counts, len(model.classes), seed), answer, advance=advance)
