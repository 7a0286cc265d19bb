"""The figures and the words of the views that were asked for: a patch that looks or is looked at, a head over time."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.figure import Figure

from vitlens.figures.views import head_over_training, images_on_a_page, key_view, patch_words, query_view
from vitlens.files import RunRecord
from vitlens.runs.report import Drawn
from vitlens.runs.sections import Cell, Section, Table

_SHARED = "One scale of colours for all panels."
_NOTICED = 1e-4  # a fraction of a row that is worth a column


@dataclass(frozen=True)
class _Words:
    """How one view is drawn and what is said of it; {patch}: the patch in words."""

    figure: Callable[..., Figure]
    heading: str
    caption: str
    explained: str
    columns: Mapping[str, tuple[str, float]]  # of the table in results.json -> heading, factor


_VIEWS = {
    "query": _Words(
        query_view,
        "Where the patch in {patch} looks",
        "Where the patch in {patch} looks, layer by layer",
        "`--query {typed}` counts from 0, figures and tables from 1. A panel shows the patch's row of the weights.",
        {
            "prefix_mass": ("on prefix (%)", 100.0),
            "head_prefix_mass": ("head {head}: on prefix (%)", 100.0),
            "itself": ("on itself (%)", 100.0),
            "padding": ("on padding (%)", 100.0),
        },
    ),
    "key": _Words(
        key_view,
        "Who looks at the patch in {patch}",
        "Who looks at the patch in {patch}, layer by layer: each place is coloured by the share of its attention "
        "that the patch there gives",
        "`--key {typed}` counts from 0, figures and tables from 1. Received is the sum of a panel: how many patches' "
        "whole attention the patch gets; about 1 if all attention were even.",
        {
            "received": ("received (patches)", 1.0),
            "head_received": ("head {head}: received (patches)", 1.0),
            "itself": ("from itself (%)", 100.0),
            "from_prefix": ("from a prefix token (% of its row)", 100.0),
        },
    ),
}


def draw_views(record: RunRecord, images: Any, names: Sequence[str], *, reader: Mapping[int, str]) -> Iterator[Drawn]:
    """Query and key, mean of heads and the head asked for; and that head over training. reader: by layer, in words."""
    for name in _VIEWS:
        if record.has_arrays(name):
            yield from _draw_patch(record, name, images, names)
    if record.has_arrays("training"):
        (layer, head), epochs = _head(record), [int(str(row["epochs"])) for row in record.table("training")]
        maps = record.arrays("training")["maps"]
        few = slice(0, images_on_a_page(len(epochs)))
        figure = head_over_training(
            images=images[few], maps=maps[few], epochs=epochs, layer=layer, head=head, names=names[few],
            reader=reader[layer],
        )  # fmt: skip
        shown = f", the first {few.stop} of {len(images)} images" if few.stop < len(images) else ""
        caption = (
            f"Head {head + 1} of layer {layer + 1} with the weights of {len(epochs)} moments of the training{shown}"
        )
        yield Drawn("head_over_training", figure, f"{caption}, the last ones at the right. {_SHARED}")


def _draw_patch(record: RunRecord, name: str, images: Any, names: Sequence[str]) -> Iterator[Drawn]:
    rows, arrays, words = record.table(name), record.arrays(name), _VIEWS[name]
    patches = [_patch(row) for row in rows]
    few = slice(0, images_on_a_page(len(rows)))
    shown = f"the first {few.stop} of {len(images)} images" if few.stop < len(images) else "every image"
    for figure, kind in ((name, "mean"), (f"{name}_head", "head")):
        found = [index for index in range(len(rows)) if f"{kind}{index}" in arrays]
        if not found:
            continue
        head = None if kind == "mean" else _head(record)[1]
        whose = "mean of heads" if head is None else f"head {head + 1}"
        without = "" if len(found) == len(rows) else " Layers without such a head are left out."
        drawn = words.figure(
            images=images[few],
            maps=[arrays[f"{kind}{index}"][few] for index in found],
            layers=[int(str(rows[index]["layer"])) for index in found],
            patches=[patches[index] for index in found],
            head=head,
            names=names[few],
        )
        said = words.caption.format(patch=patch_words(patches[0]))
        yield Drawn(figure, drawn, f"{said} ({whose}, {shown}); the patch is outlined. {_SHARED}{without}")


def _patch(row: Mapping[str, object]) -> tuple[int, int]:
    return int(str(row["row"])), int(str(row["column"]))


def _options(record: RunRecord) -> Mapping[str, Any]:
    options: Any = record.config["options"]
    found: Mapping[str, Any] = options
    return found


def _head(record: RunRecord) -> tuple[int, int]:
    layer, head = _options(record)["head"]
    return int(layer), int(head)


def tell_views(record: RunRecord) -> Iterator[Section]:
    """A section for each view that was asked for."""
    for name in _VIEWS:
        if record.has_arrays(name):
            yield _tell_patch(record, name)
    if record.has_arrays("training"):
        yield _tell_training(record)


def _tell_patch(record: RunRecord, name: str) -> Section:
    rows, words = record.table(name), _VIEWS[name]
    first = patch_words(_patch(rows[0]))
    row, column = _patch(rows[0])
    lines = [words.explained.format(typed=f"{row},{column}")]
    if "prefix_mass" in rows[0]:
        lines.append("What lies on prefix tokens (CLS and the like) is in no panel; the table says how much that is.")
    if any("padding" in row for row in rows) or len({str(row["grid"]) for row in rows}) > 1:
        lines.append(
            "The patch is given in the first layer's grid; where patches were merged, it is the larger one that holds "
            "it. Attention stays inside a window: elsewhere a panel is zero."
        )
    head = _options(record).get("head")
    listed = [
        {
            "layer": int(str(row["layer"])) + 1,
            "grid": str(row["grid"]),
            "patch": patch_words(_patch(row)),
            **_numbers(row, words.columns, head),
        }
        for row in rows
    ]
    figures = (name, f"{name}_head") if any(key.startswith("head") for key in record.arrays(name)) else (name,)
    caption = "By layer, counted from 1: mean over heads and images"
    return Section(words.heading.format(patch=first), tuple(lines), (Table(caption, listed),), figures)


def _numbers(
    row: Mapping[str, object], columns: Mapping[str, tuple[str, float]], head: Sequence[int] | None
) -> dict[str, Cell]:
    number = head[1] + 1 if head else 0
    return {
        heading.format(head=number): None if row[key] is None else round(factor * float(str(row[key])), 2)
        for key, (heading, factor) in columns.items()
        if key in row and not (key == "padding" and float(str(row[key])) < _NOTICED)
    }


def _tell_training(record: RunRecord) -> Section:
    rows, kept = record.table("training"), int(_options(record)["kept"])
    layer, head = _head(record)
    few = "" if kept == len(rows) else f"Of {kept} moments, {len(rows)} are shown, evenly spaced. "
    line = (
        f"{few}The weights are those that the run kept (`--keep-every`, in half precision), averaged over steps where "
        "its recipe averages; the last ones are the model's. A head has no identity but its place: what it looks at "
        "can wander from one head to another while training."
    )
    listed: list[dict[str, Cell]] = [
        {
            "epochs": int(str(row["epochs"])),
            "weights": str(row["file"]),
            "on prefix (%)": round(100 * float(str(row["prefix_mass"])), 1),
        }
        for row in rows
    ]
    title = f"Layer {layer + 1}, head {head + 1} over training"
    return Section(title, (line,), (Table("By epochs trained, mean over images", listed),), ("head_over_training",))
