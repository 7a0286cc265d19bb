"""Figures for notebooks: `show`, `show_heads` and `show_board` draw what the other functions give.

Each returns a matplotlib figure made by vitlens/charts, in the style of the reports. No display is
needed, and pyplot is not used, so that no figure has to be closed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from vitlens.analysis.attention.weights import LayerMaps, attention_maps
from vitlens.analysis.evaluation.evaluate import images_of
from vitlens.analysis.heads.registry import STATISTICS, shown_in
from vitlens.analysis.heads.statistics import Statistics
from vitlens.data.catalogue import read_split
from vitlens.data.split import Split
from vitlens.errors import InputError, UnknownNameError, UnsupportedError
from vitlens.models.model import Model
from vitlens.names import FigureWidth
from vitlens.pixels import AnyImages
from vitlens.shapes import Images
from vitlens.uncertainty import Estimate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from vitlens.charts.values import Draw

MOST: Final = 12  # images in one figure
_PANELS: Final = 6  # tables in one figure


def show(
    images: AnyImages,
    maps: Tensor | Mapping[str, Tensor] | None = None,
    *,
    model: Model | None = None,
    title: str = "",
    names: Sequence[object] | Tensor | None = None,
    label: str = "value",
    width: FigureWidth = "page",
) -> "Figure":
    """Images with their maps in colour over them, below each image or, of several methods, beside
    it.

    images: one image (3, height, width), a batch, or any form that `vitlens.images` takes, at most
    12; maps: (batch, rows, columns), or (rows, columns) for one image, of any resolution, as
    `rollout`, `relevance` and `explain` give them; or several by name. One method without negative
    values has one colour scale for all images, with its values at the bar; otherwise each map is
    drawn as a share of its largest value, red for positive, blue for negative. title: of the
    figure; names: one for each image; label: the maps' unit, at the colour bar; width: of a page or
    a column; model: the maps' own, whose crop of files and pictures is shown (a tensor or a Split
    is shown as it is). Raises InputError where shapes do not fit, and for maps of files without the
    model.

    >>> import torch, vitlens
    >>> digits = vitlens.load_data("digits", limit=2)
    >>> figure = vitlens.show(digits, vitlens.rollout(vitlens.load("vit-digits"), digits))
    """
    from vitlens.charts import Picture
    from vitlens.charts import images as drawn

    as_given = isinstance(images, Split) or (
        isinstance(images, Tensor) and images.is_floating_point()
    )
    if maps is not None and model is None and not as_given:
        raise InputError(
            f"expected model= with maps of {_kind(images)}, found none; give show(images, maps, "
            "model=model), so that the same part of each picture is shown as the model saw"
        )
    pixels = _pictures(images, model).double().numpy()
    count = len(pixels)
    given: Any = names.tolist() if isinstance(names, Tensor) else names
    captions = [""] * count if given is None else [str(name) for name in given]
    if len(captions) != count:
        raise InputError(
            f"expected {count} names, one for each of the images, found {len(captions)}"
        )
    if maps is None:
        return _figure(
            drawn(),
            [Picture(image, below=name) for image, name in zip(pixels, captions)],
            title,
            width,
        )
    batches = {}
    for name, value in (maps if isinstance(maps, Mapping) else {"map": maps}).items():
        values = _numbers(value, name).float()
        batches[name] = values[None] if values.ndim == 2 else values
        if batches[name].ndim != 3 or len(batches[name]) != count:
            shape = tuple(batches[name].shape)
            raise InputError(
                f"expected maps ({count}, rows, columns), one an image, found {name} of {shape}"
            )
    if not batches:
        raise InputError(
            "expected maps by name, found none; give {'rollout': vitlens.rollout(model, images)}"
        )
    signed = {name: bool((value < 0).any()) for name, value in batches.items()}
    if len(batches) == 1 and not any(signed.values()):
        ((name, only),) = batches.items()
        _require_finite(only, name)
        cells = [Picture(image, row="image", below=word) for image, word in zip(pixels, captions)]
        cells += [Picture(image, own.numpy(), row="map") for image, own in zip(pixels, only)]
        title = title or (name if isinstance(maps, Mapping) else "Maps over their images")
        return _figure(drawn(scale="joint", label=label), cells, title, width)
    rows = [f"image {index}" for index in range(count)] if given is None else captions
    rows = [f"{index}: {row}" if rows.count(row) > 1 else row for index, row in enumerate(rows)]
    cells = []
    for index, (row, image) in enumerate(zip(rows, pixels)):
        cells.append(Picture(image, row=row, column="image"))
        cells += [
            Picture(image, own[index].numpy(), row, name, signed=signed[name])
            for name, own in batches.items()
        ]
    return _figure(drawn(), cells, title or "Maps, each as a share of its largest value", width)


def show_heads(
    attention: Sequence[Any] | Tensor | Model,
    images: AnyImages | None = None,
    *,
    model: Model | None = None,
    image: int = 0,
    layer: int | None = None,
    width: FigureWidth = "page",
) -> "Figure":
    """Return the attention of every head to each patch, layers by heads, for one image; or one
    layer's heads over the images.

    attention: what `vitlens.attention` gives (with the model, from which the place of each patch is
    read), or maps (layers, batch, heads, rows, columns), or one such tensor a layer; of weights
    with all rows, that of the CLS token, or the mean over patches without one; or the model itself,
    also one with windows: its maps of the images. images: beside or under the maps; image: which of
    the batch, from 0, of any number of images; layer: from 0, for the heads of one layer over at
    most 12 images; width: of a page or a column. Raises InputError where shapes do not fit.

    >>> import torch, vitlens
    >>> vit, digits = vitlens.load("vit-digits"), vitlens.load_data("digits", limit=2)
    >>> figure = vitlens.show_heads(vitlens.attention(vit, digits, rows="cls"), digits, model=vit)
    """
    from vitlens.charts import images as drawn
    from vitlens.charts.pictures import of_heads, with_maps

    numbers: Sequence[int] | None = None
    if isinstance(attention, Model):
        if images is None:
            raise InputError(
                "expected images with the model, found none; give show_heads(model, images)"
            )
        model = attention
        if layer is None:  # the attention of the other images would not be drawn
            images = _one_of(_split(images, model), image)
            image = 0
        else:
            images = _pictures(images, model)
        attention = attention_maps(model, images)
        numbers = [each.site.layer for each in attention]  # layers without a map are left out
    if not isinstance(attention, Sequence | Tensor):
        found = _kind(attention)  # type: ignore[unreachable]  # an untyped call
        raise InputError(
            f"expected the attention of layers, found {found}; give vitlens.attention(model, "
            "images)"
        )
    with_heads = [number for number, weights in enumerate(attention) if not _has_no_head(weights)]
    if numbers is None and len(with_heads) < len(attention):  # blocks without attention
        numbers = with_heads
    attention = [attention[number] for number in with_heads]
    layers = [_head_maps(each, model) for each in attention]
    if not layers:
        raise InputError("expected the attention of at least one layer, found none")
    known = list(range(len(layers)) if numbers is None else numbers)
    for number, maps in zip(known, layers):
        _require_finite(maps, f"the maps of layer {number}")
    if isinstance(attention[0], LayerMaps):  # whose row is shown
        query = attention[0].reading.removeprefix("the ")
    elif model is None:  # maps, whose rows are not known
        query = ""
    else:
        query = "CLS token" if model.layout.positions("cls") else "mean patch"
    of_query = f" of the {query}" if query else ""
    count = len(layers[0])
    split = None if images is None else _split(images, model)
    if split is not None and len(split) != count:
        raise InputError(f"expected the {count} images of the attention, found {len(split)}")
    if layer is None:
        _require_place(image, count)
        if len({maps.shape for maps in layers}) > 1:
            raise InputError(
                "expected layers of one number of heads and one grid, found several; choose one by "
                "layer=0, 1, ..."
            )
        values = 100 * torch.stack([maps[image] for maps in layers]).double()
        picture = None if split is None else _one_of(split, image)[0].double().numpy()
        cells = list(of_heads(values.numpy(), known, picture))
        title = f"Attention{of_query} to each patch, % of its row, by layer and head"
    else:
        if layer not in known:
            among = (
                f"from 0 to {len(layers) - 1}"
                if numbers is None
                else f"of {', '.join(map(str, numbers))}"
            )
            raise InputError(f"expected layer {among}, found {layer}")
        if images is None:
            raise InputError(
                "expected images under the heads of one layer, found none; give "
                "show_heads(attention, images)"
            )
        pictures = _pictures(images, model).double()
        own = 100 * layers[known.index(layer)].double()
        titles = [f"head {head}" for head in range(own.shape[1])]
        names = [f"image {index}" for index in range(count)] if count > 1 else [""]
        cells = list(with_maps(pictures.numpy(), list(own.swapaxes(0, 1).numpy()), titles, names))
        title = f"Layer {layer}: attention{of_query} to each patch, by head"
    return _figure(drawn(scale="joint", label="attention (%)"), cells, title, width)


def show_board(
    values: object,
    statistics: str | Sequence[str] | None = None,
    *,
    title: str = "",
    unit: str = "",
    width: FigureWidth = "page",
) -> "Figure":
    """Numbers of every head as a map of layers (down) by heads (across), with a colour bar.

    values: what `vitlens.statistics` gives, of which `statistics` names one to six; what
    `vitlens.ablate` gives; a table (layers, heads), NaN where there is no head; or up to six tables
    by name. Colours are symmetric around 0 for a single table with negative values. unit: at the
    colour bar; width: of a page or a column. Raises InputError where shapes do not fit.

    >>> import torch, vitlens
    >>> table = vitlens.statistics(vitlens.load("vit-digits"), torch.rand(4, 3, 32, 32))
    >>> figure = vitlens.show_board(table, ["distance", "entropy"])
    """
    from vitlens.charts import board

    titles: Mapping[str, str] = {}
    if isinstance(
        values, Statistics
    ):  # the named ones, or those that reports show as maps, as far as they are defined
        chosen = (
            [statistics] if isinstance(statistics, str) else list(statistics or shown_in("maps"))
        )
        for name in chosen:
            if name not in STATISTICS:
                raise UnknownNameError(
                    "statistic", name, STATISTICS, hint="vitlens.list_statistics()"
                )
        if statistics is None:
            chosen = [name for name in chosen if not getattr(values, name).isnan().all()][:_PANELS]
        units = {name: STATISTICS[name].unit for name in chosen}
        titles = {name: STATISTICS[name].title for name in chosen}
        title = title or f"Every head, means over {values.images} images"
        given: Mapping[str, object] = {name: getattr(values, name) for name in chosen}
    elif statistics is not None:
        raise InputError(
            "expected statistics with what vitlens.statistics gives, found them with something else"
        )
    else:
        if hasattr(values, "delta_loss"):
            unit = unit or "rise of loss (nats)"
            title = title or "Rise of the loss without each head"
            values = values.delta_loss
        unit = (
            unit if isinstance(values, Mapping) else unit or "value"
        )  # above the map and at the colour bar
        given = values if isinstance(values, Mapping) else {unit: values}
        units = dict.fromkeys(given, unit)
    if not 1 <= len(given) <= _PANELS:
        raise InputError(
            f"expected 1 to {_PANELS} tables, found {len(given)}; draw them in several figures"
        )
    tables: dict[str, Tensor] = {}
    for name, value in given.items():
        table = tables[name] = _numbers(
            value, name if isinstance(values, Mapping) else "values"
        ).double()
        first = next(iter(tables.values()))
        if table.ndim != 2 or table.shape != first.shape:
            expected = "(layers, heads)" if first.ndim != 2 else f"of shape {tuple(first.shape)}"
            raise InputError(f"expected {name!r} {expected}, found {tuple(table.shape)}")
        _require_finite(table[~table.isnan()], repr(name))
        if table.isnan().all():
            raise InputError(f"expected a number in {name!r}, found none; leave it out")
    cells = [
        _Cell(
            layer,
            head,
            {
                name: Estimate(float(table[layer, head]), unit=units[name])
                for name, table in tables.items()
                if table[layer, head].isfinite()
            },
        )
        for layer in range(first.shape[0])
        for head in range(first.shape[1])
    ]
    signed = len(tables) == 1 and not titles and bool((first < 0).any())
    named = {f"values.{name}": titles.get(name, name) for name in tables}
    return _figure(
        board(*named, signed=signed, titles=named.__getitem__), cells, title or "Every head", width
    )


def _figure(draw: "Draw", cells: Sequence[Any], title: str, width: FigureWidth) -> "Figure":
    from vitlens.charts.style import of_width

    with of_width(width):
        return draw(cells, title)


@dataclass(frozen=True)
class _Cell:
    """The values of one head by name."""

    layer: int
    head: int
    values: Mapping[str, Estimate]


def _split(images: AnyImages, model: Model | None) -> Split:
    """Return the images as a Split; one image (3, height, width) is a batch of one."""
    if isinstance(images, Tensor) and images.ndim == 3:
        images = images[None]
    return read_split(images, None if model is None else model.preprocessing)


def _one_of(split: Split, image: int) -> Images:
    """Return one of the images (1, 3, height, width) on the CPU, without reading the others."""
    _require_place(image, len(split))
    return images_of(split.pick(torch.tensor([image]))).cpu()


def _require_place(image: int, count: int) -> None:
    if not 0 <= image < count:
        raise InputError(f"expected image from 0 to {count - 1}, found {image}")


def _pictures(images: AnyImages, model: Model | None) -> Images:
    """Return all images on the CPU. Raises InputError for more than MOST."""
    split = _split(images, model)
    if len(split) > MOST:
        raise InputError(
            f"expected at most {MOST} images in a figure, found {len(split)}; choose some of the "
            "images before you "
            f"compute their maps, such as {_selection_of(images)}"
        )
    return images_of(split).cpu()


def _selection_of(images: AnyImages) -> str:
    """Return how the first images that fit into a figure are chosen from what the caller passed."""
    if isinstance(images, Split):
        return f"split.pick(torch.arange({MOST}))"
    if isinstance(images, str | Path):
        return f"vitlens.images({str(images)!r}, model)[:{MOST}]"
    return f"images[:{MOST}]"


def _numbers(values: object, name: str) -> Tensor:
    """Return a tensor or array, on the CPU. Raises InputError for anything else."""
    try:
        return torch.as_tensor(values).detach().cpu()
    except (
        TypeError,
        ValueError,
        RuntimeError,
    ):  # torch's own words name neither what was given nor what is wanted
        raise InputError(
            f"expected {name} as one tensor or array, found {_kind(values)}; give what "
            "vitlens.rollout, explain, statistics or ablate gave"
        ) from None


def _kind(value: object) -> str:
    return f"the text {value!r}" if isinstance(value, str) else type(value).__name__


def _has_no_head(weights: object) -> bool:
    """Return True for the weights of a block without attention."""
    return isinstance(weights, Tensor) and weights.ndim == 4 and weights.shape[1] == 0


def _head_maps(layer: object, model: Model | None) -> Tensor:
    """Return one layer's maps (batch, heads, rows, columns), of maps or of weights (batch, heads,
    query, key).

    Of weights the row of CLS is shown, without one the mean over patches.
    """
    if isinstance(layer, LayerMaps):
        return layer.maps.detach().cpu().float()
    values = _numbers(layer, "attention").float()
    if values.ndim != 4:
        raise InputError(
            "expected weights (batch, heads, query, key) or maps (batch, heads, rows, columns) of "
            "a layer, found "
            f"{tuple(values.shape)}"
        )
    if model is None:
        if values.shape[-2] == values.shape[-1] and torch.allclose(
            values.sum(-1), torch.ones(()), atol=1e-3
        ):
            # drawn as a map, a whole matrix of weights would pass for one row of it
            raise InputError(
                f"expected model= with weights over {values.shape[-1]} tokens, found none; give "
                "show_heads(attention, images, model=model)"
            )
        return values
    if model.anatomy.layout is None and model.anatomy.family == "windowed":
        raise UnsupportedError(
            f"expected attention over one sequence of tokens, found {model.alias} (windowed) "
            "without one; give the model itself: show_heads(model, images, layer=0)"
        )
    layout = model.layout
    if values.shape[-1] != layout.tokens:
        raise InputError(
            f"expected weights over the {layout.tokens} tokens of {model.alias}, found "
            f"{values.shape[-1]} keys; leave "
            "out model= for maps"
        )
    cls = layout.positions("cls") if values.shape[2] > 1 else (0,)
    return layout.as_map(
        values[:, :, cls[0]] if cls else values[:, :, len(layout.prefix) :].mean(2)
    )


def _require_finite(values: Tensor, name: str) -> None:
    wrong = int((~values.isfinite()).sum())
    if wrong:
        raise InputError(
            f"expected finite numbers in {name}, found {wrong} of {values.numel()} NaN or "
            "infinite; check the weights and the images that they come from"
        )
