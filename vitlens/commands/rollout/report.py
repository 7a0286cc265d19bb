"""The report of `vitlens rollout`, from its record."""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from vitlens.analysis.attention.registry import ATTENTION_METHODS
from vitlens.commands.rollout.conclusions import findings, images_in, title_of, verdicts
from vitlens.commands.rollout.options import RolloutOptions
from vitlens.commands.rollout.record import (
    CHECKS,
    IMAGES,
    MAP_PAIRS,
    MAPS,
    MASK_AREA,
    POINTING,
    ROLLOUT,
    MapRow,
    RolloutArrays,
    RolloutImageRow,
)
from vitlens.commands.scaffold.describe import data_sentences
from vitlens.commands.scaffold.map_checks import UNIFORM
from vitlens.commands.scaffold.sheets import EACH, left_out_words, sheets
from vitlens.records import Record
from vitlens.report.document import Cell, Document, FigureSpec, Section, Sentence, Table, sentences
from vitlens.report.findings import ranked
from vitlens.report.numbers import in_words, percent
from vitlens.uncertainty import Estimate, Side, apart

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_WIDE: Final = 0.2  # of an interval in the pointing game, from which on it is a limitation
_READOUTS: Final = {
    "cls": "the CLS token",
    "cls+distillation": "the mean of the CLS and distillation tokens",
    "mean": "the mean over all patches",
    "pool": "the attention pooling's query",
    None: "the model's own",
}


def report(record: Record) -> Document:
    """Overlays, checks of the maps, pointing game where masks are known, and the predictions."""
    kinds, images = record.rows(MAPS), record.rows(IMAGES)
    classless = not any(row.prediction for row in images)
    arrays = record.arrays(ROLLOUT)
    drawn, n = len(arrays.images), images_in(record) or len(images)
    figures = [*_fusion_sheets(record, arrays), *_method_sheets(record, arrays)]
    first = (*_pointing_sentences(record, kinds), *_check_sentences(record, kinds), *_empty_sentences(kinds, n))
    left_out = sentences(*(f"{words}." for words in left_out_words(drawn, n)), says="setting")
    tables = (*_localisation(record, kinds), *_check_tables(record, kinds))
    sections = [
        Section("Maps", (*first, *left_out), tables, tuple(figures), leading=True),
        _predictions(images, n, classless),
    ]
    return Document(
        record.config.title,
        tuple(sections),
        limits=tuple(_limits(record, kinds, classless)),
        verdicts=tuple(verdicts(record)),
        findings=ranked(findings(record)),
        preface=(*data_sentences(record), *_classless_sentences(classless)),
    )


def _fusion_sheets(record: Record, arrays: RolloutArrays) -> Iterator[FigureSpec]:
    """Overlays of rollout for each fusion of heads."""
    columns = [index for index, row in enumerate(record.rows(MAPS)) if row.fusion]
    if not columns:
        return
    titles = [f"{record.rows(MAPS)[index].fusion} of heads" for index in columns]
    for name, part in sheets("rollout", len(arrays.images), EACH):
        yield FigureSpec(name, _rollout_caption(record), partial(_draw_fusions, record, arrays, part, columns, titles))


def _draw_fusions(
    record: Record, arrays: RolloutArrays, part: slice, columns: Sequence[int], titles: Sequence[str]
) -> "Figure":
    from vitlens.figures.rollout import rollout_overlays
    from vitlens.figures.views import shared_scale

    maps: Any = arrays.maps[: len(arrays.images)]
    return rollout_overlays(
        images=_fractions(arrays)[part],
        masks=None if arrays.masks is None else arrays.masks[part],
        maps=maps[part][:, columns],
        titles=titles,
        names=[_prediction(row) for row in record.rows(IMAGES)[part]],
        hits=None if arrays.hits is None else arrays.hits[part][:, columns],
        scale=shared_scale(list(maps[:, columns].swapaxes(0, 1))),  # of all sheets
    )


def _method_sheets(record: Record, arrays: RolloutArrays) -> Iterator[FigureSpec]:
    """Overlays of all methods side by side, where there are others than rollout."""
    kinds = record.rows(MAPS)
    others = [index for index, row in enumerate(kinds) if not row.fusion]
    if not others:
        return
    columns = [*[index for index, row in enumerate(kinds) if row.fusion][:1], *others]
    caption = _methods_caption(record, [kinds[index] for index in columns])
    for name, part in sheets("methods", len(arrays.images), EACH):
        yield FigureSpec(name, caption, partial(_draw_methods, record, arrays, part, columns))


def _draw_methods(record: Record, arrays: RolloutArrays, part: slice, columns: Sequence[int]) -> "Figure":
    from vitlens.figures.rollout import method_overlays
    from vitlens.figures.views import shared_scale

    maps: Any = arrays.maps[: len(arrays.images)]
    sums = maps.sum((2, 3), keepdims=True)
    shares = maps[:, columns] / np.where(sums > 0, sums, 1.0)[:, columns]
    predicted = record.options(RolloutOptions).target == "predicted"
    return method_overlays(
        images=_fractions(arrays)[part],
        masks=None if arrays.masks is None else arrays.masks[part],
        maps=maps[part][:, columns],
        titles=[title_of(record.rows(MAPS)[index]) for index in columns],
        # the target class, where it is not the prediction
        names=[_prediction(row) if predicted else f"target: {row.target}" for row in record.rows(IMAGES)[part]],
        hits=None if arrays.hits is None else arrays.hits[part][:, columns],
        scale=shared_scale(list(shares.swapaxes(0, 1))),
    )


def _fractions(arrays: RolloutArrays) -> Any:
    return arrays.images / np.float32(255)


def _prediction(row: RolloutImageRow) -> str:
    if row.prediction is None or row.probability is None:
        return Path(row.image).name
    return f"{row.prediction} ({100 * row.probability:.0f} %)"


def _rollout_caption(record: Record) -> str:
    options, rows = record.options(RolloutOptions), record.rows(MAPS)
    classless = record.rows(IMAGES)[0].prediction is None
    dropped = f", the lowest {100 * options.discard:.0f} % of each row dropped" if options.discard else ""
    beside = "its file" if classless else "the prediction and its probability"
    return (
        f"Rollout (Abnar & Zuidema 2020), alpha = {options.alpha}{dropped}{_start(options)}; readout: "
        f"{_READOUTS[rows[0].readout]}. Beside each image: {beside}. Colours share one scale, in % of the readout's "
        "row; a panel that looks flat has small values compared with the others, not less structure. Bright patches "
        "have the largest share in the readout through attention and residual connections; this does not show that the "
        f"{'output' if classless else 'prediction'} depends on them: rollout ignores value vectors and the class."
    )


def _methods_caption(record: Record, rows: Sequence[MapRow]) -> str:
    options = record.options(RolloutOptions)
    classless = record.rows(IMAGES)[0].prediction is None
    described = "; ".join(f"{title_of(row)}: {ATTENTION_METHODS[row.kind].description}" for row in rows)
    target = {"predicted": "the predicted class", "true": "the true class"}.get(options.target, "the class of --target")
    gradients = "" if classless else f" Gradients are of the logit of {target}."
    layer = "" if options.layer is None else f" Attention is that of layer {options.layer}."
    return (
        f"Methods side by side{_start(options)}; readout: {_READOUTS[rows[0].readout]}. {described}."
        f"{gradients}{layer} Each map is divided by its sum, and all share one colour scale: positions can be "
        f"compared between methods, amounts cannot. A bright patch is no evidence that the "
        f"{'output' if classless else 'prediction'} depends on it."
    )


def _start(options: RolloutOptions) -> str:
    return f", from layer {options.start_layer}" if options.start_layer else ""


def _classless_sentences(classless: bool) -> Iterator[Sentence]:
    if classless:
        yield Sentence(
            "The model has no classifier: nothing is predicted, and methods that need a class are left out.",
            says="setting",
        )


def _empty_sentences(kinds: Sequence[MapRow], n: int) -> Iterator[Sentence]:
    for row in kinds:
        if row.empty_maps:
            yield Sentence(
                f"**{row.empty_maps} of {n} maps of {title_of(row)} are zero everywhere** and carry no information: no "
                "attention weight raises the target's logit there.",
                (row, Estimate(float(n), unit="images")),
            )


def _pointing(record: Record, kinds: Sequence[MapRow]) -> dict[str, Estimate]:
    """Pointing-game accuracy of the maps by title; empty where no masks are known."""
    by_method = {parts["method"]: hits for parts, hits in record.all(POINTING)}
    return {title_of(row): by_method[row.method] for row in kinds if row.method in by_method}


def _pointing_sentences(record: Record, kinds: Sequence[MapRow]) -> Iterator[Sentence]:
    """Pointing-game accuracy of each map, and which are above chance; of rollout the first fusion alone."""
    fusions = [row for row in kinds if row.fusion]
    hits = _pointing(record, [row for row in kinds if row not in fusions[1:]])
    if not hits:
        return
    area = record.metric(POINTING(model=record.aliases[0], method=MASK_AREA))
    listed = "; ".join(f"{title}: {in_words(hit)}" for title, hit in hits.items())
    backing = (*hits.values(), area)
    for words, side in (
        ("Above chance in the pointing game (the intervals do not overlap)", Side.ABOVE),
        ("Below chance in the pointing game (the intervals do not overlap)", Side.BELOW),
        (
            "No difference from chance is shown in the pointing game (the intervals overlap, or there is none)",
            Side.UNDECIDED,
        ),
    ):
        chosen = [title for title, hit in hits.items() if apart(hit, area) is side]
        if chosen:
            yield Sentence(f"{words}: {', '.join(chosen)}.", backing)
    yield Sentence(
        f"Share of images whose map has its maximum on the object: {listed}; of a random point: "
        f"{in_words(area, with_n=False)}.",
        backing,
    )


def _check_sentences(record: Record, kinds: Sequence[MapRow]) -> Iterator[Sentence]:
    """Which maps hold least information, and which two agree least."""
    titles, checks, pairs = {row.method: title_of(row) for row in kinds}, record.rows(CHECKS), record.rows(MAP_PAIRS)
    if checks:
        least = min(checks, key=lambda row: row.bits)
        yield Sentence(
            f"The maps of {titles[least.maps]} hold least information, {in_words(least.information)}.", (least,)
        )
        yield Sentence(
            f"Information: log2 of the number of patches minus the entropy of the map; a map of fewer than {UNIFORM} "
            "bits is uniform. Fixed places: the share of it that the mean map of the other images explains.",
            says="method",
        )
    if pairs:
        pair = min(pairs, key=lambda row: row.agreement)
        yield Sentence(
            f"The maps of {titles[pair.first]} and {titles[pair.second]} agree least: Spearman's correlation over "
            f"patches {in_words(pair.estimate)}.",
            (pair,),
        )


def _check_tables(record: Record, kinds: Sequence[MapRow]) -> Iterator[Table]:
    titles, checks, pairs = {row.method: title_of(row) for row in kinds}, record.rows(CHECKS), record.rows(MAP_PAIRS)
    if checks:
        yield Table.of(
            "Information in the maps, and the share that fixed places explain",
            checks,
            {
                "map": lambda row: titles[row.maps],
                "information": lambda row: row.information,
                "fixed places": lambda row: row.by_place,
            },
        )
    if pairs:
        yield Table.of(
            "Agreement of the maps: Spearman's correlation over patches, mean over images",
            pairs,
            {
                "map": lambda row: titles[row.first],
                "and": lambda row: titles[row.second],
                "correlation": lambda row: row.estimate,
            },
        )


def _localisation(record: Record, kinds: Sequence[MapRow]) -> Iterator[Table]:
    hits: dict[str, Cell] = dict(_pointing(record, kinds))
    if hits:
        hits["mean mask area (a random point)"] = record.metric(POINTING(model=record.aliases[0], method=MASK_AREA))
        yield Table(
            "Pointing game: share of images whose map has its maximum on the object",
            ("map", "pointing hits"),
            tuple(hits.items()),
        )


def _predictions(images: Sequence[RolloutImageRow], n: int, classless: bool) -> Section:
    shown = images[: 2 * EACH]
    more = f"The first {len(shown)} of {n:,}; all are in results.json." if n > len(shown) else None
    left_out = sentences(more, says="setting")
    if classless:
        table = Table.of("Images", shown, {"image": lambda row: row.image})
        return Section("Images", left_out, (table,), leading=True)
    table = Table.of(
        "Images",
        shown,
        {
            "image": lambda row: row.image,
            "prediction": lambda row: row.prediction,
            "probability": lambda row: row.probability,
            "target": lambda row: row.target,
        },
    )
    sure = sum((row.probability or 0.0) >= 0.5 for row in images)
    opening = Sentence(
        f"{sure} of {len(images)} predictions have a probability of at least 0.5.", (*images, Estimate(0.5))
    )
    return Section("Predictions", (opening, *left_out), (table,), leading=True)


def _limits(record: Record, kinds: Sequence[MapRow], classless: bool) -> Iterator[Sentence]:
    """At most four, about these maps."""
    n, hits = images_in(record), list(_pointing(record, kinds).values())
    widest = max(((hit.high or 1.0) - (hit.low or 0.0) for hit in hits), default=0.0)
    if hits and widest > _WIDE:
        yield Sentence(
            f"With {n} image{'' if n == 1 else 's'} an interval of the pointing game is up to {percent(widest)} wide: "
            "methods whose intervals overlap are not ordered.",
            (*hits, Estimate(widest), Estimate(float(n), unit="images")),
        )
    elif not hits:
        yield Sentence(
            "No masks of objects are known, so nothing here says whether a map lies on the object.", says="setting"
        )
    if any(row.fusion for row in kinds):
        other = "" if classless else "; relevance and gradient-rollout are maps of one class"
        yield Sentence(f"Rollout is the same for every class{other}.", says="method")
    if any(ATTENTION_METHODS[row.kind].gradients for row in kinds):
        yield Sentence(
            "Methods with gradients follow the target's logit through attention weights alone; MLPs and value vectors "
            "are left out.",
            says="method",
        )
    if n and len(record.rows(CHECKS)) and all(row.fixed is None for row in record.rows(CHECKS)):
        yield Sentence(
            f"{n} image{' is' if n == 1 else 's are'} too few to tell maps of the image from maps of positions.",
            (Estimate(float(n), unit="images"),),
        )
