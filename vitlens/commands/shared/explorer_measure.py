"""Measures what the attention explorer shows, for a run and for `vitlens.explorer`."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from vitlens.analysis.ablation.importance import Importance
from vitlens.analysis.attention.defaults import WHOLE
from vitlens.analysis.attention.tokens import require_token_attention, token_attention
from vitlens.analysis.heads.specialisation import specialise
from vitlens.analysis.heads.statistics import Statistics
from vitlens.commands.shared.explorer import LEVELS, ExplorerArrays, ExplorerRow, Shown
from vitlens.commands.shared.explorer import explorer as explorer_of_arrays
from vitlens.commands.shared.sheets import DRAWN
from vitlens.devices import evaluating
from vitlens.errors import InputError, LensError, UnsupportedError
from vitlens.files import write_text
from vitlens.layout import TokenLayout
from vitlens.lens.layers import probe_images
from vitlens.lens.observe import survey_weights
from vitlens.models.model import Model
from vitlens.pixels import AnyImages, as_images, as_parts, takes_images
from vitlens.report.explorer import Explorer, pooled
from vitlens.report.html import explorer_fragment
from vitlens.report.html.packing import quantised
from vitlens.shapes import Images
from vitlens.summary import Line, Summary

_BYTES = 48 << 20  # of the weights by head, and of the means over heads, of one model


def explored(model: Model, images: Images, *, whole: int = WHOLE) -> tuple[ExplorerRow, ExplorerArrays | None]:
    """What looks where in these images, of the first `whole` by every head; or why this model has none."""
    try:
        require_token_attention(model)
    except (LensError, UnsupportedError) as error:
        return ExplorerRow(model.alias, str(error)), None
    several, each = _fitting(model, whole)
    return measured(model, images[:several], whole=each)


def measured(model: Model, images: Images, *, whole: int = WHOLE) -> tuple[ExplorerRow, ExplorerArrays]:
    """What looks where in these images. Raises UnsupportedError for a model of which there is no explorer."""
    layout, special = model.layout, len(model.layout.prefix)
    found = token_attention(model, images, whole=whole, pool=lambda weights: _pooled(weights, layout))
    heads, heads_most = quantised(found.heads.numpy(), special, LEVELS)
    means, means_most = quantised(found.means[len(found.heads) :].numpy(), special, LEVELS)
    row = ExplorerRow(
        model.alias, "", layout.grid, _queries(layout), layout.prefix, images=len(found.means), whole=len(found.heads)
    )
    return row, ExplorerArrays(heads, heads_most, means, means_most, found.rollout.half().numpy())


def _fitting(model: Model, whole: int) -> tuple[int, int]:
    """How many images are kept, and of how many of them every head, so that a folder stays small: _BYTES of each."""
    layout = model.layout
    rows, columns = _queries(layout)
    sites = [site for site in survey_weights(model, probe_images(model, 1)) if site.kind == "patch"]
    mean = len(sites) * (len(layout.prefix) + rows * columns) * layout.tokens
    each = max(1, min(whole, _BYTES // (mean * sites[0].heads)))
    return each + _BYTES // mean, each


def _pooled(weights: Tensor, layout: TokenLayout) -> Tensor:
    """Weights (..., queries, keys) with as few queries as a page shows."""
    fewer, _ = pooled(weights.numpy(), len(layout.prefix), layout.grid)
    return torch.from_numpy(np.ascontiguousarray(fewer))


def _queries(layout: TokenLayout) -> tuple[int, int]:
    """The grid of the queries that are kept."""
    return pooled(np.zeros((layout.tokens, 1)), len(layout.prefix), layout.grid)[1]


_HEIGHT: Final = 860  # px of the frame in a notebook


@dataclass(frozen=True, repr=False)
class ExplorerView(Summary):
    """An attention explorer: a notebook shows it, `save` writes it as one HTML file. explorer: its data."""

    explorer: Explorer

    def save(self, path: str | Path) -> Path:
        """Write it as one HTML file, which fetches nothing; returns the file's path."""
        write_text(Path(path), explorer_fragment(self.explorer))
        return Path(path)

    def summary(self) -> Iterator[Line]:
        """The model, its images, and what is shown of them."""
        shown, first = self.explorer, self.explorer.images[0].weights
        yield Line("model", shown.model)
        yield Line("images", len(shown.images))
        if first is not None:
            yield Line("layers, heads", "{}, {}".format(*first.shape[:2]))
        yield Line("patches", "{}x{}".format(*shown.keys))
        yield Line("maps", ", ".join(shown.images[0].maps) or "none")

    def _repr_html_(self) -> str:
        # in a frame of its own, so that neither its style nor its script meets the notebook's
        page = escape(explorer_fragment(self.explorer), quote=True)
        style = f"width:100%;height:{_HEIGHT}px;border:0"
        return f'<iframe sandbox="allow-scripts" title="attention explorer" style="{style}" srcdoc="{page}"></iframe>'


@takes_images
def explorer(
    model: Model,
    images: AnyImages,
    *,
    maps: Mapping[str, Tensor] | Tensor | None = None,
    statistics: Statistics | None = None,
    ablation: Importance | None = None,
    whole: int = WHOLE,
) -> ExplorerView:
    """What looks where in the images: point at a patch and see where every head looks from it, and who looks at it.

    images: at most 24, in any form that `vitlens.images` takes; maps: (batch, rows, columns) as `rollout`, `relevance`
    and `explain` give them, one or several by name, to be shown beside; statistics, ablation: what
    `vitlens.statistics` and `vitlens.ablate` gave, for the label and the importance of each head; whole: of the first
    images so many are shown with every head, of others the mean over the heads of each layer. The result is shown by a
    notebook; `.save("page.html")` writes it. Raises UnsupportedError where not every patch attends to every patch
    (windows, CNNs), InputError where shapes do not fit.

    >>> import vitlens
    >>> vit, digits = vitlens.load("vit-digits"), vitlens.load_data("digits", limit=2)
    >>> vitlens.explorer(vit, digits, maps={"relevance": vitlens.relevance(vit, digits)})
    ExplorerView
      model          vit-digits
      images         2
      layers, heads  6, 4
      patches        8x8
      maps           relevance
    """
    count = len(as_parts(images))
    if count > DRAWN:
        raise InputError(f"expected at most {DRAWN} images in an explorer, found {count}; show some of them")
    images = as_images(images)
    if whole < 1:
        raise InputError(f"expected whole of at least 1, found {whole}")
    row, arrays = measured(model, images, whole=whole)
    shape = arrays.heads.shape[1:3]
    shown = Shown(
        (images.detach().cpu() * 255).round().to(torch.uint8).numpy(),
        [f"image {index}" for index in range(len(images))],
        _facts(model, images),
        {name: _map(values, name, len(images)) for name, values in _named(maps).items()},
        () if statistics is None else _checked(specialise(statistics).labels, shape, "statistics"),
        None if ablation is None else _importance(ablation, shape),
    )
    return ExplorerView(explorer_of_arrays(row, arrays, shown))


def _facts(model: Model, images: Images) -> list[tuple[str, ...]]:
    """The prediction of each image, of a model with a classifier."""
    if not model.has_classifier:
        return [()] * len(images)
    with evaluating(model), torch.no_grad():
        shares = model(images.to(model.device)).float().softmax(-1).cpu()
    best = shares.max(-1)
    return [
        (f"prediction: {model.classes[place]}, {100 * share:.1f} %",)
        for share, place in zip(best.values.tolist(), best.indices.tolist())
    ]


def _named(maps: Mapping[str, Tensor] | Tensor | None) -> Mapping[str, Tensor]:
    if maps is None:
        return {}
    return maps if isinstance(maps, Mapping) else {"map": maps}


def _map(values: Tensor, name: str, count: int) -> Any:
    """Maps as an array. Raises InputError unless there is one an image."""
    if not isinstance(values, Tensor) or values.ndim != 3 or len(values) != count:
        found = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
        raise InputError(f"expected maps ({count}, rows, columns), one an image, found {name} of {found}")
    return values.detach().cpu().float().numpy()


def _importance(ablation: Importance, shape: tuple[int, int]) -> Any:
    table = ablation.delta_loss
    _checked(table, shape, "ablation")
    return table.detach().cpu().numpy()


def _checked(table: Any, shape: tuple[int, int], name: str) -> Any:
    """The table. Raises InputError unless it is of these layers and heads."""
    found = (len(table), max((len(layer) for layer in table), default=0))
    if found != shape:
        raise InputError(f"expected {name} of {shape[0]} layers and {shape[1]} heads, found {found[0]} and {found[1]}")
    return table
