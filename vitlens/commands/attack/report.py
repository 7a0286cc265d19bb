"""The report of `vitlens attack`: which model is more robust, whether the attacks are sound, what changes inside."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import numpy as np
from matplotlib.figure import Figure

from vitlens.charts import Picture, amplification, images, intervals, lines, matrix
from vitlens.charts.style import shortened
from vitlens.commands.attack import record as rows
from vitlens.commands.attack.claims import ORDER, claims, effects, sampled, unknown
from vitlens.commands.attack.record import AXES, JUDGED, AttackCurveRow, AttackRecord, strongest
from vitlens.record import by
from vitlens.report.claims import enough
from vitlens.report.numbers import number
from vitlens.report.prose import say
from vitlens.report.sections import Chart, Glance, Report, Section
from vitlens.uncertainty import LEVEL, Estimate

PICTURES: Final = 6  # of the first page, of all models together


def _disagreeing(record: AttackRecord) -> str:
    """Return a sentence where the mean loss and the mean corruption error order two models differently."""
    known = [row for row in record.overall if row.lost is not None and row.relative_error is not None]
    if len(known) != 2:
        return ""
    by_loss = min(known, key=lambda row: row.lost.value if row.lost else 0.0)
    by_error = min(known, key=lambda row: row.relative_error.value if row.relative_error else 0.0)
    if by_loss is by_error:
        return ""
    return say(
        "**{{ one }}** loses less accuracy on average; the mean corruption error prefers **{{ other }}**, as it "
        "divides each corruption's errors by those of {{ base }}. That error is not comparable with published values.",
        one=by_loss.model,
        other=by_error.model,
        base=by_error.baseline,
    )


def _by_corruption(record: AttackRecord) -> str:
    """Return how many differences between models are significant, and why two means may disagree."""
    pairs = record.corruption_pairs
    counted = say(
        "{{ sure|length }} of {{ pairs|length }} differences between models are significant (McNemar, Holm).",
        sure=[row for row in pairs if row.p_holm <= LEVEL],
        pairs=pairs,
    )
    return " ".join(filter(None, [counted if pairs else "", _disagreeing(record)]))


def _strongest_rows(record: AttackRecord) -> list[AttackCurveRow]:
    """Return the strongest attack at each epsilon of each norm, on each model, of equals the last."""
    falling = sorted(record.curves, key=lambda row: -row.accuracy.value)
    return list({(row.norm, row.epsilon, row.model): row for row in falling if row.epsilon > 0}.values())


def _ratios(distances: Mapping[tuple[str, rows.Counterpart], Estimate]) -> dict[tuple[str, str], str]:
    """Return how far the attack moves features, in distances of each other counterpart."""
    found: dict[tuple[str, str], str] = {}
    for (model, kind), distance in distances.items():
        moved = distances.get((model, "adversarial"))
        if kind != "adversarial" and moved is not None:
            found[model, kind] = number(moved.value / distance.value) if distance.value > 0 else "infinitely many"
    return found


def _halfway(record: AttackRecord) -> str:
    """From which block on the attack changes outputs half as much as another image does, else how much in the last."""
    last = {(row.model, row.kind): row.distance for row in record.blocks}
    return say(
        "{% for row in rows %}{% if row.halfway %}From block {{ row.halfway|value }} on the attack changes the outputs "
        "of **{{ row.model }}** at least half as much as another image does. {% else %}After the last block of "
        "**{{ row.model }}** the attack moves features {{ ratios[row.model, 'noise'] }} times as far as equal noise, "
        "and {{ ratios[row.model, 'another image'] }} times as far as another image. {% endif %}{% endfor %}",
        ratios=_ratios(last),
        rows=[
            row
            for row in record.overall
            if enough(row.halfway) or (row.halfway is None and (row.model, "another image") in last)
        ],
    )


def _examples(record: AttackRecord) -> Iterator[Picture]:
    """Images that fool the models: clean, perturbation and adversarial, with maps of the true class."""
    for model, arrays in record.examples.items():
        times = amplification(arrays.change.astype(np.float32))
        for at in range(len(arrays.pixels))[: max(1, PICTURES // len(record.examples))]:
            row = f"{shortened(model, 10)} {arrays.image[at]}"
            clean = arrays.pixels[at].astype(np.float32) / 255
            change = arrays.change[at].astype(np.float32)
            changed = np.clip(clean + change, 0, 1)
            before, after = (
                f"{shortened(str(word), 12)}, {100 * probability:.0f} %"
                for word, probability in zip(arrays.answers[:, at], arrays.probability[:, at])
            )
            yield Picture(clean, None, row, "clean", before)
            yield Picture(np.clip(0.5 + times * change, 0, 1), None, row, "perturbation", f"× {times}")
            yield Picture(changed, None, row, "adversarial", after)
            yield Picture(clean, arrays.before[at], row, "map before")
            yield Picture(changed, arrays.after[at], row, "map after")


def _gap_at_one(record: AttackRecord) -> Estimate | None:
    """Return the difference of two models at 1/255, where one attack is the strongest on both."""
    best = [strongest(own, JUDGED) for own in by(record.curves, "model").values()]
    names = {None if row is None else row.attack for row in best}
    return next((row.difference for row in record.pairs if {row.attack} == names and row.epsilon == JUDGED), None)


def _draw_curves(rows: Sequence[AttackCurveRow], title: str) -> Figure:
    """Draw a panel a norm with a line an attack; of several models a panel an attack with a line a model."""
    one = len({row.model for row in rows}) == 1
    draw = lines("epsilon", "accuracy", of="title" if one else "model", panel="axis" if one else "panel")
    return draw(rows, title)


REPORT: Final = Report(
    AttackRecord,
    claims=claims,
    effects=effects,
    unknown=unknown,
    picture=Chart(
        "examples",
        images(),
        "Successful attacks, {{ rows|map(attribute='row')|unique|list|length }} on {{ record.images }} "
        "image{{ record.images|s }}: clean, perturbation (amplified, around grey), adversarial, and the maps of the "
        "true class, each scaled to its maximum; below: predicted class and probability.",
        title="{{ record.overall[0].sample }}: images that fool a model",
        rows=_examples,
    ),
    glance=(
        Glance("overall", "robust", question="robustness", difference=_gap_at_one),
        Glance(
            "overall",
            "clean",
            difference=lambda record: next((row.difference for row in record.pairs if row.attack == "clean"), None),
        ),
        Glance("overall", "lost", question="common corruptions"),
        Glance("overall", "relative_error"),
        Glance("overall", "failed", question="self-checks"),
    ),
    sections=(
        Section(
            "How much accuracy is left under attack?",
            _strongest_rows,
            opening="At each epsilon the strongest of the attacks counts; a better attack may leave less. "
            "`tables/curves.csv` has the other attacks, too.",
            columns=("model", "title", "at_epsilon", "accuracy"),
            about=("robustness",),
            order=lambda row: (list(AXES).index(row.norm), row.epsilon),
            charts=(
                Chart(
                    "curves",
                    _draw_curves,
                    "Robust accuracy over epsilon; bands: confidence intervals. "
                    "Epsilons of different norms cannot be compared.",
                    title="Accuracy under attack, {{ first.accuracy.n }} image{{ first.accuracy.n|s }}",
                    rows="curves",
                ),
            ),
        ),
        Section(
            "Do stronger attacks break the survivors?",
            "survivors",
            opening="More images survived than undefended models keep. PGD with a margin loss and a short Square "
            "were run on them.",
            columns=("model", "survivors", "before", "after", "margin", "square"),
            about=("robustness",),
        ),
        Section(
            "Which model is more robust?",
            "pairs",
            about=("difference under attack",),
            opening="Tests in which both models have lost all accuracy, or none, say nothing.",
            charts=(
                Chart(
                    "pairs",
                    intervals("test", "difference", of="models", reference=0.0),
                    "Accuracy of the first model minus the second's, paired by image, for each attack and epsilon. "
                    "Right of the dashed line the first keeps more.",
                    title="{{ rows|map(attribute='models')|unique|join(', ') }} under attack",
                ),
            ),
        ),
        Section(
            "How large must a perturbation be?",
            lambda record: [row for row in record.attacks if row.right and row.kind == "minimum"],
            says="Half of the {{ right }} images that **{{ model }}** has right are fooled by {{ title }} within "
            "{{ median|alone }}.",
            otherwise="More than half of the images that **{{ row.model }}** has right withstand all that "
            "{{ row.title }} tried.",
            columns=("model", "title", "source", "steps", "broken", "median"),
        ),
        Section(
            "Do adversarial images of one model fool the other?",
            lambda record: sampled(record)["transfer"],
            says="Of the images that fool **{{ made_for }}**, {{ rate }} also fool **{{ shown_to }}**.",
            charts=(
                Chart(
                    "transfer",
                    matrix("made_for", "shown_to", "rate", below=lambda row: f"of {row.rate.n}"),
                    "Share of the images that fool the model of the row and also the model of the column, of those "
                    "that it has right when clean.",
                    title="Transfer of {{ record.overall[0].sample }}",
                ),
            ),
        ),
        Section(
            "How much do common corruptions cost?",
            "corruptions",
            about=("common corruptions",),
            opening=_by_corruption,
            charts=(
                Chart(
                    "corruptions",
                    lines("severity", "accuracy", of="model", panel="title"),
                    "Accuracy over severity. All models get the same pixels. Severities of different kinds cannot be "
                    "compared.",
                    title="Accuracy under common corruptions, {{ first.accuracy.n }} image{{ first.accuracy.n|s }}",
                ),
            ),
        ),
        Section(
            "What changes inside the models?",
            lambda record: sampled(record)["blocks"],
            opening=_halfway,
            charts=(
                Chart(
                    "paths",
                    lines("block", "distance", of="kind", panel="model", log=True),
                    "One minus the cosine between a block's outputs for a clean image and its counterpart. The gap "
                    "between attack and noise of the same strength is the attack's own effect.",
                    title="Change of the outputs of blocks, {{ first.distance.n }} images",
                ),
            ),
        ),
        Section(
            "Are the attacks sound?",
            lambda record: [row for row in record.checks if row.state != "passed"],
            opening="A faulty attack makes a model look robust: these checks did not show that the attacks are sound.",
            without="Every self-check that was made came out as expected, on images that were fooled.",
            order=lambda row: ORDER.index(row.state),
            about=("self-checks",),
            columns=("model", "name", "attack", "expected", "found", "state"),
        ),
    ),
)
