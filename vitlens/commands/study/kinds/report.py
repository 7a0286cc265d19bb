"""The report of `vitlens study --kind`: which point to take, what differs, and what its kind shows beside."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import numpy as np

from vitlens.charts import Picture, board, images, intervals, lines
from vitlens.charts.pictures import cut, mosaic
from vitlens.commands.shared.choose import Candidate, Choice, choose, claims_of, missed, others
from vitlens.commands.shared.receptive import field_charts
from vitlens.commands.study.kinds.kinds import KINDS
from vitlens.commands.study.record import ComparisonRow, PointRow, StudyRecord
from vitlens.record import by, col
from vitlens.report.claims import SMALLEST, Claim
from vitlens.report.numbers import in_time, in_words, number
from vitlens.report.prose import listed, say
from vitlens.report.sections import Chart, Overview, Report, Section
from vitlens.uncertainty import LEVEL, Estimate, Side, apart, beyond

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CAUGHT_UP: Final = 5.0  # points: training from scratch that is at most so much below has caught up


def decision(record: StudyRecord) -> Choice:
    """The choice among the points of a study."""
    gaps = {row.label: row for row in of_family(record, "best")}
    found = [Candidate(row.words, row.accuracy, row.costs) for row in record.points if row.candidate]
    for at, row in enumerate([row for row in record.points if row.candidate]):
        if gap := gaps.get(row.label):
            found[at] = replace(found[at], gap=gap.difference, p=gap.p_holm, detectable=gap.detectable)
    return choose(found)


def of_family(record: StudyRecord, *families: str) -> list[ComparisonRow]:
    """The comparisons of these families."""
    return [row for row in record.comparisons if row.family in families]


def doubt(record: StudyRecord, choice: Choice) -> tuple[str, str]:
    """Why no comparison of the points decides anything, as a title and a sentence; empty where one may."""
    if record.design[0].seeds < 2:
        return (
            "One seed decides nothing",
            "One seed decides nothing: how much trainings differ by chance is not known; add seeds (`--seeds`).",
        )
    if beyond(choice.best.value, record.points[0].chance) is not Side.ABOVE:
        return "No point is shown to be above guessing", say(
            "The highest accuracy, {{ value }} of **{{ name }}**, is not shown to be above guessing "
            "({{ chance|percent }}): nothing was learned that could be compared; add epochs (`--epochs`) or images.",
            value=choice.best.value, name=choice.best.name, chance=record.points[0].chance,
        )  # fmt: skip
    return "", ""


def claims(record: StudyRecord) -> Iterator[Claim]:
    """The choice and its range, whether transfer wins, and every difference that is significant."""
    choice = decision(record)
    unsure = doubt(record, choice)
    subject, within = record.design[0].kind, _range(record)
    yield from claims_of(choice, subject, what="top-1 accuracy", doubt=unsure, within=within, place="points")
    if any(unsure):
        return
    if record.design[0].model:
        yield _transfer(record)
    steps, found = of_family(record, "step"), of_family(record, "difference")
    if steps:  # the largest difference in all, beside the steps that lead to it
        among = {(row.label, row.against) for row in steps}
        found = [row for row in found if (row.label, row.against) not in among]
        found = [*steps, *sorted(found, key=lambda row: -abs(row.difference.value))[:1]]
    for row in found:
        if row.winner and abs(row.difference.value) >= SMALLEST:
            yield Claim(
                "difference", f"{row.words} and {row.against_words}",
                say("**{{ words }}** minus **{{ against_words }}**: {{ difference }} of accuracy.", **vars(row)),
                effect=row.difference, p=row.p_holm, place="points", kind="comparison",
            )  # fmt: skip


def _range(record: StudyRecord) -> str:
    """Where the decision holds: that of the trainings behind it."""
    design, points = record.design[0], [row for row in record.points if row.candidate]

    def ends(values: Sequence[int]) -> str:
        return " to ".join(dict.fromkeys(f"{value:,}" for value in (min(values), max(values))))

    return say(
        "This holds for {{ images }} training images of {{ side }} px in {{ design.classes }} classes, {{ epochs }} "
        "epoch{{ design.epochs|s }}, {{ design.seeds }} seed{{ design.seeds|s }} and {% if design.model %}"
        "{{ design.model }}{% else %}models of {{ parameters }} parameters{% endif %}.",
        design=design, images=ends([row.train_images for row in points]), side="×".join(map(str, design.image_size)),
        epochs=ends([row.epochs for row in points]), parameters=ends([row.parameters for row in points]),
    )  # fmt: skip


def _pair(record: StudyRecord, label: str, against: str) -> ComparisonRow:
    return next(
        row for row in record.comparisons if (row.label, row.against) == (label, against) and row.family != "best"
    )


def _side(row: ComparisonRow) -> Side:
    """On which side of 0 a difference lies: significantly, or by its interval where there is no test."""
    if row.p_holm is None or row.p_holm <= LEVEL:
        return beyond(row.difference, 0.0)
    return Side.UNDECIDED


def _transfer(record: StudyRecord) -> Claim:
    """Transfer wins where a point from pretrained weights is significantly better than training from scratch, and loses
    where all are significantly worse."""
    sides = [_side(_pair(record, label, "scratch")) for label in ("full", "last-blocks", "frozen")]
    outcome = "wins" if Side.ABOVE in sides else "loses" if set(sides) == {Side.BELOW} else ""
    gap = _pair(record, "full", "scratch")
    says = say(
        "{% if outcome %}Transfer {{ outcome }}{% else %}It is not decided whether transfer wins{% endif %}: full "
        "training minus training from scratch is {{ gap }}.",
        outcome=outcome, gap=gap.difference,
    )  # fmt: skip
    return Claim(
        "transfer", str(record.design[0].model), says, state="" if outcome else "inconclusive", effect=gap.difference,
        p=gap.p_holm, kind="answer",
    )  # fmt: skip


def unknown(record: StudyRecord) -> Iterator[str]:
    """What could overturn the decision, and what was not tried."""
    design, choice = record.design[0], decision(record)
    yield f"Not tried: {KINDS[design.kind].untried}."
    if design.seeds < 2:
        yield "Intervals and tests cover the choice of test images alone, not that of the seed; add `--seeds`."
    yield from filter(None, [missed(choice)])
    yield say(
        "The trainings are short, {{ epochs }} epoch{{ epochs|s }}: with more, larger models and those that begin from "
        "random weights may gain most (`--epochs`).",
        epochs=design.epochs,
    )  # fmt: skip
    if design.model:
        yield "The model may have seen images of these classes in its own training."
    yield say(
        "Learning rates were not searched ({{ rates|join(', ') }}): another may suit a point better.",
        rates=list(dict.fromkeys(number(row.learning_rate) for row in record.recipes)),
    )


def _draw_points(record: StudyRecord, title: str) -> "Figure":
    """Accuracy over the number of training images where points differ in it, else a line a point."""
    along = [row for row in record.points if row.line in _lines(record)]
    if along:
        return lines("train_images", "accuracy", of="line", reference="chance")(along, title)
    return intervals("words", "accuracy", reference=100 * record.points[0].chance)(record.points, title)


def _lines(record: StudyRecord) -> set[str]:
    """The lines of the chart over the number of images: those of several points."""
    return {line for line, own in by(record.points, "line").items() if line and len(own) > 1}


def _highest(record: StudyRecord) -> list[PointRow]:
    return sorted((row for row in record.points if row.candidate), key=lambda row: -row.accuracy.value)


def _against_best(record: StudyRecord) -> list[ComparisonRow]:
    return sorted(of_family(record, "best"), key=lambda row: -row.difference.value)


def _changes(record: StudyRecord) -> list[ComparisonRow]:
    """Each point and the one that it changes, or the first; nothing where the other sections show these pairs."""
    rows = of_family(record, "step") or [row for row in of_family(record, "difference") if row.images is None]
    return [] if record.design[0].model or len(rows) < 2 else rows


def _by_images(record: StudyRecord) -> list[ComparisonRow]:
    """Two lines of the chart at one number of images, against the first line."""
    of = {row.label: row.line for row in record.points}
    rows = [row for row in of_family(record, "difference", "share") if row.images and of[row.label] in _lines(record)]
    return sorted(
        (row for row in rows if of[row.against] == record.points[0].line), key=lambda row: (of[row.label], row.images)
    )


def caught_up(rows: Sequence[ComparisonRow]) -> ComparisonRow | None:
    """The fewest images from which on the second of a pair is at most CAUGHT_UP points behind, by the interval;
    None: not reached. rows: of one pair of lines, from the fewest images."""
    found = None
    for row in reversed(rows):
        if row.difference.high is None or row.difference.high > CAUGHT_UP:
            break
        found = row
    return found


def _over_images(record: StudyRecord) -> str:
    """How many of the numbers of images each line wins; of an adapted model, where training from scratch catches up."""
    rows = _by_images(record)
    if not record.design[0].model:
        return say(
            "At {{ won }} of {{ rows|length }} numbers of images one is significantly better; others are undecided.",
            won=sum(row.winner is not None for row in rows), rows=rows,
        )  # fmt: skip
    own = [row for row in rows if row.label.split("-")[0] == "full"]
    if found := caught_up(own):
        return say("Training from scratch catches up with full training at {{ images }} images.", images=found.images)
    return say(
        "{% if behind %}Training from scratch does not catch up{% else %}It is not decided where training from scratch "
        "catches up{% endif %} with full training: on all {{ last.images }} images it is {{ last.difference }} behind.",
        last=own[-1], behind=beyond(own[-1].difference, 0.0) is Side.ABOVE,
    )  # fmt: skip


@dataclass(frozen=True)
class ReasonRow:
    """A possible reason for the outcome of a transfer, and the number that must be above 0."""

    reason: str = col("reason, and the number that must be above zero", unit="text")
    difference: Estimate = col("points", unit="points")
    state: str = col("the numbers say")


_STATES: Final = {Side.ABOVE: "supported", Side.BELOW: "contradicted", Side.UNDECIDED: "not decided"}
_REASONS: Final = (
    ("pretrained features separate these classes better than random ones (linear probe)", "pretrained", "random"),
    ("the unchanged features alone are enough to win (frozen minus from scratch)", "frozen", "scratch"),
    ("adapting the features adds to it (full minus frozen)", "full", "frozen"),
    ("a teacher's outputs help without its weights (distilled minus from scratch)", "distilled", "scratch"),
)


def reasons(record: StudyRecord) -> list[ReasonRow]:
    """Every reason that was measured: supported where its number is above 0, contradicted where it is below."""
    if not record.design[0].model:
        return []
    found = [
        ReasonRow(reason, row.difference, _STATES[_side(row)])
        for reason, label, against in _REASONS
        if (row := _pair(record, label, against))
    ]
    full = [row for row in _by_images(record) if row.label.split("-")[0] == "full"]
    if len(full) > 1:  # by intervals that do not overlap
        fewest, most = full[0], full[-1]
        change = Estimate(fewest.difference.value - most.difference.value, unit="points")
        reason = f"the advantage is one of few images (on {fewest.images} minus on {most.images})"
        found.append(ReasonRow(reason, change, _STATES[apart(fewest.difference, most.difference)]))
    return found


def _cuts(record: StudyRecord) -> Iterator[Picture]:
    """The first test image cut by white lines into the patches of each point."""
    if record.cut is None:
        return
    image = record.cut.image[0].astype(np.float32) / 255
    for row in record.points:
        if row.patch is not None:
            yield Picture(
                cut(image, row.patch), column=row.words,
                below=f"{row.tokens} tokens\n{number(row.flops / 1e6)} MFLOPs\n{in_words(row.accuracy, with_n=False)}\n"
                f"training {in_time(row.seconds)}",
            )  # fmt: skip


def _ordered(record: StudyRecord) -> str:
    """What the rank correlations say, by their intervals."""
    parts = []
    for row in record.position_order:
        if row.all is not None:
            order = "no order by distance" if row.all.low is not None else ""
            if beyond(row.all, 0.0) is not Side.UNDECIDED:
                order = f"nearer patches are {'more' if row.all.value > 0 else 'less'} similar"
            fixed = "fixed" if row.before is not None and abs(row.before - row.all.value) < 1e-9 else order
            parts.append(say(
                "**{{ words }}** {{ all|alone }}{% if order %}, {{ order }}{% endif %}",
                words=row.words, all=row.all, order=fixed,
            ))  # fmt: skip
    return say(
        "Rank correlation of similarity and nearness, over all pairs of patches: {{ parts }}.", parts=listed(parts)
    )


def _similarities(record: StudyRecord) -> Iterator[Picture]:
    """The similarities of the position embeddings of each point."""
    if record.position_similarity is not None:
        for at, each in record.position_similarity.similarity.items():
            row = record.points[at]
            if row.grid:
                yield Picture(None, mosaic(each, row.grid), column=row.words)


def _before_and_after(record: StudyRecord) -> Iterator[Picture]:
    """An image of each class with the attention of the last layer, and the rollout, before and after full training."""
    arrays = record.map_arrays
    for at, row in enumerate(record.maps if arrays else ()):
        assert arrays is not None
        image = arrays.images[at].astype(np.float32) / 255
        yield Picture(image, row=row.name, column="image")
        yield Picture(image, arrays.before[at], row.name, "attention before", row.before)
        yield Picture(image, arrays.after[at], row.name, "attention after", row.after)
        if arrays.rollout_before is not None and arrays.rollout_after is not None:
            yield Picture(image, arrays.rollout_before[at], row.name, "rollout before")
            yield Picture(image, arrays.rollout_after[at], row.name, "rollout after")


def _attended(record: StudyRecord) -> str:
    """How far full training moved the attention, against other seeds, and what changed in it."""
    full = record.moved[-1]
    shifts = []
    for name, rows in by(record.head_shifts, "statistic").items():
        changed = [row for row in rows if row.p_holm <= LEVEL]
        up = sum(row.change.value > 0 for row in changed)
        shifts.append(say(
            "{{ name|replace('_', ' ') }} in {{ changed|length }} of {{ rows|length }} heads ({{ up }} upwards)",
            name=name, changed=changed, rows=rows, up=up,
        ))  # fmt: skip
    return say(
        "Full training moved {{ row.moved }} of the attention, most in {{ top.name }} ({{ top.moved|value }})"
        "{% if row.between is not none %}; two full trainings that differ in their seed are {{ row.between|percent }} "
        "apart, and {{ row.beyond }} of {{ row.heads }} heads moved more than that{% endif %}.{% if shifts %} It "
        "significantly changed the {{ shifts }}.{% endif %}",
        row=full, shifts=listed(shifts) if shifts else "",
        top=max((row for row in record.heads_moved if row.label == full.label), key=lambda row: row.moved.value),
    )  # fmt: skip


def _featured(record: StudyRecord) -> str:
    """How similar the layers are to themselves before, and what a linear probe on the last one gained."""
    full = [row for row in record.layer_similarity if row.label == "full"]
    gains = of_family(record, "probe_gain")
    return say(
        "{% if least %}After full training layer {{ least.layer }} is the least similar to itself before, CKA {{ "
        "least.cka }}. {% endif %}Accuracy of a linear probe on the last layer: pretrained minus random weights "
        "{{ first.difference }}, after full training minus pretrained {{ second.difference }}.",
        least=min(full, key=lambda row: row.cka.value) if full else None, first=gains[0], second=gains[1],
    )  # fmt: skip


REPORT: Final = Report(
    StudyRecord,
    claims=claims,
    unknown=unknown,
    package=__package__,
    picture=Chart(
        "points", _draw_points,
        "Top-1 accuracy on the test images, mean over seeds, with 95 % intervals over seeds and images; dashed: "
        "guessing. The tables test the differences.",
        title="Top-1 accuracy of each point, {{ record.design[0].seeds }} seed{{ record.design[0].seeds|s }}",
        whole=True,
    ),
    glance=Overview(_highest, ("words", "accuracy", "train_images", "trained", "flops", "seconds")),
    sections=(
        Section(
            "Which one to take?", _against_best, opening=lambda record: others(decision(record)), about=("choice",),
            columns=("words", "difference", "p_holm"),
            charts=(Chart(
                "against_best", intervals("words", "difference", reference=0.0),
                "Accuracy of each point minus that of the best, on the same images, with 95 % intervals.",
                title="Accuracy minus that of {{ first.against_words }}",
            ),),
        ),
        Section(
            "Which points differ from their base?", _changes,
            opening="{{ rows|selectattr('winner')|list|length }} of {{ rows|length }} differences are significant; "
                    "the others are undecided.",
            columns=("words", "against_words", "difference", "p_holm"),
            charts=(Chart(
                "changes", intervals("words", "difference", reference=0.0),
                "Accuracy of each point minus that of the one that it is compared with, with 95 % intervals.",
                title="Accuracy of each point minus that of its base",
            ),),
        ),
        Section(
            "Does the number of images decide?", _by_images, opening=_over_images,
            columns=("images", "words", "against_words", "difference", "p_holm", "winner"),
        ),
        Section(
            "Why does transfer win, or not?", reasons, about=("transfer",),
            columns=("reason", "difference", "state"),
            opening="{{ rows|map(attribute='state')|select('equalto', 'supported')|list|length }} of {{ rows|length }} "
                    "possible reasons are supported by the numbers.",
        ),
        Section(
            "How fast does each point learn?", "reached", columns=("words", "epochs", "seconds"),
            opening="The epoch at which the mean accuracy over seeds first reached {{ first.accuracy|percent }}, near "
                    "the best of all.",
            charts=(Chart(
                "convergence", lines("epochs", "accuracy", of="words"),
                "Test accuracy after every epoch: dots are seeds, lines their means. Frozen features are computed "
                "once, so its epochs cost little.",
                title="Test accuracy by epoch", rows="curves",
            ),),
        ),
        Section(
            "How did the attention of each head change?", "moved", opening=_attended,
            columns=("words", "moved", "between", "beyond", "heads"),
            charts=(
                Chart(
                    "attention_moved", board("moved", "between"),
                    "Share of each head's attention that moved to other keys in full training, and between two "
                    "trainings with other seeds.",
                    title="Moved attention of every head", rows="heads_moved", only=lambda row: row.label == "full",
                ),
                Chart(
                    "maps_before_after", images(),
                    "Attention of the last layer and rollout, before and after full training (first seed), each map "
                    "scaled to its maximum; below: the prediction. The first image of each class.",
                    title="Maps before and after full training", rows=lambda record: list(_before_and_after(record)),
                ),
            ),
        ),
        Section(
            "What happened to the features?", "probes", opening=_featured,
            charts=(
                Chart(
                    "layer_similarity", lines("layer", "cka", of="words"),
                    "CKA of each layer with itself before training, mean over seeds; near the top the features are "
                    "kept.",
                    title="Similarity of the layers to those of the model", rows="layer_similarity",
                ),
                Chart(
                    "probes", lines("layer", "accuracy", of="words", reference="chance"),
                    "Test accuracy of a linear probe on each layer; dashed: guessing.",
                    title="Linear probes on the layers",
                ),
            ),
        ),
        Section(
            "What does each point make of an image?",
            lambda record: [row for row in record.points if row.patch] if record.cut else [],
            opening="Smaller patches make more tokens, whose number decides the cost.",
            columns=("words", "tokens", "flops", "training_bytes", "seconds"),
            charts=(Chart(
                "cuts", images(largest=1.6),
                "The first test image, cut into the patches of each point; below: tokens, operations, accuracy and "
                "time of a training.",
                title="One image as the patches of each point", rows=lambda record: list(_cuts(record)),
            ),),
        ),
        Section(
            "Do near patches have similar position embeddings?", "position_order", opening=_ordered,
            columns=("words", "all", "rows", "columns", "before"),
            charts=(Chart(
                "position_similarity", images(largest=2.2),
                "Cosine similarity of position embeddings: for each patch, at its place, its map of similarities with "
                "all others (first seed). Each panel has its own colours.",
                title="Similarity of position embeddings", rows=lambda record: list(_similarities(record)),
            ),),
        ),
        Section(
            "How far does a patch see?",
            lambda record: [rows[-1] for rows in by(record.receptive_fields, "model").values()],
            columns=("words", "title", "distance", "half", "seen"),
            opening="The table is of the last layer of each point; the figures are of all layers.",
            charts=field_charts(),
        ),
        Section(
            "How were the points trained?", "recipes",
            opening=lambda record: " ".join(KINDS[record.design[0].kind].notes),
            columns=("points", "optimiser", "learning_rate", "batch_size", "epochs", "augmentation"),
        ),
    ),
)  # fmt: skip
