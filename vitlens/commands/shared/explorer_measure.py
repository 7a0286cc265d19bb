"""Measure what the attention explorer shows.

For a run of a command: `explored`. For `vitlens.explorer`, which runs a model: `explorer`. For
`vitlens.attention_explorer` and `vitlens look --attention`, which take the attention weights of a
model that is not run here: `given_attention`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from html import escape
from math import isqrt, prod
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitlens.analysis.ablation.importance import Importance
from vitlens.analysis.attention.pairs import queries_and_keys
from vitlens.analysis.attention.registry import WHOLE
from vitlens.analysis.attention.tokens import require_token_attention, token_attention
from vitlens.analysis.heads.specialisation import specialise
from vitlens.analysis.heads.statistics import Statistics
from vitlens.analysis.naming.labels import HeadNames
from vitlens.arrays import SIZE
from vitlens.commands.run.progress import phase
from vitlens.commands.shared.explorer import (
    LEVELS,
    ExplorerArrays,
    ExplorerContents,
    ExplorerRow,
)
from vitlens.commands.shared.explorer import explorer as explorer_of_arrays
from vitlens.commands.shared.label_rows import word_table
from vitlens.commands.shared.sheets import DRAWN
from vitlens.data.catalogue import read_pictures
from vitlens.devices import evaluating
from vitlens.errors import InputError, LensError, UnsupportedError
from vitlens.files import write_text
from vitlens.inputs import takes_images
from vitlens.lens.observe import survey_weights
from vitlens.lens.trace import probe_images
from vitlens.models.model import Model
from vitlens.pixels import AnyImages, as_images, as_parts
from vitlens.preprocessing import Preprocessing
from vitlens.report.explorer import Explorer, pooled, rollout_of
from vitlens.report.html import explorer_fragment
from vitlens.report.html.packing import quantised
from vitlens.shapes import Images
from vitlens.summary import Line, Summary

# given weights
SIDE: Final = 336  # px of the picture
MOST_PREFIX: Final = 16  # tokens before the patches, if their number is not given
TOLERANCE: Final = 0.01  # of a row's sum: half precision keeps it
MOST_TOKENS: Final = 4112  # of an image: 64x64 patches and 16 tokens before them
# weights by head that an explorer holds, at most; twice as many in the means over heads
_MOST_WEIGHTS: Final = 128 << 20
_FORM: Final = "(layers, heads, tokens, tokens)"

# a run
_BYTES: Final = 48 << 20  # of the weights by head, and of the means over heads, of one model
# queries and keys of one model; DeiT-tiny has 907,776 numbers on an image
_MOST_VECTOR_NUMBERS: Final = 1_000_000

_HEIGHT: Final = 860  # px of the frame in a notebook


@phase("Attention of every head, for the page")
def explored(model: Model, images: Images) -> dict[str, Any]:
    """Return the fields of a record: the attention in these images, or why there is no explorer."""
    try:
        require_token_attention(model)
    except (LensError, UnsupportedError) as error:
        return {"explorer": (ExplorerRow(model.alias, str(error)),)}
    image_count, whole_count = _image_counts(model)
    row, arrays = measured(model, images[:image_count], whole=whole_count)
    return {"explorer": (row,), "explorer_arrays": {model.alias: arrays}}


def measured(
    model: Model, images: Images, *, whole: int = WHOLE
) -> tuple[ExplorerRow, ExplorerArrays]:
    """Return the attention in these images, of the first `whole` with every head.

    Raises UnsupportedError for a model of which there is no explorer.
    """
    layout = model.layout
    special = len(model.layout.prefix)

    def pool_queries(weights: Tensor) -> Tensor:
        """Return the weights (.., queries, keys) with at most as many queries as a page shows."""
        pooled_weights, _ = pooled(weights.numpy(), special, layout.grid)
        return torch.from_numpy(np.ascontiguousarray(pooled_weights))

    attention = token_attention(model, images, whole=whole, pool=pool_queries)
    whole_count = len(attention.heads)  # fewer than `whole` if there are fewer images
    heads, heads_most = quantised(attention.heads.numpy(), special, LEVELS)
    # the first images are kept by head, so only the others are kept as means
    means, means_most = quantised(attention.means[whole_count:].numpy(), special, LEVELS)
    layers: tuple[int, ...] | None = attention.layers
    if layers == tuple(range(len(attention.layers))):
        layers = None  # 0, 1, 2 and so on
    row = ExplorerRow(
        model=model.alias,
        keys=layout.grid,
        queries=_query_grid(layout.tokens, len(layout.prefix), layout.grid),
        special=layout.prefix,
        images=len(attention.means),
        whole=whole_count,
        layers=layers,
    )
    arrays = ExplorerArrays(
        heads=heads,
        heads_most=heads_most,
        means=means,
        means_most=means_most,
        rollout=attention.rollout.half().numpy(),
    )
    return _with_pairs(model, images[: row.whole], row, arrays)


def _with_pairs(
    model: Model, images: Images, row: ExplorerRow, arrays: ExplorerArrays
) -> tuple[ExplorerRow, ExplorerArrays]:
    """Return row and arrays with queries and keys of these images, or why there are none."""
    if row.queries != row.keys:
        reason = "the queries are pooled, and a mean of queries has no score"
        return replace(row, without_pairs=reason), arrays
    try:
        pairs = queries_and_keys(model, images, most=_MOST_VECTOR_NUMBERS)
    except UnsupportedError as error:
        return replace(row, without_pairs=str(error)), arrays
    row = replace(row, scales=pairs.scales)
    arrays = replace(arrays, query_vectors=pairs.queries.numpy(), key_vectors=pairs.keys.numpy())
    return row, arrays


def _image_counts(model: Model) -> tuple[int, int]:
    """Return the number of all images to keep, and of the first ones to keep with every head.

    A folder stays small: _BYTES for the weights by head, and as many for the means over heads.
    """
    layout = model.layout
    rows, columns = _query_grid(layout.tokens, len(layout.prefix), layout.grid)
    sites = [site for site in survey_weights(model, probe_images(model, 1)) if site.kind == "patch"]
    queries = len(layout.prefix) + rows * columns
    bytes_of_means = len(sites) * queries * layout.tokens  # of one image, a byte a weight
    bytes_of_heads = bytes_of_means * sites[0].heads
    whole_count = max(1, min(WHOLE, _BYTES // bytes_of_heads))
    means_count = _BYTES // bytes_of_means
    return whole_count + means_count, whole_count


def _query_grid(tokens: int, prefix_count: int, grid: tuple[int, int]) -> tuple[int, int]:
    """Return the grid (rows, columns) of the queries that are kept.

    prefix_count: the number of tokens before the patches.
    grid: (rows, columns) of the patches.
    """
    no_weights = np.zeros((tokens, 1))  # (queries, keys): `pooled` returns the grid, too
    _, query_grid = pooled(no_weights, prefix_count, grid)
    return query_grid


@dataclass(frozen=True, repr=False)
class ExplorerView(Summary):
    """An attention explorer, which a notebook shows and `save` writes as one HTML file.

    explorer: its data.
    """

    explorer: Explorer

    def save(self, path: str | Path) -> Path:
        """Write it as one HTML file, which fetches nothing; returns the file's path."""
        write_text(Path(path), explorer_fragment(self.explorer))
        return Path(path)

    def summary(self) -> Iterator[Line]:
        """Yield the model, its images, and what is shown of them."""
        data = self.explorer
        first_image = data.images[0]
        yield Line("model", data.model)
        yield Line("images", len(data.images))
        if first_image.weights is not None:
            layers, heads = first_image.weights.shape[:2]
            yield Line("layers, heads", f"{layers}, {heads}")
        rows, columns = data.keys
        yield Line("patches", f"{rows}x{columns}")
        yield Line("maps", ", ".join(first_image.maps) or "none")

    def _repr_html_(self) -> str:
        # in a frame: neither its style nor its script mixes with that of the notebook
        page = escape(explorer_fragment(self.explorer), quote=True)
        style = f"width:100%;height:{_HEIGHT}px;border:0"
        return (
            f'<iframe sandbox="allow-scripts" title="attention explorer" style="{style}" '
            f'srcdoc="{page}"></iframe>'
        )


@takes_images
def explorer(
    model: Model,
    images: AnyImages,
    *,
    maps: Mapping[str, Tensor] | Tensor | None = None,
    statistics: Statistics | None = None,
    ablation: Importance | None = None,
    names: HeadNames | None = None,
    whole: int = WHOLE,
) -> ExplorerView:
    """Return what looks where in the images: point at a patch and see where every head looks from
    it, and who looks at it.

    images: at most 24, in any form that `vitlens.images` takes.
    maps: (batch, rows, columns) as `rollout`, `relevance` and `explain` give them, one or several
        by name, to be shown next to them.
    statistics, ablation, names: what `vitlens.statistics`, `vitlens.ablate` and
        `vitlens.name_heads` gave, for the label, the importance and the three words of each head.
    whole: of the first images so many are shown with every head, of others the mean over the heads
        of each layer.

    The result is shown by a notebook; `.save("page.html")` writes it. Raises UnsupportedError where
    not every patch attends to every patch (windows, CNNs), InputError where shapes do not fit.

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
        raise InputError(
            f"expected at most {DRAWN} images in an explorer, found {count}; show some of them"
        )
    images = as_images(images)
    if whole < 1:
        raise InputError(f"expected whole of at least 1, found {whole}")
    row, arrays = measured(model, images, whole=whole)
    # the sizes that tables of heads must have, by layer number and head
    depth = 1 + max(row.numbers(arrays))
    heads = arrays.heads.shape[2]
    pixels = (images.detach().cpu() * 255).round().to(torch.uint8).numpy()
    facts = _facts(model, images)
    maps_by_name: Mapping[str, Tensor] = {}
    if isinstance(maps, Tensor):
        maps_by_name = {"map": maps}
    elif maps is not None:
        maps_by_name = maps
    map_arrays = {name: _map(values, name, len(images)) for name, values in maps_by_name.items()}
    labels = ()
    if statistics is not None:
        labels = _checked(specialise(statistics).labels, depth, heads, "statistics")
    importance = None
    if ablation is not None:
        importance = _checked(ablation.delta_loss, depth, heads, "ablation").detach().cpu().numpy()
    words = ()
    if names is not None:
        words = _checked(word_table(names.heads), depth, heads, "names")
    contents = ExplorerContents(
        pictures=pixels,
        names=[f"image {index}" for index in range(len(images))],
        facts=facts,
        maps=map_arrays,
        labels=labels,
        importance=importance,
        words=words,
    )
    return ExplorerView(explorer_of_arrays(row, arrays, contents))


def _facts(model: Model, images: Images) -> list[tuple[str, ...]]:
    """Return the prediction of each image, of a model with a classifier."""
    if not model.has_classifier:
        return [()] * len(images)
    with evaluating(model), torch.no_grad():
        probabilities = model(images.to(model.device)).float().softmax(-1).cpu()
    top = probabilities.max(-1)
    facts: list[tuple[str, ...]] = []
    for probability, label in zip(top.values.tolist(), top.indices.tolist()):
        facts.append((f"prediction: {model.classes[label]}, {100 * probability:.1f} %",))
    return facts


def _map(values: Tensor, name: str, count: int) -> Any:
    """Return maps as an array. Raises InputError unless there is one an image."""
    if not isinstance(values, Tensor) or values.ndim != 3 or len(values) != count:
        description = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
        raise InputError(
            f"expected maps ({count}, rows, columns), one an image, found {name} of {description}"
        )
    return values.detach().cpu().float().numpy()


def _checked(table: Any, depth: int, heads: int, name: str) -> Any:
    """Return a table of heads by layer number unchanged.

    name: the argument of `explorer`, for the message.

    Raises InputError unless the table has `depth` layers and `heads` heads.
    """
    layers = len(table)
    # last blocks without attention have empty rows, which need not be there
    while layers > depth and not len(table[layers - 1]):
        layers -= 1
    most_heads = max((len(layer) for layer in table), default=0)
    if (layers, most_heads) != (depth, heads):
        raise InputError(
            f"expected {name} of {depth} layers and {heads} heads, found {layers} and {most_heads}"
        )
    return table


@dataclass(frozen=True)
class GivenAttention:
    """The explorer's row and arrays of given weights of one image, and what their check found.

    means: (layers, tokens, tokens), mean over heads.
    prefix: the number of tokens before the patches.
    rows: the number of rows of weights, one for each layer, head and query.
    off: the number of rows with a sum that is not 1.
    least, most: the smallest and the largest sum of a row.
    """

    row: ExplorerRow
    arrays: ExplorerArrays
    means: NDArray[np.float32]
    prefix: int
    rows: int
    off: int
    least: float
    most: float


def read_attention(path: Path) -> NDArray[np.floating[Any]]:
    """Return the array of an .npy file, mapped into memory and not read yet; nothing is unpickled.

    Raises InputError with one line for a file without a plain array. `given_attention` checks the
    array itself.
    """
    if not path.is_file():
        raise InputError(
            f"expected attention weights in an .npy, found no file at {path}; write one with "
            "numpy.save"
        )
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    # numpy raises several types for what is no array, is damaged, or holds objects
    except Exception as error:
        lines = str(error).strip().splitlines()
        reason = lines[0][:120] if lines else type(error).__name__
        raise InputError(
            f"expected a plain array in {path}, found: {reason}; write it with numpy.save(FILE, "
            "weights)"
        ) from error
    if not isinstance(array, np.ndarray):
        array.close()
        raise InputError(
            f"expected one array in {path}, found an .npz of several; write it with numpy.save"
        )
    return array


def given_attention(
    weights: NDArray[np.floating[Any]],
    *,
    prefix: int | None = None,
    name: str = "attention",
    option: str = "prefix",
) -> GivenAttention:
    """Return what an explorer shows of attention weights of one image.

    weights: (layers, heads, tokens, tokens), the queries before the keys.
    prefix: tokens before the patches (None: the fewest that leave a square of patches).
    name: the name of the weights, for display.
    option: the name of the caller's option for the prefix, for messages.

    Raises InputError for another shape or type, weights below 0 or not finite, tokens that are no
    square of patches, and arrays that are too large.
    """
    _require_form(weights)
    layers, heads, tokens, _ = weights.shape
    special = _prefix(tokens, prefix, option)
    side = isqrt(tokens - special)
    grid = (side, side)
    query_grid = _query_grid(tokens, special, grid)
    queries = special + prod(query_grid)
    weight_count = layers * heads * queries * tokens
    mean_count = layers * tokens * tokens
    if weight_count > _MOST_WEIGHTS or mean_count > 2 * _MOST_WEIGHTS:
        raise InputError(
            f"expected at most {_MOST_WEIGHTS:,} weights to show, found more in {layers} layers "
            f"and {heads} heads; save some layers: weights[-4:]"
        )
    packed = []
    largest = []
    means = []
    sums = []
    for layer in range(layers):
        layer_weights = np.asarray(weights[layer], np.float32)
        _require_probabilities(layer_weights, layer)
        sums.append(layer_weights.sum(-1, dtype=np.float64))
        pooled_weights, _ = pooled(layer_weights, special, grid)
        layer_bytes, layer_largest = quantised(pooled_weights, special, LEVELS)
        packed.append(layer_bytes)
        largest.append(layer_largest)
        means.append(layer_weights.mean(0))
    row_sums = np.stack(sums)
    layer_means = np.stack(means)
    head_bytes = np.stack(packed)[None]  # (1, layers, heads, queries, tokens)
    arrays = ExplorerArrays(
        heads=head_bytes,
        heads_most=np.stack(largest)[None],
        # the only image is kept with every head
        means=np.zeros((0, layers, queries, tokens), np.uint8),
        means_most=np.zeros((0, layers, queries, 2), np.float32),
        rollout=rollout_of(layer_means, special)[None].astype(np.float16),
    )
    if special == 1:
        special_names: tuple[str, ...] = ("CLS",)
    else:
        special_names = tuple(f"prefix {number}" for number in range(special))
    row = ExplorerRow(
        model=name,
        keys=grid,
        queries=query_grid,
        special=special_names,
        images=1,
        whole=1,
        without_pairs="only the weights were saved",
    )
    return GivenAttention(
        row=row,
        arrays=arrays,
        means=layer_means,
        prefix=special,
        rows=row_sums.size,
        off=int((np.abs(row_sums - 1) > TOLERANCE).sum()),
        least=float(row_sums.min()),
        most=float(row_sums.max()),
    )


def _require_probabilities(weights: NDArray[np.float32], layer: int) -> None:
    """Raise InputError for weights of a layer that are not finite, or below 0."""
    if not np.isfinite(weights).all():
        raise InputError(
            f"expected finite weights, found others in layer {layer}; save them after the softmax"
        )
    if weights.min() < 0:
        raise InputError(
            f"expected weights of at least 0, found {weights.min():.3g} in layer {layer}; save "
            "them after the softmax"
        )


def _require_form(weights: NDArray[Any]) -> None:
    """Raise InputError for another shape or type than that of attention weights, or too many
    bytes."""
    shape = weights.shape
    if weights.dtype.kind != "f":
        raise InputError(
            f"expected floating-point weights {_FORM}, found {weights.dtype}; save "
            "weights.astype('f4')"
        )
    if len(shape) != 4 or shape[2] != shape[3] or not weights.size:
        fix = "save those of one image"
        if len(shape) == 3:
            fix = "save weights[None]"
        elif len(shape) == 5:
            fix = "save one image: weights[:, 0]"
        raise InputError(f"expected weights {_FORM}, found {shape}; {fix}")
    tokens = shape[2]
    if tokens > MOST_TOKENS:
        raise InputError(
            f"expected at most {MOST_TOKENS:,} tokens, found {tokens:,}; save those of a smaller "
            "image"
        )
    gibibyte = 1 << 30
    if weights.nbytes > SIZE:
        raise InputError(
            f"expected at most {SIZE // gibibyte} GiB of weights, found "
            f"{weights.nbytes / gibibyte:.1f}; save some layers: weights[-4:]"
        )


def _prefix(tokens: int, prefix: int | None, option: str) -> int:
    """Return the number of tokens before the patches.

    Raises InputError where the other tokens are no square.
    """
    if prefix is not None:
        is_possible = 0 <= prefix < tokens and _is_square(tokens - prefix)
        if not is_possible:
            raise InputError(
                f"expected {option} {prefix} to leave a square of patches, found {tokens} - "
                f"{prefix}; try {option} {tokens - isqrt(tokens) ** 2}"
            )
        return prefix
    for count in range(min(MOST_PREFIX + 1, tokens)):
        if _is_square(tokens - count):
            return count
    raise InputError(
        f"expected a square of patches after at most {MOST_PREFIX} tokens, found {tokens} "
        f"tokens; give {option} N"
    )


def _is_square(count: int) -> bool:
    return isqrt(count) ** 2 == count


def picture_of(image: Any) -> NDArray[np.uint8]:
    """Return the centre square of one picture, (3, SIDE, SIDE).

    Raises DataError for what is no picture, InputError for several.
    """
    pixels = read_pictures(image, Preprocessing((SIDE, SIDE), SIDE, "bicubic"))
    if len(pixels) != 1:
        raise InputError(f"expected one image, the one of the weights, found {len(pixels)}")
    return np.asarray(pixels[0].cpu().numpy())


def attention_explorer(
    weights: Tensor | NDArray[np.floating[Any]],
    image: Any,
    *,
    prefix: int | None = None,
    name: str = "attention",
) -> ExplorerView:
    """Return the explorer of attention weights of any model: where every head looks from a patch,
    and who looks at it.

    weights: (layers, heads, tokens, tokens) of one image, after the softmax, the patches row by row
        after the prefix.
    image: that image, in any form that `vitlens.images` takes, of which the centre square is shown.
    prefix: tokens before the patches (None: the fewest that leave a square of patches).
    name: the name of the model.

    A notebook shows the result; `.save("page.html")` writes it. Raises InputError where shapes do
    not fit, and for weights below 0.

    >>> import numpy, vitlens
    >>> weights = numpy.full((2, 3, 17, 17), 1 / 17)
    >>> vitlens.attention_explorer(weights, numpy.zeros((32, 32, 3), dtype="uint8"))
    ExplorerView
      model          attention
      images         1
      layers, heads  2, 3
      patches        4x4
      maps           none
    """
    if isinstance(weights, torch.Tensor):
        array = weights.detach().cpu().float().numpy()
    else:
        array = np.asarray(weights)
    attention = given_attention(array, prefix=prefix, name=name)
    facts: tuple[str, ...] = ()
    if attention.off:
        facts = (
            f"{attention.off:,} of {attention.rows:,} rows do not sum to 1 (sums from "
            f"{attention.least:.3g} to {attention.most:.3g}): a part of the keys may be missing, "
            "or dropout was on.",
        )
    contents = ExplorerContents(pictures=picture_of(image)[None], names=["image"], facts=[facts])
    return ExplorerView(explorer_of_arrays(attention.row, attention.arrays, contents))
