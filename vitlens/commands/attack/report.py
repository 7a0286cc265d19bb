"""The report of `vitlens attack`: the accuracy under attacks and corruptions, and what changes inside the models."""

from collections.abc import Iterator
from typing import Any, Final

import numpy as np

from vitlens.charts import Picture, amplification, images, intervals, lines, matrix
from vitlens.commands.attack.claims import FEW, claims
from vitlens.commands.attack.record import AXES, JUDGED, AttackCurveRow, AttackRecord, strongest
from vitlens.figures.style import shortened
from vitlens.record import by
from vitlens.report.prose import listed, say
from vitlens.report.sections import Chart, Glance, Report, Section
from vitlens.uncertainty import Estimate

PICTURES: Final = 6  # of the first page, of all models together
_ORDER: Final = ("failed", "inconclusive")


def unknown(record: AttackRecord) -> Iterator[str]:
    """What could overturn this report, the most serious first."""
    open_ = [row for row in record.checks if row.state == "inconclusive"]
    if record.images < FEW:
        yield say("Only {{ n }} image{{ n|s }}: too few for any claim.", n=record.images)
    if open_:
        yield say(
            "{{ open|length }} of {{ rows|length }} self-checks could not have failed, as nothing was fooled in them: "
            "they are no evidence that the attacks are sound.",
            open=open_, rows=record.checks,
        )  # fmt: skip
    if record.overall and all(row.robust is None for row in record.overall):
        yield "No L∞ attack was run at `1/255`, where robustness is judged; add `--epsilon 0,1,2,4,8`."
    yield "Robust accuracies are upper bounds: a stronger attack (`--attack auto`) may lower them."
    if record.options.get("predicted"):
        yield (
            "The models' own predictions are the labels (`--predicted`): accuracy is the share of predictions that "
            "stay the same, right or wrong."
        )
    if record.options.get("downwards"):
        yield (
            "The largest epsilon was tried first (`--downwards`): smaller ones were not tried for an image that stayed "
            "correct, and count as survived."
        )
    few = [name for name, rows in _sampled(record).items() if getattr(record, name) and not rows]
    if few:
        yield say("Measured on too few images to be shown: {{ few }}; the numbers are in `tables/`.", few=listed(few))
    yield "One set of weights of each model was attacked: another training may be more or less robust."


def _sampled(record: AttackRecord) -> dict[str, list[Any]]:
    """The rows of the tables of images that fool a model, where there are enough of them."""
    transfer = [row for row in record.transfer if row.made_for != row.shown_to]
    return {
        "transfer": [row for row in transfer if _enough(row.rate)],
        "agreements": [row for row in record.agreements if _enough(row.spearman)],
        "blocks": [row for row in record.blocks if _enough(row.distance)],
        "shifts": [row for row in record.shifts if _enough(row.change)],
    }


def _enough(value: Estimate | None) -> bool:
    return value is not None and (value.n or 0) >= FEW


def _strongest_rows(record: AttackRecord) -> list[AttackCurveRow]:
    """The strongest attack at each epsilon of each norm, on each model, of equals the last."""
    falling = sorted(record.curves, key=lambda row: -row.accuracy.value)
    return list({(row.norm, row.epsilon, row.model): row for row in falling if row.epsilon > 0}.values())


def _halfway(record: AttackRecord) -> str:
    """From which block on the attack changes outputs half as much as another image does."""
    return say(
        "{% for row in rows %}From block {{ row.halfway|value }} on the attack changes the outputs of "
        "**{{ row.model }}** at least half as much as another image does. {% endfor %}",
        rows=[row for row in record.overall if _enough(row.halfway)],
    )


def _examples(record: AttackRecord) -> Iterator[Picture]:
    """Images that fool the models: clean, perturbation and adversarial, with maps of the true class."""
    for model, arrays in record.examples.items():
        times = amplification(arrays.change.astype(np.float32))
        for at in range(len(arrays.pixels))[: max(1, PICTURES // len(record.examples))]:
            row = f"{shortened(model, 10)} {arrays.image[at]}"
            clean, change = arrays.pixels[at].astype(np.float32) / 255, arrays.change[at].astype(np.float32)
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
    """The difference of two models at 1/255, where one attack is the strongest on both."""
    best = [strongest(rows, JUDGED) for rows in by(record.curves, "model").values()]
    names = {None if row is None else row.attack for row in best}
    return next((row.difference for row in record.pairs if {row.attack} == names and row.epsilon == JUDGED), None)


REPORT: Final = Report(
    AttackRecord,
    claims=claims,
    unknown=unknown,
    picture=Chart(
        "examples",
        images(),
        "Images that fool a model: clean, perturbation (amplified, around grey), adversarial, and the maps of the true "
        "class, each scaled to its maximum; below: predicted class and probability.",
        title="{{ record.sample[0].title }} at {{ record.sample[0].at }}: images that fool a model",
        rows=lambda record: list(_examples(record)),
    ),
    glance=(
        Glance("overall", "robust", question="robustness", difference=_gap_at_one),
        Glance(
            "overall", "clean",
            difference=lambda record: next((row.difference for row in record.pairs if row.attack == "clean"), None),
        ),
        Glance("overall", "lost", question="common corruptions"),
        Glance("overall", "relative_error"),
        Glance("overall", "failed", question="self-checks"),
    ),
    sections=(
        Section(
            "How much accuracy is left under attack?", _strongest_rows,
            opening="At each epsilon the strongest of the attacks counts; a better attack may leave less.",
            columns=("model", "title", "epsilon", "accuracy"), about=("robustness",),
            order=lambda row: (list(AXES).index(row.norm), row.epsilon),
            charts=(Chart(
                "curves", lines("epsilon", "accuracy", of="model", panel="panel"),
                "Robust accuracy over epsilon; bands: confidence intervals. It falls to nothing for undefended models. "
                "Epsilons of different norms cannot be compared.",
                title="Accuracy under attack, {{ first.accuracy.n }} image{{ first.accuracy.n|s }}", rows="curves",
            ),),
        ),
        Section(
            "Which model is more robust?", "pairs", about=("difference under attack",),
            opening="Tests in which both models have lost all accuracy, or none, say nothing.",
            charts=(Chart(
                "pairs", intervals("test", "difference", of="models", reference=0.0),
                "Accuracy of the first model minus the second's, paired by image, for each attack and epsilon. Right "
                "of the dashed line the first keeps more.",
                title="{{ rows|map(attribute='models')|unique|join(', ') }} under attack",
            ),),
        ),
        Section(
            "How large must a perturbation be?", lambda record: [row for row in record.attacks if row.right],
            says="Half of the {{ right }} images that **{{ model }}** has right are fooled by {{ title }} within "
            "{{ median|alone }}.",
            otherwise="More than half of the images that **{{ row.model }}** has right withstand all that "
            "{{ row.title }} tried.",
            only=lambda row: row.kind == "minimum",
            columns=("model", "title", "source", "steps", "broken", "median"),
        ),
        Section(
            "Do adversarial images of one model fool the other?", lambda record: _sampled(record)["transfer"],
            says="Of the images that fool **{{ made_for }}**, {{ rate }} also fool **{{ shown_to }}**.",
            charts=(Chart(
                "transfer", matrix("made_for", "shown_to", "rate", below=lambda row: f"of {row.rate.n}"),
                "Share of the images that fool the model of the row and also the model of the column, of those that it "
                "has right when clean.",
                title="Transfer of {{ record.sample[0].title }} at {{ record.sample[0].at }}",
            ),),
        ),
        Section(
            "How much do common corruptions cost?", lambda record: [row for row in record.overall if row.lost],
            says="**{{ model }}** makes {{ mean_error|alone }} errors under corruptions: {{ lost|alone }} more than on "
            "clean images.",
            about=("common corruptions",),
            charts=(Chart(
                "corruptions", lines("severity", "accuracy", of="model", panel="title"),
                "Accuracy over severity. All models get the same pixels. Severities of different kinds cannot be "
                "compared.",
                title="Accuracy under common corruptions, {{ first.accuracy.n }} image{{ first.accuracy.n|s }}",
                rows="corruptions",
            ),),
        ),
        Section(
            "What changes inside the models?", lambda record: _sampled(record)["blocks"], opening=_halfway,
            charts=(
                Chart(
                    "paths", lines("block", "distance", of="kind", panel="model", log=True),
                    "One minus the cosine between a block's outputs for a clean image and its counterpart. The gap "
                    "between attack and noise of the same strength is the attack's own effect.",
                    title="Change of the outputs of blocks, {{ first.distance.n }} images",
                ),
                Chart(
                    "maps", intervals("title", "spearman", of="model"),
                    "Rank correlation of the maps before and after the attack; one: unchanged. A changed map need not "
                    "be the cause of a changed prediction.",
                    title="Agreement of maps", rows=lambda record: _sampled(record)["agreements"],
                ),
                Chart(
                    "shifts", lines("layer", "change", of="model", panel="title", shared=False),
                    "Attention after minus before the attack, mean over heads and images. Opposite changes of heads "
                    "cancel.",
                    title="Change of attention under attack", rows=lambda record: _sampled(record)["shifts"],
                ),
            ),
        ),
        Section(
            "Are the attacks sound?", lambda record: [row for row in record.checks if row.state != "passed"],
            opening="A faulty attack makes a model look robust: these checks did not show that the attacks are sound.",
            without="Every self-check that was made came out as expected, on images that were fooled.",
            order=lambda row: _ORDER.index(row.state), about=("self-checks",),
            columns=("model", "name", "attack", "expected", "found", "state"),
        ),
    ),
)  # fmt: skip
