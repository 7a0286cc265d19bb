"""Figures for notebooks: `show`, `show_heads` and `show_board` draw results of other functions.

Each function returns a matplotlib figure of vitlens/charts, in the style of the reports. They need
no display, and they do not use pyplot, so no figure has to be closed.
"""

from collections.abc import Iterator, Mapping, Sequence
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

    from vitlens.charts import Picture
    from vitlens.charts.values import Draw

MOST: Final = 12  # most images in one figure
_PANELS: Final = 6  # most tables in one figure
_ROW_TOLERANCE: Final = 1e-3  # a row of attention weights sums to 1 within this tolerance


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
    """Return a figure of images and their maps, in colour over the images.

    Maps of one method without negative values share one colour scale. Otherwise each map is drawn
    as a share of its 99.5th percentile, red for positive and blue for negative values.

    images: at most 12 images: one (3, height, width), a batch, or any form that `vitlens.images`
        takes.
    maps: maps of any resolution, as `rollout`, `relevance` and `explain` return them: (batch, rows,
        columns), or (rows, columns) for one image. Several methods are given by name.
    model: the model of the maps. Files and pictures are cropped as it crops them. A tensor or a
        Split is drawn without a crop.
    title: the title of the figure.
    names: a name for each image.
    label: the unit of the maps, shown at the colour bar.
    width: the width of the figure, that of a page or of a column.

    Raises InputError if shapes do not fit, and for maps of files without the model.

    >>> import torch, vitlens
    >>> digits = vitlens.load_data("digits", limit=2)
    >>> figure = vitlens.show(digits, vitlens.rollout(vitlens.load("vit-digits"), digits))
    """
    from vitlens.charts import Picture
    from vitlens.charts import images as images_chart

    is_uncropped = isinstance(images, Split)
    if isinstance(images, Tensor):
        is_uncropped = images.is_floating_point()
    if maps is not None and model is None and not is_uncropped:
        raise InputError(
            f"expected model= with maps of {_kind(images)}, found none; give "
            "show(images, maps, model=model), so that the part of each picture that the "
            "model saw is shown"
        )
    pixels = _pictures(images, model).double().numpy()
    count = len(pixels)
    captions = _captions(names, count)
    if maps is None:
        pictures = [Picture(image, below=name) for image, name in zip(pixels, captions)]
        return _figure(images_chart(), pictures, title, width)
    batches = _map_batches(maps, count)
    signed = {name: bool((values < 0).any()) for name, values in batches.items()}
    if len(batches) == 1 and not any(signed.values()):
        ((name, values),) = batches.items()
        _require_finite(values, name)
        cells = []
        for image, caption in zip(pixels, captions):
            cells.append(Picture(image, row="image", below=caption))
        for image, image_map in zip(pixels, values):
            cells.append(Picture(image, image_map.numpy(), row="map"))
        title = title or (name if isinstance(maps, Mapping) else "Maps over their images")
        return _figure(images_chart(scale="joint", label=label), cells, title, width)
    rows = captions
    if names is None:
        rows = [f"image {index}" for index in range(count)]
    cells = []
    for index, (row, image) in enumerate(zip(rows, pixels)):
        if rows.count(row) > 1:
            row = f"{index}: {row}"
        cells.append(Picture(image, row=row, column="image"))
        for name, values in batches.items():
            cells.append(Picture(image, values[index].numpy(), row, name, signed=signed[name]))
    title = title or "Maps, each as a share of its 99.5th percentile"
    return _figure(images_chart(), cells, title, width)


def _captions(names: Sequence[object] | Tensor | None, count: int) -> list[str]:
    """Return the caption of each image. Raises InputError for another number of names."""
    captions = [""] * count
    if names is not None:
        listed: Any = names.tolist() if isinstance(names, Tensor) else names
        captions = [str(name) for name in listed]
    if len(captions) != count:
        raise InputError(
            f"expected {count} names, one for each of the images, found {len(captions)}"
        )
    return captions


def _map_batches(maps: Tensor | Mapping[str, Tensor], count: int) -> dict[str, Tensor]:
    """Return maps (count, rows, columns) by name. Raises InputError without maps of this shape."""
    batches = {}
    for name, value in (maps if isinstance(maps, Mapping) else {"map": maps}).items():
        values = _numbers(value, name).float()
        if values.ndim == 2:
            values = values[None]
        if values.ndim != 3 or len(values) != count:
            raise InputError(
                f"expected maps ({count}, rows, columns), one an image, found {name} of "
                f"{tuple(values.shape)}"
            )
        batches[name] = values
    if not batches:
        raise InputError(
            "expected maps by name, found none; give {'rollout': vitlens.rollout(model, images)}"
        )
    return batches


def show_heads(
    attention: Sequence[Any] | Tensor | Model,
    images: AnyImages | None = None,
    *,
    model: Model | None = None,
    image: int = 0,
    layer: int | None = None,
    width: FigureWidth = "page",
) -> "Figure":
    """Return a figure of every head's attention to each patch for one image, layers by heads.

    With `layer`, the figure shows the heads of one layer for all images.

    attention: one of
        - the result of `vitlens.attention`, together with the model, which knows the position of
          each patch. The row of CLS is drawn, or the mean over patches without CLS;
        - maps (layers, batch, heads, rows, columns), or one tensor per layer;
        - the model itself, also one with windows. The maps of the images are then computed.
    images: the images, shown next to the maps or under them.
    model: the model of the attention.
    image: the index of the image that is drawn, from 0.
    layer: the number of the layer, from 0, with at most 12 images.
    width: the width of the figure, that of a page or of a column.

    Raises InputError if shapes do not fit.

    >>> import torch, vitlens
    >>> vit, digits = vitlens.load("vit-digits"), vitlens.load_data("digits", limit=2)
    >>> figure = vitlens.show_heads(vitlens.attention(vit, digits, rows="cls"), digits, model=vit)
    """
    from vitlens.charts import images as images_chart

    entries: Any = attention  # the weights or maps of each layer
    if isinstance(attention, Model):
        if images is None:
            raise InputError(
                "expected images with the model, found none; give show_heads(model, images)"
            )
        model = attention
        if layer is None:  # only one image is drawn, so only its attention is computed
            images = _one_of(_split(images, model), image)
            image = 0
        else:
            images = _pictures(images, model)
        entries = attention_maps(model, images)
        entry_layers = [layer_maps.site.layer for layer_maps in entries]
    elif isinstance(entries, Sequence | Tensor):
        entry_layers = list(range(len(entries)))
    else:
        raise InputError(
            f"expected the attention of layers, found {_kind(entries)}; give "
            "vitlens.attention(model, images)"
        )
    maps_by_layer, query = _maps_by_layer(entries, entry_layers, model)
    layers = list(maps_by_layer.values())
    layer_numbers = list(maps_by_layer)
    of_query = f" of the {query}" if query else ""
    count = len(layers[0])
    split = None if images is None else _split(images, model)
    if split is not None and len(split) != count:
        raise InputError(f"expected the {count} images of the attention, found {len(split)}")
    if layer is None:
        cells = _cells_of_image(layers, layer_numbers, image, split)
        title = f"Attention{of_query} to each patch, % of its row, by layer and head"
    else:
        if layer not in maps_by_layer:
            valid = f"of {', '.join(map(str, layer_numbers))}"
            if layer_numbers == list(range(len(layers))):
                valid = f"from 0 to {len(layers) - 1}"
            raise InputError(f"expected layer {valid}, found {layer}")
        if images is None:
            raise InputError(
                "expected images under the heads of one layer, found none; give "
                "show_heads(attention, images)"
            )
        pictures = _pictures(images, model)
        cells = _cells_of_layer(maps_by_layer[layer], pictures)
        title = f"Layer {layer}: attention{of_query} to each patch, by head"
    return _figure(images_chart(scale="joint", label="attention (%)"), cells, title, width)


def _maps_by_layer(
    entries: Sequence[object] | Tensor, numbers: Sequence[int], model: Model | None
) -> tuple[dict[int, Tensor], str]:
    """Return the maps of each layer with attention by its number, and their query in words.

    entries: the weights or maps of each layer.
    numbers: the number of the layer of each entry.

    Raises InputError without such a layer, and for maps with NaN or infinity.
    """
    maps_by_layer: dict[int, Tensor] = {}
    query = ""  # that of the first layer
    for number, entry in zip(numbers, entries):
        if _has_no_head(entry):
            continue
        if not maps_by_layer:
            query = _query_name(entry, model)
        maps = _head_maps(entry, model)
        _require_finite(maps, f"the maps of layer {number}")
        maps_by_layer[number] = maps
    if not maps_by_layer:
        raise InputError("expected the attention of at least one layer, found none")
    return maps_by_layer, query


def _query_name(layer: object, model: Model | None) -> str:
    """Return the query of the maps of a layer in words, "" if unknown (maps without a model)."""
    if isinstance(layer, LayerMaps):
        return layer.reading.removeprefix("the ")
    if model is None:
        return ""
    return "CLS token" if model.layout.positions("cls") else "mean patch"


def _cells_of_image(
    layers: Sequence[Tensor], numbers: Sequence[int], image: int, split: Split | None
) -> "list[Picture]":
    """Return the maps of all heads for one image, from maps (batch, heads, rows, columns)."""
    from vitlens.charts.pictures import of_heads

    _require_place(image, len(layers[0]))
    if len({maps.shape for maps in layers}) > 1:
        raise InputError(
            "expected layers of one number of heads and one grid, found several; choose one by "
            "layer=0, 1, ..."
        )
    values = 100 * torch.stack([maps[image] for maps in layers]).double()
    picture = None
    if split is not None:
        (only_image,) = _one_of(split, image)
        picture = only_image.double().numpy()
    return list(of_heads(values.numpy(), numbers, picture))


def _cells_of_layer(maps: Tensor, images: Images) -> "list[Picture]":
    """Return the maps (batch, heads, rows, columns) of one layer over the images."""
    from vitlens.charts.pictures import with_maps

    head_maps = 100 * maps.double()
    titles = [f"head {head}" for head in range(head_maps.shape[1])]
    names = [f"image {index}" for index in range(len(maps))] if len(maps) > 1 else [""]
    maps_by_head = list(head_maps.swapaxes(0, 1).numpy())
    return list(with_maps(images.double().numpy(), maps_by_head, titles, names))


def show_board(
    values: object,
    statistics: str | Sequence[str] | None = None,
    *,
    title: str = "",
    unit: str = "",
    width: FigureWidth = "page",
) -> "Figure":
    """Return a figure of a number per head: layers (down) by heads (across), with a colour bar.

    values: one of
        - the result of `vitlens.statistics`;
        - the result of `vitlens.ablate`;
        - a table (layers, heads), NaN for no head, or up to six tables by name. The colours of a
          single table with negative values are symmetric around 0.
    statistics: the names of one to six statistics (None: those that reports draw).
    title: the title of the figure.
    unit: the unit at the colour bar.
    width: the width of the figure, that of a page or of a column.

    Raises InputError if shapes do not fit.

    >>> import torch, vitlens
    >>> table = vitlens.statistics(vitlens.load("vit-digits"), torch.rand(4, 3, 32, 32))
    >>> figure = vitlens.show_board(table, ["distance", "entropy"])
    """
    from vitlens.charts import board

    figure_title = title or "Every head"
    titles: Mapping[str, str] = {}  # of statistics
    source: Any = values  # a table, or tables by name
    if isinstance(values, Statistics):
        names = _statistic_names(values, statistics)
        units = {name: STATISTICS[name].unit for name in names}
        titles = {name: STATISTICS[name].title for name in names}
        figure_title = title or f"Every head, means over {values.images} images"
        value_of_name: Mapping[str, object] = {name: getattr(values, name) for name in names}
    elif statistics is not None:
        raise InputError(
            "expected statistics with what vitlens.statistics gives, found them with something else"
        )
    else:
        colour_unit = unit
        if hasattr(values, "delta_loss"):
            source = values.delta_loss
            figure_title = title or "Rise of the loss without each head"
            colour_unit = unit or "rise of loss (nats)"
        if isinstance(source, Mapping):
            value_of_name = source
        else:
            colour_unit = colour_unit or "value"  # also above the map
            value_of_name = {colour_unit: source}
        units = dict.fromkeys(value_of_name, colour_unit)
    if not value_of_name:
        raise InputError("expected at least one table, found none; give values of heads")
    if len(value_of_name) > _PANELS:
        raise InputError(
            f"expected 1 to {_PANELS} tables, found {len(value_of_name)}; draw them in several "
            "figures"
        )
    tables: dict[str, Tensor] = {}
    expected_shape = None  # that of the first table
    for name, value in value_of_name.items():
        argument_name = name if isinstance(source, Mapping) else "values"
        table = _numbers(value, argument_name).double()
        tables[name] = table
        if expected_shape is None:
            expected_shape = table.shape
        if table.ndim != 2 or table.shape != expected_shape:
            expected = f"of shape {tuple(expected_shape)}"
            if len(expected_shape) != 2:
                expected = "(layers, heads)"
            raise InputError(f"expected {name!r} {expected}, found {tuple(table.shape)}")
        _require_finite(table[~table.isnan()], repr(name))
        if table.isnan().all():
            raise InputError(f"expected a number in {name!r}, found none; leave it out")
    is_signed = False
    if len(tables) == 1 and not titles:
        (only_table,) = tables.values()
        is_signed = bool((only_table < 0).any())
    column_titles = {f"values.{name}": titles.get(name, name) for name in tables}
    chart = board(*column_titles, signed=is_signed, titles=column_titles.__getitem__)
    return _figure(chart, list(_cells(tables, units)), figure_title, width)


def _statistic_names(values: Statistics, statistics: str | Sequence[str] | None) -> list[str]:
    """Return the names of the requested statistics, by default of those that reports draw.

    Raises UnknownNameError for a name that is no statistic.
    """
    if not statistics:
        defined = [name for name in shown_in("maps") if not getattr(values, name).isnan().all()]
        return defined[:_PANELS]
    names = [statistics] if isinstance(statistics, str) else list(statistics)
    for name in names:
        if name not in STATISTICS:
            raise UnknownNameError("statistic", name, STATISTICS, hint="vitlens.list_statistics()")
    return names


def _cells(tables: Mapping[str, Tensor], units: Mapping[str, str]) -> Iterator["_Cell"]:
    """Yield the finite values of each head, from tables (layers, heads) by name."""
    layers, heads = next(iter(tables.values())).shape
    for layer in range(layers):
        for head in range(heads):
            values = {}
            for name, table in tables.items():
                if table[layer, head].isfinite():
                    values[name] = Estimate(float(table[layer, head]), unit=units[name])
            yield _Cell(layer, head, values)


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
            f"images before you compute their maps, such as {_selection_of(images)}"
        )
    return images_of(split).cpu()


def _selection_of(images: AnyImages) -> str:
    """Return code that chooses the first images of an argument that fit into a figure."""
    if isinstance(images, Split):
        return f"split.pick(torch.arange({MOST}))"
    if isinstance(images, str | Path):
        return f"vitlens.images({str(images)!r}, model)[:{MOST}]"
    return f"images[:{MOST}]"


def _numbers(values: object, name: str) -> Tensor:
    """Return a tensor or array, on the CPU. Raises InputError for anything else."""
    try:
        return torch.as_tensor(values).detach().cpu()
    except (TypeError, ValueError, RuntimeError):  # whose messages name neither value nor remedy
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
    """Return one layer's maps (batch, heads, rows, columns).

    layer: maps, or weights (batch, heads, query, key). Of weights, the row of CLS is taken, or the
        mean over patches without CLS.
    """
    if isinstance(layer, LayerMaps):
        return layer.maps.detach().cpu().float()
    values = _numbers(layer, "attention").float()
    if values.ndim != 4:
        raise InputError(
            "expected weights (batch, heads, query, key) or maps (batch, heads, rows, columns) of "
            f"a layer, found {tuple(values.shape)}"
        )
    if model is None:
        is_square = values.shape[-2] == values.shape[-1]
        if is_square and torch.allclose(values.sum(-1), torch.ones(()), atol=_ROW_TOLERANCE):
            # a matrix of weights has the shape of a map, and would be drawn as one
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
            f"{values.shape[-1]} keys; leave out model= for maps"
        )
    if values.shape[2] == 1:  # only one query
        return layout.as_map(values[:, :, 0])
    cls_positions = layout.positions("cls")
    if cls_positions:
        return layout.as_map(values[:, :, cls_positions[0]])
    return layout.as_map(values[:, :, len(layout.prefix) :].mean(2))


def _require_finite(values: Tensor, name: str) -> None:
    count = int((~values.isfinite()).sum())
    if count:
        raise InputError(
            f"expected finite numbers in {name}, found {count} of {values.numel()} NaN or "
            "infinite; check the weights and the images that they come from"
        )
