"""What `vitlens rollout` draws and tells, from its folder alone."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vitlens.analysis.attention.registry import ATTENTION_METHODS
from vitlens.figures.rollout import method_overlays, rollout_overlays
from vitlens.figures.views import shared_scale
from vitlens.files import RunRecord
from vitlens.report import Section, Table, in_words, metrics
from vitlens.runs.describe import data_words
from vitlens.runs.report import Drawn
from vitlens.runs.sheets import left_out_words, sheets
from vitlens.uncertainty import Estimate, Side, apart

SHOWN = 6  # images on a sheet, and of a data set in all


def draw(record: RunRecord) -> Iterator[Drawn]:
    """Overlays of the first images: one panel for each way of fusing heads, and one for each method."""
    found = record.arrays("rollout")
    images: Any = found["images"] / np.float32(255)
    maps: Any = found["maps"][: len(images)]
    hits: Any = found["hits"][: len(images)] if "hits" in found else None
    ways: list[str] = _choices(record)["ways"]
    fusions = [index for index, way in enumerate(ways) if way.startswith("rollout-")]
    others = [index for index, way in enumerate(ways) if not way.startswith("rollout-")]
    masks: Any = found.get("masks")
    rows = record.table("images")[: len(images)]
    if fusions:
        scale = shared_scale(list(maps[:, fusions].swapaxes(0, 1)))  # of all sheets
        for name, part in sheets("rollout", len(images), SHOWN):
            figure = rollout_overlays(
                images=images[part],
                masks=None if masks is None else masks[part],
                maps=maps[part, fusions],
                titles=[f"{ways[index].removeprefix('rollout-')} of heads" for index in fusions],
                names=[_prediction(row) for row in rows[part]],
                hits=None if hits is None else hits[part, fusions],
                scale=scale,
            )
            yield Drawn(name, figure, _rollout_caption(record))
    if others:
        compared = [*fusions[:1], *others]
        sums = maps.sum((2, 3), keepdims=True)
        shares = maps[:, compared] / np.where(sums > 0, sums, 1.0)[:, compared]
        scale = shared_scale(list(shares.swapaxes(0, 1)))
        for name, part in sheets("methods", len(images), SHOWN):
            figure = method_overlays(
                images=images[part],
                masks=None if masks is None else masks[part],
                maps=maps[part, compared],
                titles=[_title(ways[index]) for index in compared],
                names=[_asked(row, record) for row in rows[part]],
                hits=None if hits is None else hits[part, compared],
                scale=scale,
            )
            yield Drawn(name, figure, _methods_caption(record, [ways[index] for index in compared]))


def _prediction(row: Mapping[str, object]) -> str:
    if row["prediction"] is None:
        return Path(str(row["image"])).name
    return f"{row['prediction']} ({100 * float(str(row['probability'])):.0f} %)"


def _asked(row: Mapping[str, object], record: RunRecord) -> str:
    """Below the maps of a class: the class, where it is not the prediction that stands there anyway."""
    return _prediction(row) if _choices(record)["target"] == "predicted" else f"target: {row['target']}"


def _title(way: str) -> str:
    return way.replace("rollout-", "rollout, ") if way.startswith("rollout-") else way


def _method(way: str) -> str:
    return "rollout" if way.startswith("rollout-") else way


def _rollout_caption(record: RunRecord) -> str:
    choices = _choices(record)
    discard = float(choices["discard"])
    dropped = f", the lowest {100 * discard:.0f} % of each row dropped" if discard else ""
    beside = "its file" if _classless(record) else "the prediction and its probability"
    answer = "output" if _classless(record) else "prediction"
    return (
        f"Rollout (Abnar & Zuidema 2020), alpha = {choices['alpha']}{dropped}{_start(record)}; readout: "
        f"{_READOUTS[choices['readout']]}. Beside each image: {beside}. Colours share one "
        "scale, in % of the readout's row; a panel that looks flat has small values beside the others', not less "
        "structure. Bright patches reach the readout most through attention and residual connections; that does not "
        f"show that the {answer} rests on them: rollout knows neither values nor the class."
    )


def _methods_caption(record: RunRecord, ways: Sequence[str]) -> str:
    choices = _choices(record)
    said = "; ".join(f"{_title(way)}: {ATTENTION_METHODS[_method(way)].description}" for way in ways)
    target = {"predicted": "the predicted class", "true": "the true class"}.get(choices["target"], "the class named")
    layer = "" if choices["layer"] is None else f" Attention is that of layer {int(choices['layer']) + 1}."
    answer = "output" if _classless(record) else "prediction"
    gradients = "" if _classless(record) else f" Gradients are of the logit of {target}."
    return (
        f"Methods beside each other{_start(record)}; readout: {_READOUTS[choices['readout']]}. {said}."
        f"{gradients}{layer} Each map is drawn as shares of its own sum, all in one scale of colours: "
        f"places can be compared between methods, amounts cannot. Bright does not mean that the {answer} rests on it."
    )


def _start(record: RunRecord) -> str:
    start = int(_choices(record)["start_layer"])
    return f", from layer {start + 1}" if start else ""


_READOUTS = {
    "cls": "the CLS token",
    "cls+distillation": "the mean of the CLS and distillation tokens",
    "mean": "the mean over all patches",
    "pool": "the attention pooling's query",
}


def tell(record: RunRecord) -> list[Section]:
    """What the numbers say: where the maps point, what came out empty, the predictions."""
    found = metrics(record)
    ways: list[str] = _choices(record)["ways"]
    n = int(record.config["data"]["images"])  # type: ignore[index]
    area = found.get("localisation/pointing/mask-area")
    fusions = [way for way in ways if way.startswith("rollout-")]
    shown = len(record.arrays("rollout")["images"])
    words = [*(["rollout"] if fusions else []), *(["methods"] if len(fusions) < len(ways) else [])]
    figures = tuple(name for word in words for name, _ in sheets(word, shown, SHOWN))
    undrawn = (f"{said}." for said in left_out_words(shown, n))
    lines = (
        " ".join(data_words(record)),
        *undrawn,
        *_classless_words(record),
        *_empty_words(record, n),
        *_pointing_words(found, ways, area),
    )
    sections = [Section("What was found", lines, (), figures)]
    if area is not None:
        rows: list[dict[str, Any]] = [
            {"map": _title(way), "pointing hits": found[f"localisation/pointing/{way}"]} for way in ways
        ]
        rows.append({"map": "mean mask area (a random point)", "pointing hits": area})
        sections.append(Section("Localisation", (), (Table("Highest point of the map on the object", rows),)))
    rows_shown = record.table("images")[: 2 * SHOWN]
    listed = [{key: value for key, value in row.items() if key == "image" or value is not None} for row in rows_shown]
    more = f"The first {len(listed)} of {n:,}; all are in results.json." if n > len(listed) else ""
    title = "Images" if _classless(record) else "Predictions"
    sections.append(Section(title, (more,) if more else (), (Table("Images", listed),)))  # type: ignore[arg-type]
    return [*sections, Section("Limits", tuple(_limits(ways, classless=_classless(record))))]


def _limits(ways: Sequence[str], *, classless: bool) -> Iterator[str]:
    if any(way.startswith("rollout-") for way in ways):
        other = "To ask what speaks for one class, use a method with gradients (relevance, gradient-rollout)."
        yield (
            "Rollout is defined by attention weights alone; it is the same for every class."
            f"{'' if classless else f' {other}'}"
        )
    if any(ATTENTION_METHODS[_method(way)].gradients for way in ways):
        yield (
            "Methods with gradients follow what raises the target's logit through attention alone; what MLPs and "
            "values do to it is left out."
        )


def _empty_words(record: RunRecord, n: int) -> Iterator[str]:
    for row in record.table("methods"):
        count = int(str(row["empty_maps"]))
        if count:
            yield (
                f"**{count} of {n} maps of {_title(str(row['method']))} are zero everywhere** and say nothing: no "
                "attention weight raises the target's logit there."
            )


def _pointing_words(found: Mapping[str, Estimate], ways: Sequence[str], area: Estimate | None) -> Iterator[str]:
    """How often each map points at the object, and which do better than chance."""
    if area is None:
        return
    fusions = [way for way in ways if way.startswith("rollout-")]
    shown = [way for way in ways if way not in fusions[1:]]  # the first fusion asked for, not the one that did best
    hits = {way: found[f"localisation/pointing/{way}"] for way in shown}
    listed = "; ".join(f"{_title(way)}: {in_words(hit)}" for way, hit in hits.items())
    yield (
        f"How often the highest point of the map lies on the object: {listed}. A point thrown at random would in "
        f"{in_words(area, with_n=False)}."
    )
    sides = {way: apart(hits[way], area) for way in shown}
    for words, side in (
        ("more often than chance (the intervals are apart)", Side.ABOVE),
        ("less often than chance (the intervals are apart)", Side.BELOW),
        ("not shown to differ from chance (the intervals overlap, or there is none)", Side.UNDECIDED),
    ):
        chosen = [way for way in shown if sides[way] is side]
        if chosen:
            yield f"At the object {words}: {', '.join(map(_title, chosen))}."


def _classless(record: RunRecord) -> bool:
    """Whether the model has no classifier."""
    return record.table("images")[0]["prediction"] is None


def _classless_words(record: RunRecord) -> Iterator[str]:
    if _classless(record):
        yield "The model has no classifier: nothing is predicted, and methods that ask about a class are left out."


def _choices(record: RunRecord) -> Any:
    return record.config["options"]
