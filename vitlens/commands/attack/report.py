"""The report of `vitlens attack`: which model is more robust, whether the attacks are sound, what
changes inside.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

import numpy as np
from matplotlib.figure import Figure

from vitlens.charts import Picture, amplification, images, intervals, lines, matrix
from vitlens.charts.style import shorten
from vitlens.commands.attack import reason_claims
from vitlens.commands.attack.claims import ORDER, claims, effects, rows_on_sample, unknown
from vitlens.commands.attack.epsilon import AXES
from vitlens.commands.attack.record import (
    JUDGED,
    AttackCheckRow,
    AttackCurveRow,
    AttackedModelRow,
    AttackExampleArrays,
    AttackRecord,
    AttackRow,
    strongest,
)
from vitlens.record import by
from vitlens.report.claims import enough, veto_doubted
from vitlens.report.numbers import number
from vitlens.report.prose import say
from vitlens.report.sections import Chart, Glance, Report, Section
from vitlens.uncertainty import LEVEL, Estimate

PICTURES: Final = 6  # on the first page, of all models together
_MODEL_LETTERS: Final = 10  # of a model's name next to a picture
_CLASS_LETTERS: Final = 12  # of a class's name below a picture


def _by_corruption(record: AttackRecord) -> str:
    """Return how many differences between models are significant, and why two means may
    disagree."""
    sentences = []
    if record.corruption_pairs:
        significant = [row for row in record.corruption_pairs if row.p_holm <= LEVEL]
        sentence = say(
            "{{ significant|length }} of {{ pairs|length }} differences between models are "
            "significant (McNemar, Holm).",
            significant=significant,
            pairs=record.corruption_pairs,
        )
        sentences.append(sentence)
    sentences += _disagreement(record)
    return " ".join(sentences)


def _disagreement(record: AttackRecord) -> Iterator[str]:
    """Yield a sentence if the mean loss and the mean corruption error rank two models
    differently."""
    losses: dict[str, float] = {}
    errors: dict[str, float] = {}
    for row in record.overall:
        if row.lost is not None and row.relative_error is not None:
            losses[row.model] = row.lost.value
            errors[row.model] = row.relative_error.value
    if len(losses) != 2:  # the sentence compares two models
        return
    by_loss = min(losses, key=lambda model: losses[model])
    by_error = min(errors, key=lambda model: errors[model])
    if by_loss != by_error:
        yield say(
            "**{{ one }}** loses less accuracy on average; the mean corruption error prefers "
            "**{{ other }}**, because it divides the errors under each corruption by those of "
            "{{ baseline }}. That error is not comparable with published values.",
            one=by_loss,
            other=by_error,
            baseline=_row_of(record, by_error).baseline,
        )


def _row_of(record: AttackRecord, model: str) -> AttackedModelRow:
    return next(row for row in record.overall if row.model == model)


def _strongest_rows(record: AttackRecord) -> list[AttackCurveRow]:
    """Return the strongest attack at each epsilon of each norm, on each model; the last of equally
    strong ones.
    """
    strongest_rows = {}
    weakest_first = sorted(record.curves, key=lambda row: -row.accuracy.value)
    for row in weakest_first:
        if row.epsilon > 0:
            strongest_rows[row.norm, row.epsilon, row.model] = row  # a stronger one replaces it
    return list(strongest_rows.values())


def _halfway(record: AttackRecord) -> str:
    """Return how far the attack moves the outputs of blocks, compared with another image and with
    noise.
    """
    last_block: dict[tuple[str, str], Estimate] = {}  # by model and counterpart
    for block in record.blocks:  # blocks ascend, so the last one stays
        last_block[block.model, block.kind] = block.distance
    sentences = []
    for row in record.overall:
        if row.halfway is None and (row.model, "another image") in last_block:
            sentence = say(
                "After the last block of **{{ model }}** the attack moves features "
                "{{ noise }} times as far as equally strong noise, and {{ other }} "
                "times as far as another image.",
                model=row.model,
                noise=_ratio(last_block, row.model, "noise"),
                other=_ratio(last_block, row.model, "another image"),
            )
            sentences.append(sentence)
        elif enough(row.halfway):
            sentence = say(
                "From block {{ row.halfway|value }} on the attack changes the outputs of "
                "**{{ row.model }}** at least half as much as another image does.",
                row=row,
            )
            sentences.append(sentence)
    return " ".join(sentences)


def _ratio(distances: dict[tuple[str, str], Estimate], model: str, kind: str) -> str:
    """Return how far the attack moves features, as a multiple of the distance of a counterpart."""
    distance = distances[model, kind].value
    if distance == 0:
        return "infinitely many"
    return number(distances[model, "adversarial"].value / distance)


def _examples(record: AttackRecord) -> Iterator[Picture]:
    """Yield images that fool the models: clean, perturbation and adversarial, with maps of the true
    class.
    """
    for model, arrays in record.examples.items():
        images_a_model = max(1, PICTURES // len(record.examples))
        factor = amplification(arrays.change.astype(np.float32))
        for index in range(min(images_a_model, len(arrays.pixels))):
            yield from _example(model, arrays, index, factor)


def _example(model: str, arrays: AttackExampleArrays, index: int, factor: int) -> Iterator[Picture]:
    """Yield the row of pictures of one image; `factor` amplifies the perturbation."""
    clean = arrays.pixels[index].astype(np.float32) / 255
    change = arrays.change[index].astype(np.float32)
    adversarial = np.clip(clean + change, 0, 1)
    amplified = np.clip(0.5 + factor * change, 0, 1)
    row = f"{shorten(model, _MODEL_LETTERS)} {arrays.image[index]}"
    yield Picture(clean, row=row, column="clean", below=_prediction(arrays, index, version=0))
    yield Picture(amplified, row=row, column="perturbation", below=f"× {factor}")
    yield Picture(
        adversarial, row=row, column="adversarial", below=_prediction(arrays, index, version=1)
    )
    yield Picture(clean, arrays.before[index], row=row, column="map before")
    yield Picture(adversarial, arrays.after[index], row=row, column="map after")


def _prediction(arrays: AttackExampleArrays, index: int, *, version: int) -> str:
    """Return the predicted class and its probability, of the clean (0) or adversarial (1) version
    of an image.
    """
    name = shorten(str(arrays.answers[version, index]), _CLASS_LETTERS)
    return f"{name}, {100 * arrays.probability[version, index]:.0f} %"


def _gap_at_one(record: AttackRecord) -> Estimate | None:
    """Return the difference of the first two models at 1/255, if one attack is the strongest on all
    models.
    """
    strongest_attacks = set()
    for curves in by(record.curves, "model").values():
        row = strongest(curves, JUDGED)
        if row is None:
            return None
        strongest_attacks.add(row.attack)
    for pair in record.pairs:
        if strongest_attacks == {pair.attack} and pair.epsilon == JUDGED:
            return pair.difference
    return None


def _clean_gap(record: AttackRecord) -> Estimate | None:
    """Return the difference of the first two models on clean images."""
    for pair in record.pairs:
        if pair.attack == "clean":
            return pair.difference
    return None


def _draw_curves(rows: Sequence[AttackCurveRow], title: str) -> Figure:
    """Draw robust accuracy over epsilon.

    One model has a panel for each norm, several models have a panel for each attack.
    """
    models = {row.model for row in rows}
    if len(models) == 1:
        draw = lines("epsilon", "accuracy", of="title", panel="axis")
    else:
        draw = lines("epsilon", "accuracy", of="model", panel="panel")
    return draw(rows, title)


def _by_norm(row: AttackCurveRow) -> tuple[int, float]:
    norms = list(AXES)
    return norms.index(row.norm), row.epsilon


def _minimum_attacks(record: AttackRecord) -> list[AttackRow]:
    """Return the attacks that search for the smallest perturbation of images that a model
    classifies correctly.
    """
    return [row for row in record.attacks if row.right and row.kind == "minimum"]


def _suspicious_checks(record: AttackRecord) -> list[AttackCheckRow]:
    return [row for row in record.checks if row.state != "passed"]


def _why_robustness_differs(record: AttackRecord) -> str:
    return reason_claims.answer(record, veto_doubted(claims(record)))


REPORT: Final = Report(
    AttackRecord,
    claims=claims,
    effects=effects,
    unknown=unknown,
    picture=Chart(
        "examples",
        images(),
        "Successful attacks, {{ rows|map(attribute='row')|unique|list|length }} on "
        "{{ record.images }} image{{ record.images|s }}: clean, perturbation (amplified, around "
        "grey), adversarial, and the maps of the true class, each scaled to its maximum; below: "
        "predicted class and probability.",
        title="{{ record.overall[0].sample }}: images that fool a model",
        rows=_examples,
    ),
    glance=(
        Glance("overall", "robust", question="robustness", difference=_gap_at_one),
        Glance(
            "overall",
            "clean",
            difference=_clean_gap,
        ),
        Glance("overall", "lost", question="common corruptions"),
        Glance("overall", "relative_error"),
        Glance("overall", "failed", question="self-checks"),
    ),
    sections=(
        Section(
            "How much accuracy is left under attack?",
            _strongest_rows,
            opening="The table shows the strongest attack at each epsilon; a better attack may "
            "leave less accuracy. `tables/curves.csv` has the other attacks.",
            columns=("model", "title", "at_epsilon", "accuracy"),
            about=("robustness",),
            order=_by_norm,
            charts=(
                Chart(
                    "curves",
                    _draw_curves,
                    "Robust accuracy over epsilon; bands: confidence intervals. Epsilons of "
                    "different norms cannot be compared.",
                    title="Accuracy under attack, {{ first.accuracy.n }} "
                    "image{{ first.accuracy.n|s }}",
                    rows="curves",
                ),
            ),
        ),
        Section(
            "Do stronger attacks break the survivors?",
            "survivors",
            opening="More images survived than undefended models keep, so PGD with a margin loss "
            "and a short run of Square attacked them again.",
            columns=("model", "survivors", "before", "after", "margin", "square"),
            about=("robustness",),
        ),
        Section(
            "Which model is more robust?",
            "pairs",
            about=("difference under attack",),
            opening="A test says nothing if both models have lost all accuracy, or none.",
            charts=(
                Chart(
                    "pairs",
                    intervals("test", "difference", of="models", reference=0.0),
                    "Accuracy of the first model minus that of the second, paired by image, for "
                    "each attack and epsilon. Right of the dashed line the first keeps more.",
                    title="{{ rows|map(attribute='models')|unique|join(', ') }} under attack",
                ),
            ),
        ),
        replace(reason_claims.SECTION, opening=_why_robustness_differs),
        Section(
            "How large must a perturbation be?",
            _minimum_attacks,
            says="{{ title }} fools **{{ model }}** within {{ median|alone }} on half of the "
            "{{ right }} images that the model classifies correctly.",
            otherwise="More than half of the images that **{{ row.model }}** classifies correctly "
            "withstand every perturbation that {{ row.title }} tried.",
            columns=("model", "title", "source", "steps", "broken", "median"),
        ),
        Section(
            "Do adversarial images of one model fool the other?",
            lambda record: rows_on_sample(record)["transfer"],
            says="Of the images that fool **{{ made_for }}**, {{ rate }} also fool "
            "**{{ shown_to }}**.",
            charts=(
                Chart(
                    "transfer",
                    matrix("made_for", "shown_to", "rate", below=lambda row: f"of {row.rate.n}"),
                    "Share of the images that fool the model of the row and also that of the "
                    "column. Only images that the latter classifies correctly when clean count.",
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
                    "Accuracy over severity. All models get the same pixels. Severities of "
                    "different kinds cannot be compared.",
                    title="Accuracy under common corruptions, {{ first.accuracy.n }} "
                    "image{{ first.accuracy.n|s }}",
                ),
            ),
        ),
        Section(
            "What changes inside the models?",
            lambda record: rows_on_sample(record)["blocks"],
            opening=_halfway,
            charts=(
                Chart(
                    "paths",
                    lines("block", "distance", of="kind", panel="model", log=True),
                    "One minus the cosine between a block's outputs for a clean image "
                    "and its counterpart. The gap between attack and noise of the same "
                    "strength is the effect of the attack itself.",
                    title="Change of the outputs of blocks, {{ first.distance.n }} images",
                ),
            ),
        ),
        Section(
            "Are the attacks sound?",
            _suspicious_checks,
            opening="A faulty attack makes a model look robust: these checks did not show that the "
            "attacks are sound.",
            without="Every self-check came out as expected, on images that were fooled.",
            order=lambda row: ORDER.index(row.state),
            about=("self-checks",),
            columns=("model", "name", "attack", "expected", "found", "state"),
        ),
    ),
)
