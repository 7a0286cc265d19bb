"""The report of `vitlens report --compare`: whether the later model can be released, and what changed beyond chance."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any, Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from vitlens.commands.evaluate.record import EvaluateRecord, PredictionArrays
from vitlens.commands.registry import COMMANDS
from vitlens.commands.run.chapters import Chaptered
from vitlens.commands.run.publish import foreign_contents
from vitlens.errors import InputError
from vitlens.names import fingerprinted
from vitlens.record import Better, ImageValues, MetricName, Record, col, table
from vitlens.report.claims import SMALLEST, Claim, Kind, found
from vitlens.report.document import State
from vitlens.report.numbers import in_words
from vitlens.report.prose import say
from vitlens.report.sections import Overview, Report, Section
from vitlens.report.verdicts import Verdict
from vitlens.uncertainty import (
    LEVEL,
    Estimate,
    accuracy_difference,
    difference_of,
    holm,
    in_points,
    paired_test,
    student_mean,
    student_test,
)

_DIGITS: Final = 12  # of a fingerprint that is shown
_IGNORED: Final = frozenset({"run", "out", "overwrite", "quiet"})  # options that change no number
ACCURACY: Final = "accuracy"  # the first word of the metric
_FAMILIES: Final = ("accuracy", "judged", "described")  # of tests, what was asked for first
SameImages: TypeAlias = Literal["the same", "others", "not known", ""]


@dataclass(frozen=True)
class MetricChange:
    """One metric before and after; words: what it measures; difference: after minus before. p_holm: corrected for the
    metrics of its family with an interval in both runs, None without; test: "paired" where the two runs' predictions of
    the same images were compared (McNemar's exact test), or the attention of one head on them (Student's paired t
    test); otherwise the two estimates count as independent, which on the same images finds too few changes rather than
    too many; better: the direction that is."""

    metric: str = col("metric", unit="text")
    words: str = col("measure", unit="text")
    before: Estimate = col("before")
    after: Estimate = col("after")
    difference: Estimate = col("difference")
    p: float | None = col("p")
    p_holm: float | None = col("p (Holm)", default=None)
    test: Literal["paired", "independent", ""] = col("test", default="")
    better: Better | None = col("better", default=None)

    @property
    def is_accuracy(self) -> bool:
        """Return True if it is a model's accuracy on all images."""
        return self.metric.partition("/")[0] == ACCURACY

    @property
    def family(self) -> Literal["accuracy", "judged", "described"]:
        """Return the tests that it is corrected for: what a release is decided by, what has a good direction, the
        rest."""
        if self.is_accuracy:
            return "accuracy"
        return "described" if self.better is None else "judged"

    @property
    def changed(self) -> bool:
        """Return True if it changed beyond chance."""
        return self.p_holm is not None and self.p_holm <= LEVEL

    @property
    def direction(self) -> Literal["better", "worse", ""]:
        """Return whether a change beyond chance is for the better or the worse, "" where there is none or neither is
        known."""
        if not self.changed or self.better is None or not self.difference.value:
            return ""
        return "better" if (self.difference.value > 0) == (self.better == "higher") else "worse"


@dataclass(frozen=True)
class JudgedRow:
    """One judgement of both reports."""

    judged: str = col("judged", unit="text")
    before: str = col("before")
    after: str = col("after")


@dataclass(frozen=True)
class SettingRow:
    """One setting that differs."""

    setting: str = col("setting", unit="text")
    before: str = col("before", unit="text")
    after: str = col("after", unit="text")


@dataclass(frozen=True, kw_only=True)
class ComparedRuns(Record):
    """Two runs of one command. earlier, later: their folders' names; same_images: whether they saw the same, "" where
    they take none; alone: metrics that only one of them has."""

    earlier: str = ""
    later: str = ""
    same_images: SameImages = ""
    changes: tuple[MetricChange, ...] = table()
    judged: tuple[JudgedRow, ...] = table()
    settings: tuple[SettingRow, ...] = table()
    alone: tuple[str, ...] = ()

    @property
    def tested(self) -> Sequence[MetricChange]:
        """Return the metrics with an interval in both."""
        return [row for row in self.changes if row.p is not None]

    @property
    def changed(self) -> Sequence[MetricChange]:
        """Return those that changed beyond chance: accuracies, what is better or worse, then the rest, the clearest
        first."""
        changed = (row for row in self.changes if row.changed)
        return sorted(changed, key=lambda row: (_FAMILIES.index(row.family), row.p_holm or 0))

    @property
    def accuracies(self) -> Sequence[MetricChange]:
        """Return the accuracies that are not what they were, the largest fall first."""
        rows = (row for row in self.changes if row.is_accuracy and row.difference.value)
        return sorted(rows, key=lambda row: row.difference.value)

    @property
    def fell(self) -> Sequence[MetricChange]:
        """Return the accuracies that are lower beyond chance or, be it by chance, by more than a negligible
        difference."""
        return [row for row in self.accuracies if row.direction == "worse" or row.difference.value <= -SMALLEST]

    @property
    def worse(self) -> Sequence[MetricChange]:
        """Return those that got worse beyond chance."""
        return [row for row in self.changed if row.direction == "worse"]


def compared_runs(before: Any, after: Any, command_line: str) -> ComparedRuns:
    """Return two runs of one command; command_line: that compares them.

    Raises InputError unless both are done, with as many models.
    """
    if before.command != after.command:
        raise InputError(
            f"expected two folders of one command, found {before.command} ({before.folder}) and {after.command} "
            f"({after.folder})"
        )
    for record in (before, after):
        if record.status != "done":
            raise InputError(f"expected a run that is done in {record.folder}, found one that is {record.status}")
    if len(before.aliases) != len(after.aliases):
        raise InputError(
            f"expected as many models in both folders, found {len(before.aliases)} in {before.folder} and "
            f"{len(after.aliases)} in {after.folder}"
        )
    names = _renamed(before, after)
    alone = [name for name in after.metrics if name not in names]
    return ComparedRuns(
        config=replace(after.config, command_line=command_line, data=None, fingerprints={}),
        folder=after.folder,
        earlier=before.folder.resolve().name,
        later=after.folder.resolve().name,
        same_images=_images(before, after),
        changes=changes_between(before, after),
        judged=tuple(_judged(before, after)),
        settings=tuple(_settings(before, after)),
        alone=(*alone, *(name for name in before.metrics if name not in names.values())),
    )


def changes_between(before: Record, after: Record) -> tuple[MetricChange, ...]:
    """Return every metric of both runs, models matched by their place on the command line."""
    found = [_change(before, after, name, other) for name, other in _renamed(before, after).items()]
    tested = {change.metric: change for change in found if change.p is not None}
    corrected: dict[str, float] = {}
    for family in dict.fromkeys(change.family for change in tested.values()):
        members = [change for change in tested.values() if change.family == family]
        corrected |= zip([change.metric for change in members], holm([change.p or 0.0 for change in members]))
    return tuple(replace(change, p_holm=corrected.get(change.metric)) for change in found)


def _renamed(before: Record, after: Record) -> dict[str, str]:
    """Return the metrics of both runs: name after -> name before, which differ by the models' aliases."""
    aliases = dict(zip(after.aliases, before.aliases))
    declared = COMMANDS[after.command].contents.metrics
    names: dict[str, str] = {}
    for name in after.metrics:
        candidates = (metric.renamed(name, aliases) for metric in declared if metric.parts(name) is not None)
        other = next((candidate for candidate in candidates if candidate in before.metrics), None)
        if other is not None:
            names[name] = other
    return names


def _change(before: Record, after: Record, name: str, other: str) -> MetricChange:
    """Return one metric, called `other` before: of an accuracy by the answers to the same images where both runs keep
    them."""
    was, now, (word, _, alias) = before.metrics[other], after.metrics[name], name.partition("/")
    better = after.better(name)
    words = _in_words(after, name)
    answers = _paired_answers(before, after, other.partition("/")[2], alias) if word == ACCURACY else None
    if answers is not None:
        right_before = _correct(answers[0])
        right = _correct(answers[1])
        groups = answers[1].groups
        p = paired_test(right, right_before, groups=groups)
        gap = accuracy_difference(right, right_before, groups=groups)
        return MetricChange(name, words, was, now, gap, p, test="paired", better=better)
    differences = _paired_differences(before, after, other, name)
    if differences is not None:
        groups = differences.groups
        gap = in_points(student_mean(differences.values, groups=groups, unit=now.unit))
        p = student_test(differences.values, groups=groups)
        return MetricChange(name, words, was, now, gap, p, test="paired", better=better)
    gap = difference_of(now, was)  # Newcombe's method needs the ends of two intervals alone, not fractions
    if now.unit != "fraction":
        low, high = (None if end is None else end / 100 for end in (gap.low, gap.high))
        gap = Estimate(gap.value / 100, low, high, now.n, now.unit)
    if gap.low is None or gap.high is None:
        return MetricChange(name, words, was, now, gap, None, better=better)
    arm = gap.value - gap.low if gap.value > 0 else gap.high - gap.value
    z = NormalDist().inv_cdf(0.975) * abs(gap.value) / arm if arm > 0 else np.inf * bool(gap.value)
    p = 2 * (1 - NormalDist().cdf(z)) if gap.value else 1.0
    return MetricChange(name, words, was, now, gap, p, test="independent", better=better)


def _in_words(record: Record, name: str) -> str:
    """Return a metric as its column is called, with what else its name says: "robust accuracy of vit (pgd-linf, 8)"."""
    column = record.column(name)
    if column is None:
        return name
    parts = dict(MetricName(column.metric).parts(name) or {})
    alias = parts.pop("model", "")
    for head in ("head", "key"):
        if f"L{{layer}}.H{{{head}}}" in column.metric:
            parts[head] = f"L{parts.pop('layer')}.H{parts[head]}"
    title = column.title.removeprefix("top-1 ").removesuffix(", clean")
    of = f" of {alias}" if alias and len(record.aliases) > 1 else ""
    rest = ", ".join(value for value in parts.values() if value)
    return f"{title}{of} ({rest})" if rest else f"{title}{of}"


def _paired_answers(
    before: Record, after: Record, alias_before: str, alias: str
) -> tuple[PredictionArrays, PredictionArrays] | None:
    """Return the answers of two models to the same images; None unless the images are known to be the same."""
    first = _evaluation(before)
    second = _evaluation(after)
    if first is None or second is None or _same_images(first, second) is not True:
        return None
    answers = first.predictions.get(alias_before)
    answers_now = second.predictions.get(alias)
    if answers is None or answers_now is None or not np.array_equal(answers.label, answers_now.label):
        return None
    return answers, answers_now


def _paired_differences(before: Record, after: Record, name_before: str, name: str) -> ImageValues | None:
    """Return the change of a metric on each image; None where the runs keep no values, or of other images."""
    values_before = before.values_by_image().get(name_before)
    values = after.values_by_image().get(name)
    if values_before is None or values is None or _same_images(before, after) is not True:
        return None
    return ImageValues(values.values - values_before.values, values.groups)


def _correct(answers: PredictionArrays) -> NDArray[np.bool_]:
    """Return True for each image that is classified correctly."""
    return np.asarray(answers.prediction == answers.label)


def _evaluation(record: Any) -> EvaluateRecord | None:
    """Return a run of evaluate, or that chapter of a study or an audit."""
    if isinstance(record, EvaluateRecord):
        return record
    chapters = record.of("evaluate") if isinstance(record, Chaptered) else ()
    return chapters[0].record if chapters else None


def _images(before: Any, after: Any) -> SameImages:
    """Return whether two runs saw the same images; "" where they take none."""
    if before.config.data is None and _evaluation(before) is not None:  # a study, whose chapters have the images
        before = _evaluation(before)
        after = _evaluation(after)
    if before is None or after is None or (before.config.data is None and after.config.data is None):
        return ""
    same = _same_images(before, after)
    if same is None:
        return "not known"
    return "the same" if same else "others"


def _same_images(before: Record, after: Record) -> bool | None:
    """Return whether all images that both runs read are the same; None for folders of versions that did not say."""
    first = before.config.fingerprints
    second = after.config.fingerprints
    parts = first.keys() & second.keys()
    return all(first[part] == second[part] for part in parts) if parts else None


def _claims(record: Any) -> Sequence[Claim]:
    """Return the judgements of a report; none of a folder without its arrays, of which no report can be made."""
    written = COMMANDS[record.command].report
    with suppress(InputError), foreign_contents(record):
        return tuple(written.claims(record)) if isinstance(written, Report) else written(record).claims
    return ()


def _judged(before: Any, after: Any) -> Iterator[JudgedRow]:
    """Yield the judgements of both reports, those that differ first."""
    was = _claims(before)
    now = _claims(after)
    aliases = dict(zip(after.aliases, before.aliases))
    earlier = {(claim.question, claim.subject): claim.state for claim in was}
    known = [(claim, earlier.get((claim.question, aliases.get(claim.subject, claim.subject)), "")) for claim in now]
    rows = [
        JudgedRow(f"{claim.question} of {claim.subject}", old, claim.state)
        for claim, old in known
        if claim.state and old
    ]
    yield from sorted(rows, key=lambda row: row.before == row.after)


def _settings(before: Any, after: Any) -> Iterator[SettingRow]:
    """Return what differs between the runs: options, versions, data, device, weights."""
    first = before.config
    second = after.config
    pairs: list[tuple[str, object, object]] = []
    for words, old, new in (("option ", first.options, second.options), ("", first.versions, second.versions)):
        pairs += [(f"{words}{name}", old.get(name), new.get(name)) for name in sorted({*old, *new} - _IGNORED)]
    pairs += [(name, getattr(first, name), getattr(second, name)) for name in ("seed", "device", "precision")]
    for part in sorted(first.fingerprints.keys() & second.fingerprints.keys()):
        digests = (first.fingerprints[part][:_DIGITS], second.fingerprints[part][:_DIGITS])
        pairs.append((f"fingerprint of the {fingerprinted(part)}", *digests))
    if first.data is not None and second.data is not None:
        pairs += [("data", first.data.title, second.data.title), ("images", first.data.images, second.data.images)]
    for old, new in zip(first.models, second.models):
        pairs += [(f"model {new.alias}", old.alias, new.alias), (f"weights of {new.alias}", old.sha256, new.sha256)]
    return (SettingRow(name, str(old), str(new)) for name, old, new in pairs if old != new)


def claims(runs: ComparedRuns) -> Iterator[Claim]:
    """Yield whether the later model can be released, how accuracy changed, then what else did."""
    yield _release(runs)
    for row in runs.accuracies:
        word = "rose" if row.difference.value > 0 else "fell"
        size = in_words(_size(row.difference))
        chance = "" if row.changed else ", which chance can explain"
        says = say(
            "**{{ row.words }}** {{ word }} by {{ size }}, from {{ row.before|value }} to {{ row.after|value }}"
            "{{ chance }}{{ images }}.",
            row=row,
            word=word,
            size=size,
            chance=chance,
            images=_ON_IMAGES[runs.same_images],
        )
        yield Claim("accuracy", row.metric, says, effect=row.difference, p=row.p_holm, kind="answer")
    for row in runs.changed:
        if row.is_accuracy:
            continue
        word = {"better": "improved", "worse": "got worse", "": "changed"}[row.direction]
        says = say(
            "**{{ row.words }}** {{ word }}: {{ row.before }} before, {{ row.after }} after.", row=row, word=word
        )
        kind: Kind = "comparison" if row.direction else "expected fact"
        yield Claim("change", row.metric, says, effect=row.difference, p=row.p_holm, kind=kind)


def _size(difference: Estimate) -> Estimate:
    """Return a difference without its sign, for a sentence that says its direction."""
    if difference.value >= 0 or difference.low is None or difference.high is None:
        return replace(difference, value=abs(difference.value))
    return replace(difference, value=-difference.value, low=-difference.high, high=-difference.low)


def _release(runs: ComparedRuns) -> Claim:
    """Return whether the later model can be released."""
    fallen = runs.fell[:1]
    others = [row for row in runs.worse if not row.is_accuracy]
    undecided = not runs.tested or bool(fallen) or runs.same_images in ("others", "not known")
    judged = any(row.better for row in runs.tested)
    state: State
    says = (
        "Of {{ tested|length }} measure{{ tested|length|s }} with intervals, {% if changed %}{{ changed|length }} "
        "changed beyond chance, {{ worse|length or 'none' }} of them for the worse"
        "{% if worse %}: {{ worse|names }}{% endif %}{% else %}none changed beyond chance{% endif %}."
    )
    if runs.worse:
        headline = _REFUSED
        state = "fail"
    elif not judged and runs.tested:
        headline = _UNJUDGED
        state = "pass"
    elif undecided:
        headline = _UNDECIDED
        state = "inconclusive"
    else:
        headline = "{{ later }} can be released: nothing got worse beyond chance"
        state = "pass"
    given = {
        "changed": runs.changed,
        "tested": runs.tested,
        "worse": [row.words for row in runs.worse],
        "later": runs.later,
        "fell": fallen,
        "others": [row.words for row in others],
        "images": runs.same_images,
        "known": _ON_IMAGES[runs.same_images],
    }
    verdict = Verdict(state, say(says, **given).rstrip("."))
    return found("regression", runs.later, says, headline=headline, given=given, verdict=verdict, kind="answer")


_ON_IMAGES: Final[Mapping[SameImages, str]] = {  # after a comparison
    "the same": "",
    "": "",
    "others": ", but the runs saw other images or labels",
    "not known": ", but whether the runs saw the same images is not known",
}
_ACCURACY_FELL: Final = (
    "{{ fell[0].words }} fell from {{ fell[0].before|value }} to {{ fell[0].after|value }}"
    "{% if not fell[0].changed %} (may be chance){% endif %}"
)
_REFUSED: Final = (
    "Do not release {{ later }}{% if known %} yet{% endif %}: {% if fell %}" + _ACCURACY_FELL + "{% endif %}"
    "{% if others %}{% if fell %}; {% endif %}{{ others[0] }}{% if others|length > 1 %} and {{ others|length - 1 }} "
    "more{% endif %} got worse{% endif %}{{ known }}"
)
_UNJUDGED: Final = (
    "{% if changed %}{{ changed|length }} measure{{ changed|s }} changed beyond chance{% else %}No measure changed "
    "beyond chance{% endif %}"
)
_UNDECIDED: Final = (
    "Undecided whether to release {{ later }}: {% if not tested %}nothing that can be tested was measured twice"
    "{% elif fell %}" + _ACCURACY_FELL + "{{ known }}{% elif images == 'others' %}"
    "the runs saw other images or labels{% else %}"
    "whether the runs saw the same images is not known{% endif %}"
)


def unknown(runs: ComparedRuns) -> Iterator[str]:
    """Yield what could overturn this."""
    if runs.same_images == "others":
        yield (
            "The runs saw other images or labels, or these in another order. So nothing is paired, and a change can be "
            "one of the images."
        )
    if runs.same_images == "not known":
        yield (
            "Whether the runs saw the same images is not known, as an earlier version wrote one of the folders. So "
            "nothing is paired, and a change can be one of the images."
        )
    independent = [row for row in runs.tested if row.test == "independent"]
    if independent and runs.same_images == "the same":
        yield say(
            "{{ n }} measure{{ n|s }} {{ n|are }} compared as if the runs had other images; on the same images this "
            "misses small changes.",
            n=len(independent),
        )
    if runs.alone:
        yield say("Measured by one run alone, and not compared: {{ names|names }}.", names=runs.alone)


REPORT: Final = Report(
    ComparedRuns,
    claims=claims,
    unknown=unknown,
    title="What changed from {{ record.earlier }} to {{ record.later }}",
    glance=Overview("changed", ("words", "before", "after", "difference", "p_holm", "test")),
    sections=(
        Section(
            "Which metrics without an interval differ?",
            lambda runs: [row for row in runs.changes if row.p is None and row.difference.value],
            opening="{{ rows|length }} {{ rows|length|are }} not judged.",
            columns=("words", "before", "after", "difference"),
        ),
        Section(
            "Are the judgements the same?",
            "judged",
            opening=lambda runs: say(
                "{{ k }} of {{ n }} judgements differ. One near its limit can differ by chance.",
                k=sum(row.before != row.after for row in runs.judged),
                n=len(runs.judged),
            ),
            columns=("judged", "before", "after"),
        ),
        Section(
            "What was done differently?",
            "settings",
            opening="{{ rows|length }} setting{{ rows|length|s }} differ{% if rows|length == 1 %}s{% endif %}.",
            without="No setting differs.",
            columns=("setting", "before", "after"),
        ),
        Section(
            "What did both runs measure?",
            "changes",
            columns=("metric", "words", "before", "after", "difference", "p_holm"),
            order=lambda row: row.metric,
        ),
    ),
)
