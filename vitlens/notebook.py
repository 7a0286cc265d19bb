"""Figures for notebooks: `show`, `show_heads` and `show_board` draw what the other functions give.

Each returns a matplotlib figure made by vitlens/charts, in the style of the reports. No display is needed, and pyplot
is not used, so that no figure has to be closed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
from vitlens.layout import TokenLayout
from vitlens.models.model import Model
from vitlens.pixels import AnyImages
from vitlens.shapes import Images, Maps
from vitlens.uncertainty import Estimate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from vitlens.charts import Picture

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
) -> "Figure":
    """Images with their maps in colour over them, below each image or, of several methods, beside it.

    images: one image (3, height, width), a batch, or any form that `vitlens.images` takes, at most 12; maps: (batch,
    rows, columns), or (rows, columns) for one image, of any resolution, as `rollout`, `relevance` and `explain` give
    them; or several by name. One method without negative values has one colour scale for all images, with its values at
    the bar; otherwise each map is drawn as a share of its largest value, red for positive, blue for negative. title: of
    the figure; names: one for each image; label: the maps' unit, at the colour bar; model: the maps' own, whose crop of
    files and pictures is shown (a tensor or a Split is shown as it is). Raises InputError where shapes do not fit, and
    for maps of files without the model.

    >>> import torch, vitlens
    >>> digits = vitlens.load_data("digits", limit=2)
    >>> figure = vitlens.show(digits, vitlens.rollout(vitlens.load("vit-digits"), digits))
    """
    if maps is not None and model is None and not isinstance(images, Split) and not _is_floating(images):
        raise InputError(
            f"expected model= with maps of {_kind(images)}, found none; give show(images, maps, model=model), so that "
            "the same part of each picture is shown as the model saw"
        )
    from vitlens.charts import Picture

    pictures = _pictures(images, model)
    pixels = pictures.double().numpy()
    captions = (
        None if names is None else [str(name) for name in (names.tolist() if hasattr(names, "tolist") else names)]
    )
    if captions is not None and len(captions) != len(pixels):
        raise InputError(f"expected {len(pixels)} names, one for each of the images, found {len(captions)}")
    if maps is None:
        return _drawn(
            [Picture(image, below=name) for image, name in zip(pixels, captions or [""] * len(pixels))], title
        )
    named = dict(maps) if isinstance(maps, Mapping) else {"map": maps}
    if not named:
        raise InputError("expected maps by name, found none; give {'rollout': vitlens.rollout(model, images)}")
    batches = {name: _batched(value, name, len(pictures)) for name, value in named.items()}
    signed = {name: bool((value < 0).any()) for name, value in batches.items()}
    if len(batches) == 1 and not any(signed.values()):
        ((name, only),) = batches.items()
        _require_finite(only, name)
        cells = [Picture(image, row="image", below=word) for image, word in zip(pixels, captions or [""] * len(pixels))]
        cells += [Picture(image, own.numpy(), row="map") for image, own in zip(pixels, only)]
        title = title or (name if isinstance(maps, Mapping) else "Maps over their images")
        return _drawn(cells, title, scale="joint", label=label)
    rows = captions or [f"image {index}" for index in range(len(pixels))]
    rows = [f"{index}: {row}" if rows.count(row) > 1 else row for index, row in enumerate(rows)]
    cells = []
    for index, (row, image) in enumerate(zip(rows, pixels)):
        cells.append(Picture(image, row=row, column="image"))
        for name, value in batches.items():
            cells.append(Picture(image, value[index].numpy(), row, name, signed=signed[name]))
    return _drawn(cells, title or "Maps, each as a share of its largest value")


def _drawn(cells: Sequence["Picture"], title: str, **given: Any) -> "Figure":
    from vitlens.charts import images as drawn_images

    return drawn_images(**given)(cells, title)


def show_heads(
    attention: Sequence[Any] | Tensor | Model,
    images: AnyImages | None = None,
    *,
    model: Model | None = None,
    image: int = 0,
    layer: int | None = None,
) -> "Figure":
    """The attention of every head to each patch, layers by heads, for one image; or one layer's heads over the images.

    attention: what `vitlens.attention` gives (with the model, from which the place of each patch is read), or maps
    (layers, batch, heads, rows, columns), or one such tensor a layer; of weights with all rows, that of the CLS token,
    or the mean over patches without one; or the model itself, also one with windows: its maps of the images. images:
    beside or under the maps; image: which of the batch, from 0; layer: from 0, for the heads of one layer over all
    images. Raises InputError where shapes do not fit.

    >>> import torch, vitlens
    >>> vit, digits = vitlens.load("vit-digits"), vitlens.load_data("digits", limit=2)
    >>> figure = vitlens.show_heads(vitlens.attention(vit, digits, rows="cls"), digits, model=vit)
    """
    from vitlens.charts.pictures import of_heads, with_maps

    numbers: Sequence[int] | None = None
    if isinstance(attention, Model):
        model, images = attention, _given_pictures(images, attention)
        attention = attention_maps(model, images)
        numbers = [each.site.layer for each in attention]
    if not isinstance(attention, Sequence | Tensor):
        found = _kind(attention)  # type: ignore[unreachable]  # an untyped call
        raise InputError(f"expected the attention of layers, found {found}; give vitlens.attention(model, images)")
    layers = [_head_maps(each, model) for each in attention]
    if not layers:
        raise InputError("expected the attention of at least one layer, found none")
    query = _query(attention[0], model)
    pictures = None if images is None else _pictures(images, model)
    for index, maps in enumerate(layers):
        _require_finite(maps, f"the maps of layer {index}")
    if pictures is not None and len(pictures) != len(layers[0]):
        raise InputError(f"expected the {len(layers[0])} images of the attention, found {len(pictures)}")
    if layer is None:
        _require_within(image, len(layers[0]), "image")
        if len({maps.shape for maps in layers}) > 1:
            raise InputError(
                "expected layers of one number of heads and one grid, found several; choose one by layer=0, 1, ..."
            )
        chosen = None if pictures is None else pictures[image].double().numpy()
        values = 100 * torch.stack([maps[image] for maps in layers]).double()
        cells = list(of_heads(values.numpy(), range(len(layers)) if numbers is None else numbers, chosen))
        title = f"Attention of the {query} to each patch, % of its row, by layer and head"
        return _drawn(cells, title, scale="joint", label="attention (%)")
    if numbers is None:
        _require_within(layer, len(layers), "layer")
    elif layer not in numbers:  # layers without a map are left out
        raise InputError(f"expected a layer of {', '.join(map(str, numbers))}, found {layer}")
    if pictures is None:
        raise InputError("expected images under the heads of one layer, found none; give show_heads(attention, images)")
    own = 100 * layers[layer if numbers is None else numbers.index(layer)].double()
    titles = [f"head {head}" for head in range(own.shape[1])]
    names = [f"image {index}" for index in range(len(pictures))] if len(pictures) > 1 else [""]
    cells = list(with_maps(pictures.double().numpy(), list(own.swapaxes(0, 1).numpy()), titles, names))
    title = f"Layer {layer}: attention of the {query} to each patch, by head"
    return _drawn(cells, title, scale="joint", label="attention (%)")


def show_board(
    values: object, statistics: str | Sequence[str] | None = None, *, title: str = "", unit: str = ""
) -> "Figure":
    """Numbers of every head as a map of layers (down) by heads (across), with a colour bar.

    values: what `vitlens.statistics` gives, of which `statistics` names one to six; what `vitlens.ablate` gives; a
    table (layers, heads), NaN where there is no head; or up to six tables by name. Colours are symmetric around 0 for a
    single table with negative values. unit: at the colour bar. Raises InputError where shapes do not fit.

    >>> import torch, vitlens
    >>> table = vitlens.statistics(vitlens.load("vit-digits"), torch.rand(4, 3, 32, 32))
    >>> figure = vitlens.show_board(table, ["distance", "entropy"])
    """
    if isinstance(values, Statistics):
        return _statistics_board(values, statistics, title)
    if statistics is not None:
        raise InputError("expected statistics with what vitlens.statistics gives, found them with something else")
    if hasattr(values, "delta_loss"):
        unit, title = unit or "rise of loss (nats)", title or "Rise of the loss without each head"
        values = values.delta_loss
    if isinstance(values, Mapping):
        tables = {name: _table(table, name) for name, table in values.items()}
    else:
        unit = unit or "value"  # the unit is above the map and at the colour bar
        tables = {unit: _table(values, "values")}
    signed = len(tables) == 1 and any(bool((table < 0).any()) for table in tables.values())
    return _board(tables, dict.fromkeys(tables, unit), title or "Every head", signed=signed)


@dataclass(frozen=True)
class _Cell:
    """The values of one head by name."""

    layer: int
    head: int
    values: Mapping[str, Estimate]


def _board(
    tables: Mapping[str, Tensor], units: Mapping[str, str], title: str, titles: Mapping[str, str] | None = None, *,
    signed: bool = False,
) -> "Figure":  # fmt: skip
    """Tables (layers, heads) of one shape by name, with their units; titles: of each (default: its name)."""
    from vitlens.charts import board

    if not 1 <= len(tables) <= _PANELS:
        raise InputError(f"expected 1 to {_PANELS} tables, found {len(tables)}; draw them in several figures")
    shape = next(iter(tables.values())).shape
    for name, table in tables.items():
        if table.shape != shape:
            raise InputError(f"expected {name!r} of shape {tuple(shape)}, found {tuple(table.shape)}")
        _require_finite(table[~table.isnan()], repr(name))
        if table.isnan().all():
            raise InputError(f"expected a number in {name!r}, found none; leave it out")
    cells = [
        _Cell(layer, head, {
            name: Estimate(float(table[layer, head]), unit=units[name])
            for name, table in tables.items() if table[layer, head].isfinite()
        })
        for layer in range(shape[0]) for head in range(shape[1])
    ]  # fmt: skip
    known = titles or {name: name for name in tables}
    shown = [f"values.{name}" for name in tables]
    return board(*shown, signed=signed, titles=lambda name: known[name.removeprefix("values.")])(cells, title)


def _statistics_board(found: Statistics, names: str | Sequence[str] | None, title: str) -> "Figure":
    """The named statistics, or those that reports show as maps, as far as they are defined."""
    chosen = [names] if isinstance(names, str) else list(names if names is not None else shown_in("maps"))
    for name in chosen:
        if name not in STATISTICS:
            raise UnknownNameError("statistic", name, STATISTICS, hint="vitlens.list_statistics()")
    if names is None:
        chosen = [name for name in chosen if not getattr(found, name).isnan().all()][:_PANELS]
    return _board(
        {name: getattr(found, name) for name in chosen}, {name: STATISTICS[name].unit for name in chosen},
        title or f"Every head, means over {found.images} images", {name: STATISTICS[name].title for name in chosen},
    )  # fmt: skip


def _is_floating(images: object) -> bool:
    return isinstance(images, Tensor) and images.is_floating_point()


def _pictures(images: AnyImages, model: Model | None) -> Images:
    """The images on the CPU, at most MOST; one image (3, height, width) is a batch of one."""
    if isinstance(images, Tensor) and images.ndim == 3:
        images = images[None]
    split = read_split(images, None if model is None else model.preprocessing)
    if len(split) > MOST:
        raise InputError(f"expected at most {MOST} images in a figure, found {len(split)}; show some of them")
    return images_of(split).cpu()


def _given_pictures(images: AnyImages | None, model: Model) -> Images:
    """The images with a model. Raises InputError for none."""
    if images is None:
        raise InputError("expected images with the model, found none; give show_heads(model, images)")
    return _pictures(images, model)


def _batched(maps: object, name: str, count: int) -> Maps:
    """Maps (batch, rows, columns) in float32 on the CPU."""
    values = _numbers(maps, name).float()
    values = values[None] if values.ndim == 2 else values
    if values.ndim != 3 or len(values) != count:
        raise InputError(f"expected maps ({count}, rows, columns), one an image, found {name} of {tuple(values.shape)}")
    return values


def _numbers(values: object, name: str) -> Tensor:
    """A tensor or array, on the CPU. Raises InputError for anything else."""
    try:
        return torch.as_tensor(values).detach().cpu()
    except (TypeError, ValueError, RuntimeError):  # torch's own words name neither what was given nor what is wanted
        raise InputError(
            f"expected {name} as one tensor or array, found {_kind(values)}; give what vitlens.rollout, explain, "
            "statistics or ablate gave"
        ) from None


def _kind(value: object) -> str:
    return f"the text {value!r}" if isinstance(value, str) else type(value).__name__


def _table(values: object, name: str) -> Tensor:
    table = _numbers(values, name).double()
    if table.ndim != 2:
        raise InputError(f"expected {name} (layers, heads), found {tuple(table.shape)}")
    return table


def _head_maps(layer: object, model: Model | None) -> Tensor:
    """One layer's maps (batch, heads, rows, columns), of maps or of weights (batch, heads, query, key)."""
    if isinstance(layer, LayerMaps):
        return layer.maps.detach().cpu().float()
    values = _numbers(layer, "attention").float()
    if values.ndim != 4:
        raise InputError(
            f"expected weights (batch, heads, query, key) or maps (batch, heads, rows, columns) of a layer, found "
            f"{tuple(values.shape)}"
        )
    if model is None:
        if values.shape[-2] == values.shape[-1] and torch.allclose(values.sum(-1), torch.ones(()), atol=1e-3):
            raise InputError(  # drawn as a map, a whole matrix of weights would pass for one row of it
                f"expected model= with weights over {values.shape[-1]} tokens, found none; give "
                "show_heads(attention, images, model=model)"
            )
        return values
    if model.anatomy.layout is None and model.anatomy.family == "windowed":
        raise UnsupportedError(
            f"expected attention over one sequence of tokens, found {model.alias} (windowed) without one; "
            "give the model itself: show_heads(model, images, layer=0)"
        )
    layout = model.layout
    if values.shape[-1] != layout.tokens:
        raise InputError(
            f"expected weights over the {layout.tokens} tokens of {model.alias}, found {values.shape[-1]} keys; leave "
            "out model= for maps"
        )
    return layout.as_map(_row(values, layout))


def _row(weights: Tensor, layout: TokenLayout) -> Tensor:
    """The row of weights (batch, heads, query, key) that is shown: of CLS, or the mean over patches."""
    places = layout.positions("cls")
    if weights.shape[2] == 1:
        return weights[:, :, 0]
    return weights[:, :, places[0]] if places else weights[:, :, len(layout.prefix) :].mean(2)


def _query(layer: object, model: Model | None) -> str:
    """The words for whose row is shown."""
    if isinstance(layer, LayerMaps):
        return layer.reading.removeprefix("the ")
    return "CLS token" if model is None or model.layout.positions("cls") else "mean patch"


def _require_finite(values: Tensor, name: str) -> None:
    wrong = int((~values.isfinite()).sum())
    if wrong:
        raise InputError(
            f"expected finite numbers in {name}, found {wrong} of {values.numel()} NaN or infinite; "
            "check the weights and the images that they come from"
        )


def _require_within(index: int, count: int, what: str) -> None:
    if not 0 <= index < count:
        raise InputError(f"expected {what} from 0 to {count - 1}, found {index}")
