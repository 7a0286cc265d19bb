"""The report of `vitlens rollout`, from its record."""

from collections.abc import Iterator, Sequence
from typing import Final

from vitlens.analysis.attention.registry import ATTENTION_METHODS
from vitlens.commands.rollout.conclusions import findings, images_in, title_of, verdicts
from vitlens.commands.rollout.record import (
    CHECKS,
    IMAGES,
    MAP_PAIRS,
    MAPS,
    ROLLOUT,
    MapRow,
    RolloutArrays,
    RolloutImageRow,
)
from vitlens.commands.rollout.report.overlays import fusion_sheets, method_sheets
from vitlens.commands.scaffold.describe import data_sentences
from vitlens.commands.scaffold.explorer.report import Shown, explorer_of, explorer_sentences
from vitlens.commands.scaffold.maps.information import UNIFORM, is_uniform
from vitlens.commands.scaffold.maps.on_object import METHOD, ON_OBJECT, on_object_table
from vitlens.commands.scaffold.mixed_heads import mixed_heads_limit
from vitlens.commands.scaffold.sheets import EACH, left_out_words
from vitlens.records import Record
from vitlens.report.document import Document, Section, Sentence, Table, sentences
from vitlens.report.findings import ranked
from vitlens.report.numbers import in_words, percent
from vitlens.uncertainty import Estimate, Side

__all__ = ["report"]

_WIDE: Final = 0.2  # of an interval in the pointing game, from which on it is a limitation


def report(record: Record) -> Document:
    """Overlays, checks of the maps, pointing game where masks are known, and the predictions."""
    kinds, images = record.rows(MAPS), record.rows(IMAGES)
    classless = not any(row.prediction for row in images)
    arrays = record.arrays(ROLLOUT)
    drawn, n = len(arrays.images), images_in(record) or len(images)
    figures = [*fusion_sheets(record, arrays), *method_sheets(record, arrays)]
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
        preface=(*data_sentences(record), *_classless_sentences(classless), *explorer_sentences(record)),
        explorer=explorer_of(record, _shown(kinds, images, arrays)),
    )


def _shown(kinds: Sequence[MapRow], images: Sequence[RolloutImageRow], arrays: RolloutArrays) -> Shown:
    """Each drawn image with its maps by every method, its prediction and target."""
    facts = [tuple(_facts(row)) for row in images]
    maps = {title_of(row): arrays.maps[:, index] for index, row in enumerate(kinds)}
    return Shown(arrays.images, [row.image for row in images], facts, maps)


def _facts(row: RolloutImageRow) -> Iterator[str]:
    if row.prediction is not None and row.probability is not None:
        yield f"prediction: {row.prediction}, {percent(row.probability, 1)}"
        if row.target != row.prediction:
            yield f"maps of methods with gradients: of {row.target}"


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


def _pointing_sentences(record: Record, kinds: Sequence[MapRow]) -> Iterator[Sentence]:
    """Pointing-game accuracy of each map, and which are above their baseline; of rollout the first fusion alone."""
    fusions = [row for row in kinds if row.fusion]
    titles = {row.method: title_of(row) for row in kinds if row not in fusions[1:]}
    rows = [row for row in record.rows(ON_OBJECT) if row.maps in titles]
    if not rows:
        return
    checks = record.rows(CHECKS)
    flat = {row.maps for row in checks if is_uniform(row, len(checks))}
    for words, side in (
        ("Above their baseline in the pointing game (the interval of the paired difference excludes 0)", Side.ABOVE),
        ("Below their baseline in the pointing game (the interval of the paired difference excludes 0)", Side.BELOW),
        ("No difference from the baseline is shown in the pointing game", Side.UNDECIDED),
    ):
        chosen = [
            f"{titles[row.maps]}{' (nearly uniform)' if row.maps in flat else ''}, {in_words(row.estimate)}, "
            f"beside {row.chance_words}"
            for row in rows
            if row.side is side
        ]
        if chosen:
            yield Sentence(
                f"{words}: {'; '.join(chosen)}.",
                (*rows, *(row.estimate for row in rows), *(row.of_baseline for row in rows), *checks),
            )
    yield Sentence(METHOD, says="method")


def _check_sentences(record: Record, kinds: Sequence[MapRow]) -> Iterator[Sentence]:
    """Which maps hold least information, and which two agree least."""
    titles, checks, pairs = {row.method: title_of(row) for row in kinds}, record.rows(CHECKS), record.rows(MAP_PAIRS)
    if checks:
        least = min(checks, key=lambda row: row.information.value)
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
    titles = {row.method: title_of(row) for row in kinds}
    rows = [row for row in record.rows(ON_OBJECT) if row.maps in titles]
    if rows:
        title = "Pointing game: share of images whose map has its maximum on the object"
        yield on_object_table(title, rows, {"map": lambda row: titles[row.maps]}, "pointing hits")


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
    """At most five, about these maps."""
    yield from mixed_heads_limit(record)
    n, hits = images_in(record), [row.estimate for row in record.rows(ON_OBJECT)]
    widest = max(((hit.high or 1.0) - (hit.low or 0.0) for hit in hits), default=0.0)
    if hits and widest > _WIDE:
        yield Sentence(
            f"With {n} image{'' if n == 1 else 's'} an interval of the pointing game is up to {100 * widest:.0f} "
            "points wide: methods whose intervals overlap are not ordered.",
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
    if n and len(record.rows(CHECKS)) and all(row.by_place is None for row in record.rows(CHECKS)):
        yield Sentence(
            f"{n} image{' is' if n == 1 else 's are'} too few to tell maps of the image from maps of positions.",
            (Estimate(float(n), unit="images"),),
        )
