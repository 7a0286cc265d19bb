"""The report of a study of transfer: whether it wins, why, and what training changed inside the
model.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from vitlens.charts import Picture, board, images, lines
from vitlens.commands.study.kinds.choose import claim_of
from vitlens.commands.study.kinds.record import ComparisonRow, negated
from vitlens.commands.study.kinds.report import (
    CHOICE,
    by_images_section,
    comparison_of,
    decision,
    difference_claims,
    in_accuracy,
    kind_report,
    of_family,
    pairs_by_images,
    range_claim,
    side_of,
    undecidable,
)
from vitlens.commands.study.kinds.transfer.record import HeadMovedRow, TransferRecord
from vitlens.record import by
from vitlens.report.claims import Claim
from vitlens.report.numbers import in_time
from vitlens.report.prose import listed, say
from vitlens.report.sections import Chart, Section
from vitlens.report.verdicts import Verdict
from vitlens.uncertainty import LEVEL, Estimate, Side, apart, beyond

CAUGHT_UP: Final = 5.0  # points: training from scratch that is at most so much below has caught up
# labels of variants
_FULL: Final = "full"
_LAST_BLOCKS: Final = "last-blocks"
_SCRATCH: Final = "scratch"
_PRETRAINED: Final = (_FULL, _LAST_BLOCKS, "frozen")
_UNDECIDED: Final = (
    "no adapted model is significantly better than training from scratch, and not all are "
    "significantly worse"
)


def claims(record: TransferRecord) -> Iterator[Claim]:
    """Yield the choice and its range, whether transfer wins, and every other difference that is
    significant.
    """
    doubt = undecidable(record)
    if doubt is not None:  # no comparison decides anything
        yield doubt
        yield range_claim(record)
        return
    yield claim_of(decision(record), record.design[0].kind)
    yield range_claim(record)
    yield _transfer_claim(record)
    main = comparison_of(record, _FULL, _SCRATCH)
    yield from difference_claims(row for row in of_family(record, "difference") if row != main)


def _transfer_claim(record: TransferRecord) -> Claim:
    """Return whether transfer wins.

    It wins if a variant with pretrained weights is significantly better than training from scratch,
    and loses if all are significantly worse.
    """
    sides = [side_of(comparison_of(record, label, _SCRATCH)) for label in _PRETRAINED]
    outcome = ""
    if Side.ABOVE in sides:
        outcome = "wins"
    elif set(sides) == {Side.BELOW}:
        outcome = "loses"
    comparison = comparison_of(record, _FULL, _SCRATCH)
    sentence = say(
        "{% if outcome %}Transfer {{ outcome }}{% else %}It is undecided whether transfer "
        "wins{% endif %}: full training is {{ more }} than training from scratch.",
        outcome=outcome,
        more=in_accuracy(comparison.difference),
    )
    return Claim(
        "transfer",
        str(record.design[0].model),
        sentence,
        verdict=None if outcome else Verdict("inconclusive", _UNDECIDED),
        effect=comparison.difference,
        p=comparison.p_holm,
        kind="answer",
    )


def caught_up(rows: Sequence[ComparisonRow]) -> ComparisonRow | None:
    """Return the row of the fewest images from which on training from scratch has caught up.

    It has if it is at most CAUGHT_UP points behind, by the whole interval. None: not even on all
    images.
    rows: full training minus training from scratch, from the fewest images on.
    """
    reached = None
    for row in reversed(rows):
        if row.difference.high is None or row.difference.high > CAUGHT_UP:
            break
        reached = row
    return reached


def _full_by_images(record: TransferRecord) -> list[ComparisonRow]:
    """Return full training against training from scratch, from the fewest images on."""
    # the labels are "full-20", "full-50" and "full"
    return [row for row in pairs_by_images(record) if row.label.partition("-")[0] == _FULL]


def _catching_up(record: TransferRecord) -> str:
    """Return where training from scratch catches up with full training."""
    rows = _full_by_images(record)
    row = caught_up(rows)
    if row is not None:
        return say(
            "Training from scratch catches up with full training at {{ row.images }} images.",
            row=row,
        )
    last = rows[-1]
    opening = "It is undecided where training from scratch catches up"
    if beyond(last.difference, 0.0) is Side.ABOVE:
        opening = "Training from scratch does not catch up"
    is_behind = last.difference.value >= 0
    return say(
        "{{ opening }} with full training: on all {{ last.images }} images it is "
        "{{ gap|alone }} {{ 'behind' if is_behind else 'ahead' }}.",
        opening=opening,
        last=last,
        gap=last.difference if is_behind else negated(last.difference),
        is_behind=is_behind,
    )


@dataclass(frozen=True)
class Reason:
    """A possible reason for the outcome of a transfer, supported if its number is above 0.

    words: the reason.
    number: the comparison that decides, in words.
    difference: the measured number.
    state: "supported", "contradicted" or "not decided".
    """

    words: str
    number: str
    difference: Estimate
    state: str


_STATES: Final[Mapping[Side, str]] = {
    Side.ABOVE: "supported",
    Side.BELOW: "contradicted",
    Side.UNDECIDED: "not decided",
}


@dataclass(frozen=True)
class _ReasonTest:
    """A possible reason, and the comparison that decides it.

    words: the reason.
    number: the comparison in words.
    label, against: the labels of the comparison.
    """

    words: str
    number: str
    label: str
    against: str


_REASONS: Final = (
    _ReasonTest(
        words="pretrained features separate the classes better than random ones",
        number="linear probe",
        label="pretrained",
        against="random",
    ),
    _ReasonTest(
        words="unchanged features are enough",
        number="frozen minus from scratch",
        label="frozen",
        against=_SCRATCH,
    ),
    _ReasonTest(
        words="adapting the features helps further",
        number="full minus frozen",
        label=_FULL,
        against="frozen",
    ),
    _ReasonTest(
        words="a teacher's outputs help",
        number="distilled minus from scratch",
        label="distilled",
        against=_SCRATCH,
    ),
)


def reasons(record: TransferRecord) -> list[Reason]:
    """Return every reason that was measured: supported if its number is above 0, contradicted if it
    is below.
    """
    measured = []
    for test in _REASONS:
        comparison = comparison_of(record, test.label, test.against)
        state = _STATES[side_of(comparison)]
        measured.append(Reason(test.words, test.number, comparison.difference, state))
    rows = _full_by_images(record)
    if len(rows) > 1:
        measured.append(_few_images(rows[0], rows[-1]))
    return measured


def _few_images(fewest: ComparisonRow, most: ComparisonRow) -> Reason:
    """Return the reason that images are few.

    It is decided if the intervals on the fewest and on the most images do not overlap.
    """
    change = fewest.difference.value - most.difference.value
    return Reason(
        "images are few",
        f"full minus from scratch, on {fewest.images} images minus on {most.images}",
        Estimate(change, unit="points"),
        _STATES[apart(fewest.difference, most.difference)],
    )


def _reasons_by_state(record: TransferRecord) -> str:
    """Return the reasons, those with one state together."""
    by_state = by(reasons(record), "state")
    sentences = []
    for state in _STATES.values():
        if state in by_state:
            sentence = say(
                "{{ state|capitalize }}: {% for reason in reasons %}{{ reason.words|whole }} "
                "({{ reason.number|whole }}: "
                "{{ reason.difference|alone }}){% if not loop.last %}; {% endif %}{% endfor %}.",
                state=state,
                reasons=by_state[state],
            )
            sentences.append(sentence)
    return " ".join(sentences)


def _convergence(record: TransferRecord) -> str:
    """Return when each variant came near the best of all."""
    parts = []
    never = []
    for row in record.reached:
        if row.seconds is None:
            never.append(row.words)
            continue
        template = "**{{ row.words }}** {{ row.epochs }} epoch{{ row.epochs|s }} ({{ time }})"
        parts.append(say(template, row=row, time=in_time(row.seconds)))
    return say(
        "Reaching a mean accuracy of {{ target|percent(1) }}, 95 % of the highest, took "
        "{{ reached }}.{% if never %} {{ never|names }} never reached it.{% endif %}",
        target=record.reached[0].accuracy,
        reached=listed(parts),
        never=never,
    )


def _moved_attention(record: TransferRecord) -> str:
    """Return how far training moved the attention, compared with other seeds, and what changed in
    it.
    """
    moved = {row.label: row for row in record.moved}
    full = moved[_FULL]
    shifts = _shifted_statistics(record)
    return say(
        "Full training moved {{ full.moved|alone }} of the attention, most in {{ top.name }} "
        "({{ top.moved|value }}); training only the last blocks moved "
        "{{ last.moved|alone }}.{% if full.between is not none %} Two full trainings with "
        "different seeds differ by {{ full.between|percent }}; {{ full.beyond }} of "
        "{{ full.heads }} heads moved more than that.{% endif %}{% if shifts %} Full training "
        "significantly changed {{ shifts }}.{% endif %}",
        full=full,
        last=moved[_LAST_BLOCKS],
        top=max(_heads_of(record, _FULL), key=lambda row: row.moved.value),
        shifts=listed(shifts) if shifts else "",
    )


def _heads_of(record: TransferRecord, label: str) -> list[HeadMovedRow]:
    return [row for row in record.heads_moved if row.label == label]


def _shifted_statistics(record: TransferRecord) -> list[str]:
    """Return in how many heads each statistic changed significantly."""
    parts = []
    for name, rows in by(record.head_shifts, "statistic").items():
        changed = [row for row in rows if row.p_holm <= LEVEL]
        increased = [row for row in changed if row.change.value > 0]
        part = say(
            "{{ name }} in {{ changed|length }} of {{ rows|length }} heads ({{ increased|length }} "
            "increased)",
            name=name.replace("_", " "),
            changed=changed,
            rows=rows,
            increased=increased,
        )
        parts.append(part)
    return parts


def _changed_features(record: TransferRecord) -> str:
    """Return which layer changed most, and what a linear probe on the last one gained."""
    full = [row for row in record.layer_similarity if row.label == _FULL]
    return say(
        "{% if least %}Full training changed layer {{ least.layer }} most (CKA "
        "{{ least.cka|alone }} with the layer before training). {% endif %}It changed the "
        "accuracy of a linear probe on the last layer by {{ gain.difference|alone }}.",
        least=min(full, key=lambda row: row.cka.value, default=None),
        gain=comparison_of(record, _FULL, "pretrained"),
    )


def _maps_before_and_after(record: TransferRecord) -> Iterator[Picture]:
    """Yield an image of each class with attention and rollout before and after full training."""
    arrays = record.map_arrays
    if arrays is None:
        return
    for index, row in enumerate(record.maps):
        image = arrays.images[index].astype(np.float32) / 255
        yield Picture(image, row=row.name, column="image")
        yield _map_picture(image, arrays.before[index], row.name, "attention before", row.before)
        yield _map_picture(image, arrays.after[index], row.name, "attention after", row.after)
        if arrays.rollout_before is not None and arrays.rollout_after is not None:
            yield _map_picture(image, arrays.rollout_before[index], row.name, "rollout before")
            yield _map_picture(image, arrays.rollout_after[index], row.name, "rollout after")


def _map_picture(image: Any, values: Any, row: str, column: str, below: str = "") -> Picture:
    return Picture(image, values, row=row, column=column, below=below)


_WHY: Final = Section(
    "Why does transfer win, or not?", reasons, about=("transfer",), opening=_reasons_by_state
)
_SPEED: Final = Section(
    "How fast does each variant learn?",
    "reached",
    opening=_convergence,
    charts=(
        Chart(
            "convergence",
            lines("epochs", "accuracy", of="words"),
            "Test accuracy after every epoch: dots are seeds, lines their means.",
            title="Test accuracy by epoch",
            rows="curves",
        ),
    ),
)
_ATTENTION: Final = Section(
    "How did the attention of each head change?",
    "moved",
    opening=_moved_attention,
    charts=(
        Chart(
            "attention_moved",
            board("moved", "between"),
            "Share of each head's attention that moved to other keys in full training, and between "
            "two seeds.",
            title="Moved attention of every head",
            rows="heads_moved",
            only=lambda row: row.label == _FULL,
        ),
        Chart(
            "maps_before_after",
            images(),
            "The first image of each class, with the attention of the last layer and the rollout "
            "before and after full training; below: the prediction.",
            title="Maps before and after full training",
            rows=_maps_before_and_after,
        ),
    ),
)
_FEATURES: Final = Section(
    "What happened to the features?",
    "probes",
    opening=_changed_features,
    charts=(
        Chart(
            "layer_similarity",
            lines("layer", "cka", of="words"),
            "CKA of each layer with itself before training, mean over seeds.",
            title="Similarity of the layers to those of the model",
            rows="layer_similarity",
        ),
        Chart(
            "probes",
            lines("layer", "accuracy", of="words", reference="chance"),
            "Test accuracy of a linear probe on each layer; dashed: guessing.",
            title="Linear probes on the layers",
        ),
    ),
)
REPORT: Final = kind_report(
    TransferRecord,
    claims,
    (CHOICE, by_images_section(_catching_up), _WHY, _SPEED, _ATTENTION, _FEATURES),
)
