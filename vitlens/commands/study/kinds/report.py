"""The parts of a report that all kinds of `vitlens study --kind` share: the choice, its range, the
comparisons.

`kind_report` makes the report of a kind from its own claims and sections and from these.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from vitlens.charts import intervals, lines
from vitlens.commands.study.kinds.catalogue import KINDS
from vitlens.commands.study.kinds.choose import (
    Candidate,
    Choice,
    choose,
    compared_with_best,
    undetectable,
)
from vitlens.commands.study.kinds.record import (
    AGREEMENTS,
    RISE,
    Agreement,
    ComparisonRow,
    DesignRow,
    FindingRow,
    KindRecord,
    VariantRow,
    negated,
)
from vitlens.record import by
from vitlens.report.claims import SMALLEST, Claim
from vitlens.report.numbers import number
from vitlens.report.prose import Marked, listed, say
from vitlens.report.sections import Chart, Overview, Report, Section
from vitlens.report.verdicts import Verdict
from vitlens.uncertainty import LEVEL, Estimate, Side, beyond

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# accuracies of two trainings of one variant that differ by this: one has hardly learned yet
_FAR_APART: Final = 0.2


def decision(record: KindRecord) -> Choice:
    """Return the choice among the variants of a study, without those of which a training failed.

    A pair that is a planned comparison, too, has the smaller p of the two: it is not called alike
    in one place and different in another.
    """
    p_values = _smallest_p(record)
    against_best = {row.label: row for row in of_family(record, "best")}
    candidates = []
    for row in record.candidates:
        candidate = Candidate(row.words, row.accuracy, row.costs)
        is_best = row.label not in against_best
        if is_best:  # `choose` needs it even if a training failed
            candidates.append(candidate)
        elif not row.failed:
            comparison = against_best[row.label]
            candidate = replace(
                candidate,
                gap=comparison.difference,
                p=p_values[_pair_of(comparison)],
                detectable=comparison.detectable,
            )
            candidates.append(candidate)
    return choose(candidates)


def _smallest_p(record: KindRecord) -> Mapping[frozenset[str], float]:
    """Return the smallest p of each pair of variants over the families that compare the pair."""
    smallest: dict[frozenset[str], float] = {}
    for row in of_family(record, "best", "step", "difference"):
        pair = _pair_of(row)
        p = 1.0 if row.p_holm is None else row.p_holm
        smallest[pair] = min(smallest.get(pair, 1.0), p)
    return smallest


def _pair_of(row: ComparisonRow) -> frozenset[str]:
    return frozenset((row.label, row.against))


def of_family(record: KindRecord, *families: str) -> list[ComparisonRow]:
    """Return the comparisons of these families."""
    return [row for row in record.comparisons if row.family in families]


def comparison_of(record: KindRecord, label: str, against: str) -> ComparisonRow:
    """Return the planned comparison of two variants."""
    for row in record.comparisons:
        if (row.label, row.against) == (label, against) and row.family != "best":
            return row
    raise LookupError(f"expected a comparison of {label} with {against}, found none")


def side_of(row: ComparisonRow) -> Side:
    """Return on which side of 0 a difference lies: significantly, or by its interval where there is
    no test.
    """
    if row.p_holm is None or row.p_holm <= LEVEL:
        return beyond(row.difference, 0.0)
    return Side.UNDECIDED


def undecidable(record: KindRecord) -> Claim | None:
    """Return the claim that no comparison of the variants decides anything; None where one may."""
    if record.design[0].seeds < 2:
        title = "One seed decides nothing"
        sentence = (
            f"{title}: it does not show how much trainings differ by chance; add seeds (`--seeds`)."
        )
        return _undecided_choice(record, title, sentence)
    best = decision(record).best
    chance = record.points[0].chance
    if beyond(best.value, chance) is Side.ABOVE:
        return None
    sentence = say(
        "The highest accuracy, {{ best.value }} of **{{ best.name }}**, may be no better than "
        "guessing ({{ chance|percent }}). There is nothing to compare; add epochs (`--epochs`) "
        "or images.",
        best=best,
        chance=chance,
    )
    return _undecided_choice(
        record, "It is undecided whether any variant is better than guessing", sentence
    )


def _undecided_choice(record: KindRecord, title: str, sentence: str) -> Claim:
    verdict = Verdict("inconclusive", sentence.rstrip("."))
    return Claim(
        "choice", record.design[0].kind, sentence, title, verdict, kind="answer", place="points"
    )


def range_claim(record: KindRecord) -> Claim:
    """Return where the decision holds: the images, variants and trainings that were measured."""
    design = record.design[0]
    sentence = say(
        "This was measured with {{ images }} training images of {{ side }} px in "
        "{{ design.classes }} classes, {{ epochs }} epoch{{ 's' if epochs|string != '1' }}, "
        "{{ design.seeds }} seed{{ design.seeds|s }} and "
        "{% if design.model %}{{ design.model }}{% else %}models of {{ parameters }} "
        "parameters{% endif %}.",
        design=design,
        images=_span(record.candidates, "train_images"),
        side="×".join(map(str, design.image_size)),
        epochs=_span(record.candidates, "epochs"),
        parameters=_span(record.candidates, "parameters"),
    )
    return Claim("range", design.kind, sentence, kind="answer")


def _span(rows: Sequence[VariantRow], name: str) -> str:
    """Return the lowest and the highest number of a column, in words."""
    numbers = [getattr(row, name) for row in rows]
    positive = list(filter(None, numbers))  # 0: a variant that is not trained
    lowest = f"{min(positive):,}"
    highest = f"{max(positive):,}"
    return lowest if lowest == highest else f"{lowest} to {highest}"


def in_accuracy(difference: Estimate) -> Marked:
    """Return a difference of accuracies in words: "3.1 points (1.0 to 5.2) more accurate"."""
    words = "more accurate"
    if difference.value < 0:
        words = "less accurate"
        difference = negated(difference)
    return Marked(say("{{ difference|alone }} {{ words }}", difference=difference, words=words))


_FINDINGS: Final[Mapping[Agreement, str]] = {
    "contradicts": "This contradicts {{ source }}, where {{ statement }}: "
    "**{{ row.words }}** is {{ more }} than **{{ row.against_words }}**. The study differs from "
    "the paper: {{ reason }}.",
    "agrees": "As in {{ source }}, {{ statement }}: "
    "{% if is_equal %}**{{ row.words }}** and **{{ row.against_words }}** do not differ "
    "measurably, {{ row.difference|alone }}"
    "{% else %}**{{ row.words }}** is {{ more }} than **{{ row.against_words }}**{% endif %}.",
    "undecided": "In {{ source }}, {{ statement }}. Here this is undecided: the accuracy "
    "of **{{ row.words }}** minus that of **{{ row.against_words }}** is "
    "{{ row.difference|alone }}.",
}


def literature_claims(record: KindRecord) -> Iterator[Claim]:
    """Yield each result of the literature next to that of the study.

    Contradictions come first, then large differences.
    """

    def rank(row: FindingRow) -> tuple[int, float]:
        return AGREEMENTS.index(row.agreement), -abs(row.difference.value)

    for row in sorted(record.findings, key=rank):
        yield Claim(
            "literature",
            f"{row.words} and {row.against_words}",
            _finding_in_words(row),
            effect=row.difference,
            p=row.p_holm,
            kind="answer",
            place="points",
            is_null=row.agreement == "undecided",
        )


def _finding_in_words(row: FindingRow) -> str:
    """Return a result of the literature, that of the study, and what may explain the difference."""
    return say(
        _FINDINGS[row.agreement],
        row=row,
        # sentences, which are not shortened as names are
        source=Marked(row.source),
        statement=Marked(row.statement),
        reason=Marked(row.reason),
        more=in_accuracy(row.difference),
        is_equal=row.expects == "equal",
    )


def failure_claims(record: KindRecord) -> Iterator[Claim]:
    """Yield how many trainings failed, where any did or the study is about it."""
    trained = [row for row in record.points if row.epochs]
    failed = sum(row.failed for row in trained)
    total = len(trained) * record.design[0].seeds
    if not failed and not KINDS[record.design[0].kind].about_failures:
        return
    title = say("{{ failed }} of {{ total }} trainings failed", failed=failed, total=total)
    counts = []
    for row in trained:
        if row.failed:
            counts.append(say("{{ row.failed }} of **{{ row.words }}**", row=row))
    yield Claim(
        "failed trainings",
        record.design[0].kind,
        say(
            "{{ title }}{% if counts %}: {{ counts }}{% endif %}.",
            title=title,
            counts=listed(counts),
        ),
        kind="answer",
        place="points",
    )


def beyond_literature(record: KindRecord, rows: Iterable[ComparisonRow]) -> Iterator[ComparisonRow]:
    """Yield the comparisons that no sentence on the literature reports."""
    reported = set()
    for finding in record.findings:
        if finding.agreement != "undecided":
            reported.add(_pair_in_words(finding))
    for row in rows:
        if _pair_in_words(row) not in reported:
            yield row


def _pair_in_words(row: ComparisonRow | FindingRow) -> frozenset[str]:
    return frozenset((row.words, row.against_words))


def difference_claims(rows: Iterable[ComparisonRow]) -> Iterator[Claim]:
    """Yield the significant differences that are large enough to matter."""
    for row in rows:
        if row.winner and abs(row.difference.value) >= SMALLEST:
            yield Claim(
                "difference",
                f"{row.words} and {row.against_words}",
                say(
                    "**{{ row.words }}** is {{ more }} than **{{ row.against_words }}**.",
                    row=row,
                    more=in_accuracy(row.difference),
                ),
                effect=row.difference,
                p=row.p_holm,
                place="points",
                kind="comparison",
            )


def unknown(record: KindRecord) -> Iterator[str]:
    """Yield what could overturn the decision, and what was not tried."""
    design = record.design[0]
    yield f"Not tried: {KINDS[design.kind].untried}."
    yield from _missed(record, design)
    if _reuses_trainings(record):
        yield (
            "Models were trained by an earlier run, perhaps on other hardware. The time of this "
            "report is that of its measures, and times of trainings are not compared."
        )
    yield _doubt_of_length(record, design)
    yield from _doubt_of_seeds(record)
    if design.model:
        yield "The model may have seen images of these classes during its pretraining."
    yield say(
        "Learning rates were not searched ({{ rates|join(', ') }}): another may suit some variants "
        "better.",
        rates=list(map(number, by(record.recipes, "learning_rate"))),
    )


def _doubt_of_length(record: KindRecord, design: DesignRow) -> str:
    """Return what a longer training might change."""
    rising = [row.words for row in record.levels if not row.levelled]
    if rising:
        return say(
            "The last quarter of the training still added more than {{ most }} point to "
            "{{ rising|names }}: more epochs may change their ranks (`--epochs`).",
            most=RISE,
            rising=rising,
        )
    if record.levels:
        return (
            "All variants levelled off, but the learning rate falls to 0 with every number of "
            "epochs: a longer training may still end higher (`--epochs`)."
        )
    return say(
        "Training is short ({{ epochs }} epoch{{ epochs|s }}): larger models and random weights "
        "may need longer training (`--epochs`).",
        epochs=design.epochs,
    )


def _doubt_of_seeds(record: KindRecord) -> Iterator[str]:
    """Yield the range of the trainings of each variant whose seeds ended far apart."""
    trials = by(record.trials, "label")
    for point in record.points:
        accuracies = [trial.accuracy for trial in trials.get(point.label, ())]
        if accuracies and max(accuracies) - min(accuracies) > _FAR_APART:
            yield say(
                "The {{ n }} trainings of **{{ words }}** ended at {{ low|percent }} to "
                "{{ high|percent }}: their mean depends on the seeds.",
                n=len(accuracies),
                words=point.words,
                low=min(accuracies),
                high=max(accuracies),
            )


def _missed(record: KindRecord, design: DesignRow) -> Iterator[str]:
    """Yield what the comparisons could not have shown: differences by chance, or small ones."""
    if design.seeds < 2:
        yield (
            "Intervals and tests cover the choice of test images only, not the choice of the "
            "seed; add `--seeds`."
        )
        return
    choice = decision(record)
    if choice.outcome != "inconclusive":  # else the choice says so itself
        sentence = undetectable(choice)
        if sentence:
            yield sentence


def draw_accuracies(record: KindRecord, title: str) -> "Figure":
    """Draw accuracy over the number of training images where variants differ in it, else a row for
    each variant.
    """
    drawn_lines = _lines_of_several(record)
    along_lines = [row for row in record.points if row.line in drawn_lines]
    if along_lines:
        draw = lines("train_images", "accuracy", of="line", reference="chance")
        return draw(along_lines, title)
    draw = intervals("words", "accuracy", reference=100 * record.points[0].chance)
    return draw(record.points, title)


def _lines_of_several(record: KindRecord) -> set[str]:
    """Return the lines of the chart over the number of images that have several variants."""
    return {line for line, rows in by(record.points, "line").items() if line and len(rows) > 1}


def pairs_by_images(record: KindRecord) -> list[ComparisonRow]:
    """Return the differences from the first line of the chart at one number of images and steps.

    They begin with the fewest images.
    """
    line_of = {row.label: row.line for row in record.points}
    steps_of = {row.label: row.steps for row in record.points}
    drawn_lines = _lines_of_several(record)
    first_line = record.points[0].line
    pairs = []
    for row in of_family(record, "difference", "share"):
        has_equal_steps = steps_of[row.label] == steps_of[row.against]
        is_of_lines = line_of[row.label] in drawn_lines and line_of[row.against] == first_line
        if row.is_on_two_lines and has_equal_steps and is_of_lines:
            pairs.append(row)
    return sorted(pairs, key=lambda row: (line_of[row.label], row.images))


def _highest(record: KindRecord) -> list[VariantRow]:
    """Return the candidates, the highest accuracy first.

    Columns that are the same for all of them are None, and thus left out of the table.
    """
    candidates = sorted(record.candidates, key=lambda row: -row.accuracy.value)
    hidden: dict[str, Any] = {}
    for name in ("train_images", "trained", "flops", "failed"):
        if len({getattr(row, name) for row in candidates}) == 1:
            hidden[name] = None
    if _reuses_trainings(record):
        hidden["seconds"] = None
    rows = []
    for row in candidates:
        accuracy = replace(row.accuracy, n=None)  # all have the same test images
        rows.append(replace(row, accuracy=accuracy, **hidden))
    return rows


def _reuses_trainings(record: KindRecord) -> bool:
    """Return True if some models were trained by an earlier run, perhaps on other hardware.

    The trainings then took longer than the run that wrote the record.
    """
    training_seconds = sum(row.seconds for row in record.trials)
    return training_seconds > record.seconds > 0


def _changes(record: KindRecord) -> Sequence[ComparisonRow]:
    """Return each variant against the one that it changes, or else against the first.

    Pairs on one number of images have a section of their own. A single pair needs no section.
    """
    rows = of_family(record, "step")
    if not rows:
        rows = [row for row in of_family(record, "difference") if not row.is_on_two_lines]
    return rows if len(rows) > 1 else ()


def _levelled_off(record: KindRecord) -> str:
    """Return how many trainings had levelled off."""
    return say(
        "{{ levelled|length }} of {{ rows|length }} variants gained at most {{ most }} point of "
        "validation accuracy in the last quarter of the training.",
        levelled=[row for row in record.levels if row.levelled],
        rows=record.levels,
        most=RISE,
    )


def _drawn_changes(record: KindRecord) -> list[ComparisonRow]:
    """Return the changes with names that differ, as each is a row of the chart.

    A variant that is compared with several bases has its name for the first, and the base in its
    name for the others.
    """
    used_names = set()
    rows = []
    for row in _changes(record):
        name = row.words
        if name in used_names:
            name = f"{row.words} − {row.against_words}"
        used_names.add(row.words)
        rows.append(replace(row, words=name))
    return rows


def _definitions(record: KindRecord) -> Iterator[tuple[str, str]]:
    """Yield what all trainings share, and their recipes."""
    # the first note opens the section on the recipes
    for note in KINDS[record.design[0].kind].notes[1:]:
        yield "Design", note
    for row in record.recipes:
        yield (
            "Recipe",
            say(
                "{{ row.points }}: {{ row.optimiser }}, learning rate {{ row.learning_rate }}, "
                "batches of {{ row.batch_size }}, {{ row.epochs }} epoch{{ row.epochs|s }}, "
                "augmentation: {{ row.augmentation }}.",
                row=row,
            ),
        )


CHOICE: Final = Section(
    "Which one should you take?",
    lambda record: of_family(record, "best"),
    order=lambda row: -row.difference.value,
    opening=lambda record: compared_with_best(decision(record)),
    about=("choice",),
    columns=("words", "difference", "p_holm"),
)
CHANGES: Final = Section(
    "Which changes matter?",
    _changes,
    opening="{{ rows|selectattr('winner')|list|length }} of {{ rows|length }} differences "
    "{{ rows|selectattr('winner')|list|are }} significant.",
    columns=("words", "against_words", "difference", "p_holm"),
    charts=(
        Chart(
            "changes",
            intervals("words", "difference", reference=0.0),
            "Accuracy of each variant minus that of the one it is compared with, with 95 % "
            "intervals.",
            title="Accuracy of each variant minus that of its base",
            rows=_drawn_changes,
        ),
    ),
)
_LITERATURE: Final = Section(
    "Does it agree with the literature?",
    "findings",
    opening="{{ rows|selectattr('agreement', 'eq', 'agrees')|list|length }} of {{ rows|length }} "
    "results are repeated, {{ rows|selectattr('agreement', 'eq', 'contradicts')|list|length }} "
    "contradicted; the others are undecided here.",
    columns=("source", "words", "against_words", "difference", "p_holm", "agreement"),
)
_LEVELS: Final = Section(
    "Had the trainings levelled off?",
    "levels",
    opening=_levelled_off,
    columns=("words", "accuracy", "rise", "levelled"),
    charts=(
        Chart(
            "curves",
            lines("epoch", "accuracy", of="words", band=False),
            "Accuracy on images held out of the training part, mean over seeds. Tests used other "
            "images.",
            title="Validation accuracy during training",
            rows="validation",
        ),
    ),
)
_RECIPES: Final = Section(
    "How were the variants trained?",
    "recipes",
    opening=lambda record: KINDS[record.design[0].kind].notes[0],
)


def by_images_section(opening: Callable[[Any], str]) -> Section:
    """Return the section on the number of training images.

    opening: returns its first sentence from the record.
    """
    return Section(
        "Does the number of images decide?",
        pairs_by_images,
        opening=opening,
        charts=(
            Chart(
                "by_images",
                intervals("words", "difference", reference=0.0),
                "Accuracy that each variant gains, by its number of training images, with 95 % "
                "intervals.",
                title="Accuracy minus that of {{ record.points[0].line }} on the same number of "
                "images",
            ),
        ),
    )


def kind_report(
    record: type[KindRecord],
    claims: Callable[[Any], Iterator[Claim]],
    sections: tuple[Section, ...],
) -> Report:
    """Return the report of a kind, with the first page and the last sections that all kinds share.

    claims: yields the claims of the kind from its record.
    sections: the sections of the kind.
    """
    return Report(
        record,
        claims=claims,
        unknown=unknown,
        package=__package__,
        definitions=_definitions,
        picture=Chart(
            "points",
            draw_accuracies,
            "Top-1 accuracy on the test images, mean over seeds, with 95 % intervals over seeds "
            "and images; dashed: guessing.",
            title="Top-1 accuracy of each variant, {{ record.design[0].seeds }} "
            "seed{{ record.design[0].seeds|s }}",
            whole=True,
        ),
        glance=Overview(
            _highest,
            ("words", "accuracy", "failed", "train_images", "trained", "flops", "seconds"),
        ),
        sections=(*sections, _LITERATURE, _LEVELS, _RECIPES),
    )


# the report of a study that was stopped before its comparisons: without claims
STOPPED: Final = Report(KindRecord, (), package=__package__)
