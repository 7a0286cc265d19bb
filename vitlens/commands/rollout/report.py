"""The report of `vitlens rollout`: each kind of map, and whether it finds the object."""

from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np

from vitlens.analysis.attention.registry import ATTENTION_METHODS
from vitlens.charts import Picture, images, intervals
from vitlens.charts.overlay import is_constant
from vitlens.charts.style import RIGHT_SYMBOL, WRONG_SYMBOL
from vitlens.commands.rollout.claims import claims, uniform_kinds, unknown
from vitlens.commands.rollout.record import ImageRow, PairRow, RolloutRecord, RolloutRow
from vitlens.commands.shared.explorer import ExplorerContents, explorer_of
from vitlens.commands.shared.sheets import EACH, file_names
from vitlens.report.claims import FEWEST
from vitlens.report.explorer import Explorer
from vitlens.report.numbers import percent
from vitlens.report.sections import Chart, Overview, Report, Section, other_sheets


def pictures(record: RolloutRecord) -> Iterator[Picture]:
    """Yield the drawn images, EACH a sheet, each with all its maps."""
    if record.maps is None:
        return
    arrays = record.maps
    uniform = uniform_kinds(record.methods)
    names = file_names([row.image for row in record.shown])
    # zip stops after the drawn images
    for image_index, (name, row, pixels) in enumerate(zip(names, record.shown, arrays.images)):
        image = pixels / np.float32(255)
        mask = None if arrays.masks is None else arrays.masks[image_index]
        sheet = image_index // EACH
        yield Picture(
            image, row=name, column="image", below="\n".join(_facts(row)), mask=mask, sheet=sheet
        )
        for kind_index, kind in enumerate(record.methods):
            values = np.asarray(arrays.maps[image_index, kind_index], float)
            constant = is_constant(values)
            hit = None
            if arrays.hits is not None and not constant:
                hit = bool(arrays.hits[image_index, kind_index])
            yield Picture(
                image,
                values,
                row=name,
                column=kind.name,
                below=_hit_words(hit),
                mask=mask,
                hit=hit,
                crossed=_flaw(constant, is_nearly_uniform=kind in uniform),
                sheet=sheet,
            )


def _hit_words(hit: bool | None) -> str:
    if hit is None:
        return ""
    if hit:
        return f"{RIGHT_SYMBOL} hit"
    return f"{WRONG_SYMBOL} miss"


def _flaw(constant: Any, *, is_nearly_uniform: bool) -> str:
    """Return why a map is crossed out, "" if it is not."""
    if constant:
        return "uniform"
    if is_nearly_uniform:
        return "nearly uniform"
    return ""


def _facts(row: ImageRow) -> Iterator[str]:
    """Yield the prediction of an image, and the target class if it differs."""
    if row.prediction is not None and row.probability is not None:
        yield f"{row.prediction} ({percent(row.probability)})"
        if row.target != row.prediction:
            yield f"target: {row.target}"


def explorer(record: RolloutRecord) -> Explorer | None:
    """Return each drawn image with its maps by every method, its prediction and target."""
    if record.maps is None:
        return None
    names = []
    facts = []
    for row in record.shown:
        names.append(row.image)
        facts.append(list(_facts(row)))
    maps = {}
    for index, kind in enumerate(record.methods):
        maps[kind.name] = record.maps.maps[:, index]
    return explorer_of(record, ExplorerContents(record.maps.images, names, facts, maps))


def definitions(record: RolloutRecord) -> Iterator[tuple[str, str]]:
    """Yield the definition of each kind of map."""
    for row in record.methods:
        yield row.name, ATTENTION_METHODS[row.method].description


def _kinds_with_pointing(record: RolloutRecord) -> list[RolloutRow]:
    """Return the kinds of map with a pointing game on enough images."""
    if record.images < FEWEST:
        return []
    return [row for row in record.methods if row.pointing]


def _pairs_of_many_images(record: RolloutRecord) -> Sequence[PairRow]:
    if record.images < FEWEST:
        return ()
    return record.pairs


_PICTURE: Final = Chart(
    "maps",
    images(),
    "Each map over its image, scaled from zero to its maximum: compare places, not amounts. "
    "{% if record.maps.masks is not none %}Outline: the object; mark: the maximum of the map. "
    "{% endif %}Crossed out: uniform maps.",
    title="Attention over all layers of {{ record.aliases[0] }}, by kind of map",
    rows=pictures,
)

REPORT: Final = Report(
    RolloutRecord,
    claims=claims,
    unknown=unknown,
    explorer=explorer,
    definitions=definitions,
    title="Attention over all layers of {{ record.aliases[0] }}",
    picture=_PICTURE,
    glance=Overview(
        "methods", ("name", "pointing", "of_baseline", "information", "by_place", "patch_mass")
    ),
    sections=(
        Section(
            "Do the maps find the object?",
            _kinds_with_pointing,
            columns=("name", "pointing", "baseline", "of_baseline", "difference"),
            charts=(
                Chart(
                    "pointing",
                    intervals(
                        "name",
                        "pointing",
                        "of_baseline",
                        titles=("this map", "a map that ignores the image"),
                    ),
                    "Share of images whose map has its maximum on the object, with intervals, "
                    "and the same share for the best map that ignores the image.",
                    title="Hits on the object, compared with maps that ignore the image",
                ),
            ),
        ),
        Section(
            "Do the maps agree?",
            _pairs_of_many_images,
            columns=("first", "second", "agreement"),
            order=lambda row: row.agreement.value,
            opening="The least similar maps are {{ first.first }} and {{ first.second }}, with a "
            "rank correlation of {{ first.agreement|alone }}.",
        ),
        other_sheets(_PICTURE),
    ),
)
