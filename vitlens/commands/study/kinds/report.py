"""The report of `vitlens study --kind`: which variant to take, what differs, and what only this kind shows."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from vitlens.charts import Picture, board, images, intervals, lines
from vitlens.charts.pictures import cut, mosaic
from vitlens.commands.shared.receptive import field_charts
from vitlens.commands.study.kinds import pretraining_report as pretraining
from vitlens.commands.study.kinds.choose import Candidate, Choice, choose, claim_of, missed, others
from vitlens.commands.study.kinds.kinds import KINDS
from vitlens.commands.study.record import ComparisonRow, PointRow, StudyRecord
from vitlens.record import by
from vitlens.report.claims import SMALLEST, Claim
from vitlens.report.numbers import in_time, in_words, number
from vitlens.report.prose import listed, say
from vitlens.report.sections import Chart, Overview, Report, Section
from vitlens.report.verdicts import Verdict
from vitlens.uncertainty import LEVEL, Estimate, Side, apart, beyond

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CAUGHT_UP: Final = 5.0  # points: training from scratch that is at most so much below has caught up


def decision(record: StudyRecord) -> Choice:
    """Return the choice among the points of a study.

    A pair that is a planned comparison, too, has the smaller p of the two: it is not called alike in one place and
    different in another.
    """
    found: dict[frozenset[str], float] = {}
    for row in of_family(record, "best", "step", "difference"):
        pair = frozenset((row.label, row.against))
        found[pair] = min(found.get(pair, 1.0), 1.0 if row.p_holm is None else row.p_holm)
    gaps = {
        row.label: (row.difference, found[frozenset((row.label, row.against))], row.detectable)
        for row in of_family(record, "best")
    }
    return choose(
        [
            Candidate(row.words, row.accuracy, row.costs, *gaps.get(row.label, ()))
            for row in record.points
            if row.candidate
        ]
    )


def of_family(record: StudyRecord, *families: str) -> list[ComparisonRow]:
    """Return the comparisons of these families."""
    return [row for row in record.comparisons if row.family in families]


def doubt(record: StudyRecord, choice: Choice) -> tuple[str, str]:
    """Return why no comparison of the points decides anything, as a title and a sentence; empty where one may."""
    if record.design[0].seeds < 2:
        return (
            "One seed decides nothing",
            "One seed decides nothing: it does not show how much trainings differ by chance; add seeds (`--seeds`).",
        )
    if beyond(choice.best.value, record.points[0].chance) is not Side.ABOVE:
        return "It is undecided whether any variant is better than guessing", say(
            "The highest accuracy, {{ value }} of **{{ name }}**, may be no better than guessing "
            "({{ chance|percent }}). There is nothing to compare; add epochs (`--epochs`) or images.",
            value=choice.best.value,
            name=choice.best.name,
            chance=record.points[0].chance,
        )
    return "", ""


def claims(record: StudyRecord) -> Iterator[Claim]:
    """Yield the choice and its range, whether transfer wins, and every other difference that is significant."""
    choice = decision(record)
    design = record.design[0]
    unsure = doubt(record, choice)
    if any(unsure):
        verdict = Verdict("inconclusive", unsure[1].rstrip("."))
        yield Claim("choice", design.kind, unsure[1], unsure[0], verdict, kind="answer", place="points")
    elif record.feature_scores:
        yield from pretraining.claims(record)
    else:
        yield claim_of(choice, design.kind)
    yield Claim("range", design.kind, _range(record), kind="answer")
    if any(unsure) or record.feature_scores:
        return
    steps = of_family(record, "step")
    found = of_family(record, "difference")
    if steps:  # the largest difference in all, beside the steps that lead to it
        among = {(row.label, row.against) for row in steps}
        found = [row for row in found if (row.label, row.against) not in among]
        found = [*steps, *sorted(found, key=lambda row: -abs(row.difference.value))[:1]]
    if design.model:
        yield _transfer(record)
        found.remove(_pair(record, "full", "scratch"))
    for row in found:
        if row.winner and abs(row.difference.value) >= SMALLEST:
            yield Claim(
                "difference",
                f"{row.words} and {row.against_words}",
                say("**{{ words }}** minus **{{ against_words }}** in accuracy: {{ difference|alone }}.", **vars(row)),
                effect=row.difference,
                p=row.p_holm,
                place="points",
                kind="comparison",
            )


def _range(record: StudyRecord) -> str:
    """Return where the decision holds: that of the trainings behind it."""
    design = record.design[0]
    points = [row for row in record.points if row.candidate]

    def ends(name: str) -> str:
        values = [value for row in points if (value := getattr(row, name))]  # 0 epochs: not trained
        return " to ".join(dict.fromkeys(f"{value:,}" for value in (min(values), max(values))))

    return say(
        "This was measured with {{ images }} training images of {{ side }} px in {{ design.classes }} classes, "
        "{{ epochs }} epoch{{ design.epochs|s }}, {{ design.seeds }} seed{{ design.seeds|s }} and "
        "{% if design.model %}{{ design.model }}{% else %}models of {{ parameters }} parameters{% endif %}.",
        design=design,
        images=ends("train_images"),
        side="×".join(map(str, design.image_size)),
        epochs=ends("epochs"),
        parameters=ends("parameters"),
    )


def _pair(record: StudyRecord, label: str, against: str) -> ComparisonRow:
    return next(
        row for row in record.comparisons if (row.label, row.against) == (label, against) and row.family != "best"
    )


def _side(row: ComparisonRow) -> Side:
    """On which side of 0 a difference lies: significantly, or by its interval where there is no test."""
    if row.p_holm is None or row.p_holm <= LEVEL:
        return beyond(row.difference, 0.0)
    return Side.UNDECIDED


_UNDECIDED: Final = (
    "no adapted model is significantly better than training from scratch, and not all are significantly worse"
)


def _transfer(record: StudyRecord) -> Claim:
    """Transfer wins where a point from pretrained weights is significantly better than training from scratch, and loses
    where all are significantly worse."""
    sides = [_side(_pair(record, label, "scratch")) for label in ("full", "last-blocks", "frozen")]
    outcome = "wins" if Side.ABOVE in sides else "loses" if set(sides) == {Side.BELOW} else ""
    gap = _pair(record, "full", "scratch")
    says = say(
        "{% if outcome %}Transfer {{ outcome }}{% else %}It is undecided whether transfer wins{% endif %}: full "
        "training minus training from scratch is {{ gap|alone }} in accuracy.",
        outcome=outcome,
        gap=gap.difference,
    )
    return Claim(
        "transfer",
        str(record.design[0].model),
        says,
        verdict=None if outcome else Verdict("inconclusive", _UNDECIDED),
        effect=gap.difference,
        p=gap.p_holm,
        kind="answer",
    )


def unknown(record: StudyRecord) -> Iterator[str]:
    """Yield what could overturn the decision, and what was not tried."""
    design = record.design[0]
    choice = decision(record)
    yield f"Not tried: {KINDS[design.kind].untried}."
    if design.seeds < 2:
        yield "Intervals and tests cover the choice of test images only, not the choice of the seed; add `--seeds`."
    elif choice.outcome != "inconclusive":  # which says so itself
        yield from filter(None, [missed(choice)])
    yield say(
        "Training is short ({{ epochs }} epoch{{ epochs|s }}): larger models and random weights may need longer "
        "training (`--epochs`).",
        epochs=design.epochs,
    )
    if design.model:
        yield "The model may have seen images of these classes during its pretraining."
    yield say(
        "Learning rates were not searched ({{ rates|join(', ') }}): another may suit some variants better.",
        rates=list(dict.fromkeys(number(row.learning_rate) for row in record.recipes)),
    )


def _draw_points(record: StudyRecord, title: str) -> "Figure":
    """Accuracy over the number of training images where points differ in it, else a line a point."""
    along = [row for row in record.points if row.line in _lines(record)]
    if along:
        return lines("train_images", "accuracy", of="line", reference="chance")(along, title)
    return intervals("words", "accuracy", reference=100 * record.points[0].chance)(record.points, title)


def _lines(record: StudyRecord) -> set[str]:
    """Return the lines of the chart over the number of images: those of several points."""
    return {line for line, own in by(record.points, "line").items() if line and len(own) > 1}


def _highest(record: StudyRecord) -> list[PointRow]:
    """Return the points that may be taken, without what is the same for all of them."""
    rows = sorted((row for row in record.points if row.candidate), key=lambda row: -row.accuracy.value)
    elsewhere = sum(row.seconds for row in rows) > record.seconds > 0  # trained by an earlier run, on its hardware
    same = [name for name in ("train_images", "trained", "flops") if len({getattr(row, name) for row in rows}) == 1]
    left_out: dict[str, Any] = dict.fromkeys([*same, *(["seconds"] if elsewhere else [])])
    return [replace(row, **left_out, accuracy=replace(row.accuracy, n=None)) for row in rows]


def _changes(record: StudyRecord) -> list[ComparisonRow]:
    """Return each point and the one that it changes, or the first; nothing where the other sections show these
    pairs."""
    rows = of_family(record, "step") or [row for row in of_family(record, "difference") if row.images is None]
    return [] if record.design[0].model or len(rows) < 2 else rows


def _by_images(record: StudyRecord) -> list[ComparisonRow]:
    """Return two lines of the chart at one number of images, against the first line."""
    of = {row.label: row.line for row in record.points}
    rows = [row for row in of_family(record, "difference", "share") if row.images and of[row.label] in _lines(record)]
    return sorted(
        (row for row in rows if of[row.against] == record.points[0].line), key=lambda row: (of[row.label], row.images)
    )


def caught_up(rows: Sequence[ComparisonRow]) -> ComparisonRow | None:
    """Return the fewest images from which on the second of a pair is at most CAUGHT_UP points behind, by the interval;
    None: not reached. rows: of one pair of lines, from the fewest images."""
    found = None
    for row in reversed(rows):
        if row.difference.high is None or row.difference.high > CAUGHT_UP:
            break
        found = row
    return found


def _over_images(record: StudyRecord) -> str:
    """Return how many of the numbers of images each line wins; of an adapted model, where training from scratch catches
    up."""
    rows = _by_images(record)
    full = [row for row in rows if row.label.split("-")[0] == "full"]
    last = (full or rows)[-1]
    return say(
        "{% if not full %}For {{ won }} of {{ rows|length }} training set sizes, one of the two is significantly better"
        "{% elif found %}Training from scratch catches up with full training at {{ found.images }} images"
        "{% else %}{% if behind %}Training from scratch does not catch up{% else %}It is undecided where training "
        "from scratch catches up{% endif %} with full training: on all {{ last.images }} images it is "
        "{{ last.difference|alone }} behind{% endif %}.",
        rows=rows,
        won=sum(row.winner is not None for row in rows),
        full=full,
        found=caught_up(full),
        last=last,
        behind=beyond(last.difference, 0.0) is Side.ABOVE,
    )


class Reason(NamedTuple):
    """A possible reason for the outcome of a transfer, supported where its number is above 0; number: what it is."""

    words: str
    number: str
    difference: Estimate
    state: str


_STATES: Final = {Side.ABOVE: "supported", Side.BELOW: "contradicted", Side.UNDECIDED: "not decided"}
_REASONS: Final = (
    ("pretrained features separate the classes better than random ones", "linear probe", "pretrained", "random"),
    ("unchanged features are enough", "frozen minus from scratch", "frozen", "scratch"),
    ("adapting them adds to it", "full minus frozen", "full", "frozen"),
    ("a teacher's outputs help", "distilled minus from scratch", "distilled", "scratch"),
)


def reasons(record: StudyRecord) -> list[Reason]:
    """Return every reason that was measured: supported where its number is above 0, contradicted where it is below."""
    if not record.design[0].model:
        return []
    pairs = [(words, what, _pair(record, label, against)) for words, what, label, against in _REASONS]
    found = [Reason(words, what, row.difference, _STATES[_side(row)]) for words, what, row in pairs]
    full = [row for row in _by_images(record) if row.label.split("-")[0] == "full"]
    if len(full) > 1:  # by intervals that do not overlap
        fewest = full[0]
        most = full[-1]
        change = Estimate(fewest.difference.value - most.difference.value, unit="points")
        what = f"full minus from scratch, on {fewest.images} images minus on {most.images}"
        found.append(Reason("images are few", what, change, _STATES[apart(fewest.difference, most.difference)]))
    return found


def _reasoned(record: StudyRecord) -> str:
    """Return the reasons by what the numbers say of them."""
    states = by(reasons(record), "state")
    return " ".join(
        say(
            "{{ state|capitalize }}: {% for each in own %}{{ each.words|whole }} ({{ each.number|whole }}: "
            "{{ each.difference|alone }}){% if not loop.last %}; {% endif %}{% endfor %}.",
            state=state,
            own=states[state],
        )
        for state in _STATES.values()
        if state in states
    )


def _cuts(record: StudyRecord) -> Iterator[Picture]:
    """Yield the first test image cut by white lines into the patches of each point."""
    for row in record.points:
        if record.cut is not None and row.patch is not None:
            image = record.cut.image[0].astype(np.float32) / 255
            yield Picture(
                cut(image, row.patch),
                column=row.words,
                below=f"{row.tokens} tokens\n{number(row.flops / 1e6)} MFLOPs\n{in_words(row.accuracy, with_n=False)}\n"
                f"training {in_time(row.seconds)}",
            )


def _ordered(record: StudyRecord) -> str:
    """Return what the rank correlations say, by their intervals."""
    parts = []
    for row in record.position_order:
        if row.all is not None:
            order = "no order by distance is seen" if row.all.low is not None else "one seed"
            if beyond(row.all, 0.0) is not Side.UNDECIDED:
                order = f"nearer patches are {'more' if row.all.value > 0 else 'less'} similar"
            fixed = row.before is not None and abs(row.before - row.all.value) < 1e-9
            parts.append(
                say(
                    "{{ row.all|alone }} for **{{ row.words }}** ({{ order }})",
                    row=row,
                    order="fixed" if fixed else order,
                )
            )
    return say(
        "The rank correlation between the similarity of two patches' embeddings and their nearness is {{ parts }}.",
        parts=listed(parts),
    )


def _similarities(record: StudyRecord) -> Iterator[Picture]:
    """Yield the similarities of the position embeddings of each point."""
    if record.position_similarity is not None:
        for at, each in record.position_similarity.similarity.items():
            row = record.points[at]
            if row.grid:
                yield Picture(None, mosaic(each, row.grid), column=row.words)


def _before_and_after(record: StudyRecord) -> Iterator[Picture]:
    """Yield an image of each class with the attention of the last layer, and the rollout, before and after full
    training."""
    arrays = record.map_arrays
    for at, row in enumerate(record.maps if arrays else ()):
        assert arrays is not None
        image = arrays.images[at].astype(np.float32) / 255
        yield Picture(image, row=row.name, column="image")
        for column, maps, below in (
            ("attention before", arrays.before, row.before),
            ("attention after", arrays.after, row.after),
            ("rollout before", arrays.rollout_before, ""),
            ("rollout after", arrays.rollout_after, ""),
        ):
            if maps is not None:
                yield Picture(image, maps[at], row.name, column, below)


def _learned(record: StudyRecord) -> str:
    """When each point came near the best of all."""
    done = [
        say("**{{ r.words }}** after {{ r.epochs }} epoch{{ r.epochs|s }} ({{ t }})", r=row, t=in_time(row.seconds))
        for row in record.reached
        if row.seconds is not None
    ]
    return say(
        "Mean accuracy over seeds first reached {{ wanted|percent(1) }}, 95 % of the highest, by "
        "{{ done }}{% if never %}; {{ never|names }} never reached it{% endif %}.",
        wanted=record.reached[0].accuracy,
        done=listed(done),
        never=[row.words for row in record.reached if row.seconds is None],
    )


def _attended(record: StudyRecord) -> str:
    """Return how far training moved the attention, against other seeds, and what changed in it."""
    last, full = record.moved
    shifts = []
    for name, rows in by(record.head_shifts, "statistic").items():
        changed = [row for row in rows if row.p_holm <= LEVEL]
        shifts.append(
            say(
                "{{ name|replace('_', ' ') }} in {{ changed|length }} of {{ rows|length }} heads ({{ up }} increased)",
                name=name,
                changed=changed,
                rows=rows,
                up=sum(row.change.value > 0 for row in changed),
            )
        )
    return say(
        "Full training moved {{ row.moved|alone }} of the attention, most in {{ top.name }} ({{ top.moved|value }}); "
        "training only the last blocks moved {{ last.moved|alone }}.{% if row.between is not none %} Two full "
        "trainings with different seeds differ by {{ row.between|percent }}; {{ row.beyond }} of {{ row.heads }} heads "
        "moved more than that.{% endif %}{% if shifts %} Full training significantly changed {{ shifts }}.{% endif %}",
        row=full,
        last=last,
        shifts=listed(shifts) if shifts else "",
        top=max((row for row in record.heads_moved if row.label == full.label), key=lambda row: row.moved.value),
    )


def _featured(record: StudyRecord) -> str:
    """Return how similar the layers are to themselves before, and what a linear probe on the last one gained."""
    full = [row for row in record.layer_similarity if row.label == "full"]
    return say(
        "{% if least %}Full training changed layer {{ least.layer }} most (CKA {{ least.cka|alone }} between before "
        "and after). {% endif %}It changed the accuracy of a linear probe on the last layer by "
        "{{ gain.difference|alone }}.",
        least=min(full, key=lambda row: row.cka.value, default=None),
        gain=_pair(record, "full", "pretrained"),
    )


def _design(record: StudyRecord) -> Iterator[tuple[str, str]]:
    """Yield what all trainings share, and their recipes."""
    for note in KINDS[record.design[0].kind].notes[1:]:
        yield "Design", note
    for row in record.recipes:
        yield (
            "Recipe",
            say(
                "{{ r.points }}: {{ r.optimiser }}, learning rate {{ r.learning_rate }}, batches of "
                "{{ r.batch_size }}, {{ r.epochs }} epoch{{ r.epochs|s }}, augmentation: {{ r.augmentation }}.",
                r=row,
            ),
        )


REPORT: Final = Report(
    StudyRecord,
    claims=claims,
    unknown=unknown,
    package=__package__,
    definitions=_design,
    picture=Chart(
        "points",
        _draw_points,
        "Top-1 accuracy on the test images, mean over seeds, with 95 % intervals over seeds and images; dashed: "
        "guessing.",
        title="Top-1 accuracy of each variant, {{ record.design[0].seeds }} seed{{ record.design[0].seeds|s }}",
        whole=True,
    ),
    glance=Overview(_highest, ("words", "accuracy", "train_images", "trained", "flops", "seconds")),
    sections=(
        *pretraining.SECTIONS,
        Section(
            "Which one should you take?",
            lambda record: of_family(record, "best"),
            order=lambda row: -row.difference.value,
            opening=lambda record: others(decision(record)),
            about=("choice",),
            columns=("words", "difference", "p_holm"),
        ),
        Section(
            "Which changes matter?",
            _changes,
            opening="{{ rows|selectattr('winner')|list|length }} of {{ rows|length }} differences "
            "{{ rows|selectattr('winner')|list|are }} significant.",
            columns=("words", "against_words", "difference", "p_holm"),
            charts=(
                Chart(
                    "changes",
                    intervals("words", "difference", reference=0.0),
                    "Accuracy of each variant minus that of the one it is compared with, with 95 % intervals.",
                    title="Accuracy of each variant minus that of its base",
                ),
            ),
        ),
        Section(
            "Does the number of images decide?",
            _by_images,
            opening=_over_images,
            charts=(
                Chart(
                    "by_images",
                    intervals("words", "difference", reference=0.0),
                    "What each variant gains, by its number of training images, with 95 % intervals.",
                    title="Accuracy minus that of {{ record.points[0].line }} on the same number of images",
                ),
            ),
        ),
        Section("Why does transfer win, or not?", reasons, about=("transfer",), opening=_reasoned),
        Section(
            "How fast does each variant learn?",
            "reached",
            opening=_learned,
            charts=(
                Chart(
                    "convergence",
                    lines("epochs", "accuracy", of="words"),
                    "Test accuracy after every epoch: dots are seeds, lines their means.",
                    title="Test accuracy by epoch",
                    rows="curves",
                ),
            ),
        ),
        Section(
            "How did the attention of each head change?",
            "moved",
            opening=_attended,
            charts=(
                Chart(
                    "attention_moved",
                    board("moved", "between"),
                    "Share of each head's attention that moved to other keys in full training, and between two seeds.",
                    title="Moved attention of every head",
                    rows="heads_moved",
                    only=lambda row: row.label == "full",
                ),
                Chart(
                    "maps_before_after",
                    images(),
                    "The first image of each class, with the attention of the last layer and the rollout before and "
                    "after full training; below: the prediction.",
                    title="Maps before and after full training",
                    rows=_before_and_after,
                ),
            ),
        ),
        Section(
            "What happened to the features?",
            "probes",
            opening=_featured,
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
        ),
        Section(
            "How does each variant cut an image?",
            lambda record: [row for row in record.points if row.patch] if record.cut else [],
            opening="Smaller patches make more tokens, and more tokens cost more.",
            columns=("words", "tokens", "flops", "training_bytes", "seconds"),
            charts=(
                Chart(
                    "cuts",
                    images(largest=1.6),
                    "The first test image, cut into the patches of each variant; below: tokens, operations, accuracy "
                    "and training time.",
                    title="One image as the patches of each variant",
                    rows=_cuts,
                ),
            ),
        ),
        Section(
            "Do near patches have similar position embeddings?",
            "position_order",
            opening=_ordered,
            columns=("words", "all", "rows", "columns", "before"),
            charts=(
                Chart(
                    "position_similarity",
                    images(largest=2.2),
                    "Cosine similarity of position embeddings: for each patch, at its place, its map of similarities "
                    "with all others (first seed). Each panel has its own colours.",
                    title="Similarity of position embeddings",
                    rows=_similarities,
                ),
            ),
        ),
        Section(
            "How far does a patch see?",
            lambda record: [rows[-1] for rows in by(record.receptive_fields, "model").values()],
            columns=("words", "title", "distance", "half", "seen"),
            opening="{% set far = rows|sort(attribute='distance.value') %}After the last layer, the pixels that change "
            "a patch lie {{ far[0].distance|alone }} (**{{ far[0].words }}**) to {{ far[-1].distance|alone }} "
            "(**{{ far[-1].words }}**) away on average.",
            charts=field_charts(),
        ),
        Section(
            "How were the variants trained?", "recipes", opening=lambda record: KINDS[record.design[0].kind].notes[0]
        ),
    ),
)
