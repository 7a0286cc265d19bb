"""The report of a study of small models that differ in one factor."""

from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np

from vitlens.charts import Picture, images
from vitlens.charts.pictures import cut, mosaic
from vitlens.commands.shared.receptive import field_charts
from vitlens.commands.study.kinds.choose import claim_of
from vitlens.commands.study.kinds.record import ComparisonRow, VariantRow, negated
from vitlens.commands.study.kinds.report import (
    CHANGES,
    CHOICE,
    beyond_literature,
    by_images_section,
    decision,
    difference_claims,
    failure_claims,
    in_accuracy,
    kind_report,
    literature_claims,
    of_family,
    pairs_by_images,
    range_claim,
    side_of,
    undecidable,
)
from vitlens.commands.study.kinds.variants.record import PositionRow, VariantsRecord
from vitlens.record import by
from vitlens.report.claims import Claim
from vitlens.report.numbers import in_time, in_words, number
from vitlens.report.prose import Marked, listed, say
from vitlens.report.sections import Chart, Section
from vitlens.report.verdicts import Verdict
from vitlens.uncertainty import Side, beyond


def claims(record: VariantsRecord) -> Iterator[Claim]:
    """Yield the choice, its range, and every other difference that is significant."""
    doubt = undecidable(record)
    if doubt is not None:  # no comparison decides anything
        yield doubt
        yield range_claim(record)
        yield from failure_claims(record)
        return
    yield from _hunger_claims(record)
    yield from _lead_claims(record)
    yield claim_of(decision(record), record.design[0].kind)
    yield range_claim(record)
    yield from failure_claims(record)
    yield from literature_claims(record)
    yield from difference_claims(beyond_literature(record, _main_differences(record)))


def _main_differences(record: VariantsRecord) -> list[ComparisonRow]:
    """Return all differences; if variants build on each other, only the steps between them and the
    largest difference that is no step.
    """
    steps = of_family(record, "step")
    differences = of_family(record, "difference")
    if not steps:
        return differences
    pairs = {(row.label, row.against) for row in steps}
    others = [row for row in differences if (row.label, row.against) not in pairs]
    others.sort(key=lambda row: -abs(row.difference.value))
    return [*steps, *others[:1]]


def _lead_claims(record: VariantsRecord) -> Iterator[Claim]:
    """Yield which of two lines leads at which numbers of training images, the question of a study
    of shares of the data.
    """
    line_of = {row.label: row.line for row in record.points}
    rows_by_line: dict[str, list[ComparisonRow]] = {}
    for row in pairs_by_images(record):
        rows_by_line.setdefault(line_of[row.label], []).append(row)
    for line, rows in rows_by_line.items():
        yield _lead_claim(line, line_of[rows[0].against], rows)


def _lead_claim(line: str, first_line: str, rows: Sequence[ComparisonRow]) -> Claim:
    """Return which of two lines leads; rows: `line` minus `first_line`, by number of images."""
    ahead = [f"{row.images:,}" for row in rows if row.winner == row.words]
    behind = [f"{row.images:,}" for row in rows if row.winner == row.against_words]
    undecided = [f"{row.images:,}" for row in rows if row.winner is None]
    leads = []
    if ahead:
        leads.append(f"{line} leads {first_line} with {listed(ahead)} training images")
    if behind:
        leads.append(f"{first_line} leads {line} with {listed(behind)} training images")
    title = "; ".join(leads)
    verdict = None
    if not leads:
        title = f"Neither {line} nor {first_line} is shown to lead at any number of images"
        verdict = Verdict("inconclusive", title)
    decided = [row for row in rows if row.winner is not None]
    largest = max(decided or rows, key=lambda row: abs(row.difference.value))
    sentence = say(
        "{{ title }}{% if undecided %}; {{ 'with ' ~ undecided }} it is undecided"
        "{% endif %}. The largest {{ 'decided ' if decided }}difference is that of "
        "**{{ row.words }}** minus **{{ row.against_words }}**, "
        "{{ row.difference|alone }}.",
        title=Marked(title),
        # if all are undecided, the title says so
        undecided=Marked(listed(undecided)) if undecided and leads else "",
        row=largest,
        decided=bool(decided),
    )
    return Claim(
        "images",
        f"{line} and {first_line}",
        sentence,
        title,
        verdict,
        effect=largest.difference,
        p=largest.p_holm,
        kind="answer",
        place="by_images",
    )


def _hunger_claims(record: VariantsRecord) -> Iterator[Claim]:
    """Yield what a small share of the images costs each line: for lack of images, and of steps.

    The lack of images is the gain with all images at equal steps. The lack of steps is the gain of
    equal steps over equal epochs, on the share. For example, "vit-5-epochs" minus "vit-5" is the
    lack of steps, and "vit-100" minus "vit-5" the lack of images.
    """
    variant_of = {row.label: row for row in record.points}
    for row in of_family(record, "difference"):
        # two variants on one share: as many epochs, or as many steps, as with all images
        equal_epochs = variant_of[row.label]
        equal_steps = variant_of[row.against]
        has_equal_images = equal_epochs.train_images == equal_steps.train_images
        has_fewer_steps = equal_epochs.steps < equal_steps.steps
        if not (has_equal_images and has_fewer_steps):
            continue
        of_line = [point for point in record.points if point.line == equal_steps.line]
        all_images = max(of_line, key=lambda point: point.train_images)
        gain = _difference_of(record, all_images.label, equal_steps.label)
        if gain is None:
            continue
        sentence = say(
            "With {{ share.train_images }} training images **{{ share.line }}** is "
            "{{ lack_of_images }} than with all {{ all.train_images }} in as many steps (lack of "
            "images), and with as many epochs {{ lack_of_steps }} than that (lack of steps"
            "{% if undecided %}, undecided{% endif %}).",
            share=equal_steps,
            all=all_images,
            lack_of_images=in_accuracy(negated(gain.difference)),
            lack_of_steps=in_accuracy(row.difference),
            undecided=side_of(row) is Side.UNDECIDED,
        )
        yield Claim(
            "hunger",
            equal_epochs.words,
            sentence,
            effect=row.difference,
            p=row.p_holm,
            kind="answer",
            place="points",
        )


def _difference_of(record: VariantsRecord, label: str, against: str) -> ComparisonRow | None:
    """Return the planned comparison of two variants, or None."""
    for row in of_family(record, "difference"):
        if (row.label, row.against) == (label, against):
            return row
    return None


def _won_sizes(record: VariantsRecord) -> str:
    """Return at how many training set sizes one of two lines wins."""
    rows = pairs_by_images(record)
    return say(
        "For {{ won|length }} of {{ rows|length }} training set sizes, one of the two is "
        "significantly better.",
        rows=rows,
        won=[row for row in rows if row.winner is not None],
    )


def _cut_variants(record: VariantsRecord) -> list[VariantRow]:
    """Return the variants that cut images into patches, if an image is there to show it."""
    if record.cut is None:
        return []
    return [row for row in record.points if row.patch is not None]


def _cut_pictures(record: VariantsRecord) -> Iterator[Picture]:
    """Yield the first test image, cut by white lines into the patches of each variant."""
    if record.cut is None:
        return
    image = record.cut.image[0].astype(np.float32) / 255
    for row in record.points:
        if row.patch is not None:
            facts = (
                f"{row.tokens} tokens",
                f"{number(row.flops / 1e6)} MFLOPs",
                in_words(row.accuracy, with_n=False),
                f"training {in_time(row.seconds)}",
            )
            yield Picture(cut(image, row.patch), column=row.words, below="\n".join(facts))


def _order_of_positions(record: VariantsRecord) -> str:
    """Return what the rank correlations show, by their intervals."""
    parts = []
    for row in record.position_order:
        if row.all is not None:
            order = _order_in_words(row)
            parts.append(
                say(
                    "{{ row.all|alone }} for **{{ row.words }}** ({{ order }})",
                    row=row,
                    order=order,
                )
            )
    return say(
        "The rank correlation between the similarity of two patches' embeddings and their nearness "
        "is {{ parts }}.",
        parts=listed(parts),
    )


def _order_in_words(row: PositionRow) -> str:
    """Return whether nearer patches have more similar embeddings, in a few words."""
    assert row.all is not None
    # fixed embeddings are the same before training, up to rounding
    if row.before is not None and abs(row.before - row.all.value) < 1e-9:
        return "fixed"
    if beyond(row.all, 0.0) is not Side.UNDECIDED:
        more = "more" if row.all.value > 0 else "less"
        return f"nearer patches are {more} similar"
    return "one seed" if row.all.low is None else "no order by distance is seen"


def _similarity_maps(record: VariantsRecord) -> Iterator[Picture]:
    """Yield the similarities of the position embeddings of each variant."""
    if record.position_similarity is None:
        return
    for index, similarity in record.position_similarity.similarity.items():
        row = record.points[index]
        if row.grid:
            maps = mosaic(similarity, row.grid)  # without an image below them
            yield Picture(None, maps, column=row.words)


def _last_layers(record: VariantsRecord) -> list[Any]:
    """Return the receptive field after the last layer of each variant."""
    return [rows[-1] for rows in by(record.receptive_fields, "model").values()]


_CUTS: Final = Section(
    "How does each variant cut an image?",
    _cut_variants,
    opening="Smaller patches make more tokens, and more tokens cost more.",
    columns=("words", "tokens", "flops", "training_bytes", "seconds"),
    charts=(
        Chart(
            "cuts",
            images(largest=1.6),
            "The first test image, cut into the patches of each variant; below: tokens, "
            "operations, accuracy and training time.",
            title="One image as the patches of each variant",
            rows=_cut_pictures,
        ),
    ),
)
_POSITIONS: Final = Section(
    "Do near patches have similar position embeddings?",
    "position_order",
    opening=_order_of_positions,
    columns=("words", "all", "rows", "columns", "before"),
    charts=(
        Chart(
            "position_similarity",
            images(largest=2.2),
            "Cosine similarity of position embeddings: for each patch, at its place, its map of "
            "similarities with all others (first seed). Each panel has its own colours.",
            title="Similarity of position embeddings",
            rows=_similarity_maps,
        ),
    ),
)
_SINKS: Final = Section(
    "Are there sinks and high-norm patches?",
    "sinks",
    opening="{% set ascending = rows|sort(attribute='high_norm.value') %}"
    "{% set fewest = ascending[0] %}{% set most = ascending[-1] %}"
    "From {{ fewest.high_norm|alone }} (**{{ fewest.words }}**) to {{ most.high_norm|alone }} "
    "(**{{ most.words }}**) of an image's patches have an outlying norm, mean over layers.",
    columns=("words", "high_norm", "sink_mass", "register_mass"),
)
_RECEPTIVE_FIELDS: Final = Section(
    "How far does a patch see?",
    _last_layers,
    columns=("words", "title", "distance", "half", "seen"),
    opening="{% set ascending = rows|sort(attribute='distance.value') %}"
    "{% set nearest = ascending[0] %}{% set farthest = ascending[-1] %}"
    "After the last layer, the mean distance to the pixels that change a patch ranges from "
    "{{ nearest.distance|alone }} in **{{ nearest.words }}** to {{ farthest.distance|alone }} in "
    "**{{ farthest.words }}**.",
    charts=field_charts(),
)
REPORT: Final = kind_report(
    VariantsRecord,
    claims,
    (CHOICE, CHANGES, by_images_section(_won_sizes), _CUTS, _POSITIONS, _SINKS, _RECEPTIVE_FIELDS),
)
