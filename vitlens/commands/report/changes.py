"""The differences between two runs of one command: metrics with their tests, verdicts, settings,
images.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any, Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vitlens.commands.evaluate.record import EvaluateRecord, PredictionArrays
from vitlens.commands.registry import COMMANDS
from vitlens.commands.report.record import ACCURACY, JudgedRow, MetricChange, SameImages, SettingRow
from vitlens.commands.run.chapters import Chaptered
from vitlens.commands.run.publish import foreign_contents
from vitlens.errors import InputError
from vitlens.names import fingerprinted
from vitlens.record import ImageValues, MetricName, Record
from vitlens.report.claims import Claim
from vitlens.report.sections import Report
from vitlens.uncertainty import (
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


def changes_between(before: Record, after: Record) -> tuple[MetricChange, ...]:
    """Return every metric of both runs, models matched by their place on the command line."""
    changes = []
    for name, name_before in common_metrics(before, after).items():
        changes.append(_change(_MetricPair(before, after, name_before, name)))
    corrected = _correct_p_values(changes)
    return tuple(replace(change, p_holm=corrected.get(change.metric)) for change in changes)


def _correct_p_values(changes: Sequence[MetricChange]) -> dict[str, float]:
    """Return p after Holm's correction within each family, by metric."""
    families: dict[str, dict[str, float]] = {}
    for change in changes:
        if change.p is not None:
            families.setdefault(change.family, {})[change.metric] = change.p
    corrected: dict[str, float] = {}
    for p_values in families.values():
        corrected |= zip(p_values, holm(list(p_values.values())))
    return corrected


def common_metrics(before: Record, after: Record) -> dict[str, str]:
    """Return the metrics of both runs: name after -> name before, which differ by the models'
    aliases.
    """
    aliases = dict(zip(after.aliases, before.aliases))
    declared = COMMANDS[after.command].contents.metrics
    names: dict[str, str] = {}
    for name in after.metrics:
        for metric in declared:
            if metric.parts(name) is None:
                continue
            renamed = metric.renamed(name, aliases)
            if renamed in before.metrics:
                names[name] = renamed
                break
    return names


@dataclass(frozen=True)
class _MetricPair:
    """One metric of two runs."""

    before: Record
    after: Record
    name_before: str
    name: str

    @property
    def estimates(self) -> tuple[Estimate, Estimate]:
        """Return the metric before and after."""
        return self.before.metrics[self.name_before], self.after.metrics[self.name]

    @property
    def aliases(self) -> tuple[str, str]:
        """Return the aliases before and after.

        Only for metrics of one model, whose alias is all after the first word.
        """
        return self.name_before.partition("/")[2], self.name.partition("/")[2]

    @property
    def is_accuracy(self) -> bool:
        """Return True for a model's accuracy."""
        return self.name.partition("/")[0] == ACCURACY


class _Difference(NamedTuple):
    """A difference, after minus before, and its test."""

    difference: Estimate
    p: float | None
    test: Literal["paired", "independent", ""]


def _change(pair: _MetricPair) -> MetricChange:
    """Return one metric before and after, compared image by image if both runs keep the values of
    the same images.
    """
    estimate_before, estimate = pair.estimates
    result = _difference_of_answers(pair) or _difference_of_values(pair)
    if result is None:
        result = _independent_difference(estimate_before, estimate)
    return MetricChange(
        pair.name,
        words=_in_words(pair.after, pair.name),
        before=estimate_before,
        after=estimate,
        difference=result.difference,
        p=result.p,
        test=result.test,
        better=pair.after.better(pair.name),
    )


def _difference_of_answers(pair: _MetricPair) -> _Difference | None:
    """Return the difference of accuracies by the predictions on the same images.

    Returns None without these.
    """
    answers = _paired_answers(pair)
    if answers is None:
        return None
    correct_before = _correct(answers[0])
    correct = _correct(answers[1])
    groups = answers[1].groups
    return _Difference(
        accuracy_difference(correct, correct_before, groups=groups),
        paired_test(correct, correct_before, groups=groups),
        "paired",
    )


def _paired_answers(pair: _MetricPair) -> tuple[PredictionArrays, PredictionArrays] | None:
    """Return two models' predictions on the same images.

    Returns None for other metrics, and unless images are the same.
    """
    if not pair.is_accuracy:
        return None
    run_before = _evaluation(pair.before)
    run = _evaluation(pair.after)
    if run_before is None or run is None:
        return None
    if not _same_images(run_before, run):
        return None
    alias_before, alias = pair.aliases
    answers_before = run_before.predictions.get(alias_before)
    answers = run.predictions.get(alias)
    if answers_before is None or answers is None:
        return None
    if not np.array_equal(answers_before.label, answers.label):
        return None
    return answers_before, answers


def _correct(answers: PredictionArrays) -> NDArray[np.bool_]:
    """Return True for each image that is classified correctly."""
    return np.asarray(answers.prediction == answers.label)


def _difference_of_values(pair: _MetricPair) -> _Difference | None:
    """Return the difference of means by the values of the same images; None without these."""
    changes = _changes_by_image(pair)
    if changes is None:
        return None
    unit = pair.after.metrics[pair.name].unit
    mean = student_mean(changes.values, groups=changes.groups, unit=unit)
    return _Difference(
        in_points(mean), student_test(changes.values, groups=changes.groups), "paired"
    )


def _changes_by_image(pair: _MetricPair) -> ImageValues | None:
    """Return the change of a metric on each image.

    Returns None if the runs keep no values, or of other images.
    """
    values_before = pair.before.values_by_image().get(pair.name_before)
    values = pair.after.values_by_image().get(pair.name)
    if values_before is None or values is None:
        return None
    if not _same_images(pair.before, pair.after):
        return None
    return ImageValues(values.values - values_before.values, values.groups)


def _independent_difference(before: Estimate, after: Estimate) -> _Difference:
    """Return the difference of two estimates as if their images were independent."""
    # Newcombe's method needs only two intervals, not fractions
    difference = difference_of(after, before)
    if after.unit != "fraction":
        difference = _in_unit(difference, after)
    if difference.low is None or difference.high is None:
        return _Difference(difference, None, "")
    return _Difference(
        difference, _p_of(difference.value, difference.low, difference.high), "independent"
    )


def _in_unit(difference: Estimate, metric: Estimate) -> Estimate:
    """Return a difference in hundredths of a metric's unit in that unit."""
    low = difference.low
    high = difference.high
    if low is not None and high is not None:
        low /= 100
        high /= 100
    return Estimate(difference.value / 100, low, high, metric.n, metric.unit)


def _p_of(value: float, low: float, high: float) -> float:
    """Return the two-sided p of a difference from its 95 % interval, by the half towards 0."""
    if not value:
        return 1.0
    half_width = value - low if value > 0 else high - value
    if half_width <= 0:
        return 0.0
    z = NormalDist().inv_cdf(0.975) * abs(value) / half_width
    return 2 * (1 - NormalDist().cdf(z))


def _in_words(record: Record, name: str) -> str:
    """Return a metric in words, with the values in its name: "robust accuracy of vit (pgd-linf,
    8)".
    """
    column = record.column(name)
    if column is None:
        return name
    parts = dict(MetricName(column.metric).parts(name) or {})
    alias = parts.pop("model", "")
    for head in ("head", "key"):
        if f"L{{layer}}.H{{{head}}}" in column.metric:
            parts[head] = f"L{parts.pop('layer')}.H{parts[head]}"
    words = column.title.removeprefix("top-1 ").removesuffix(", clean")
    if alias and len(record.aliases) > 1:
        words += f" of {alias}"
    values = ", ".join(filter(None, parts.values()))
    return f"{words} ({values})" if values else words


def _evaluation(record: Any) -> EvaluateRecord | None:
    """Return a run of evaluate, or that chapter of a study or an audit."""
    if isinstance(record, EvaluateRecord):
        return record
    if isinstance(record, Chaptered):
        chapters = record.of("evaluate")
        if chapters:
            evaluation: EvaluateRecord = chapters[0].record
            return evaluation
    return None


def compare_images(before: Any, after: Any) -> SameImages:
    """Return whether two runs saw the same images, "" for runs without images."""
    # a study, whose chapters have the images
    if before.config.data is None and _evaluation(before) is not None:
        before = _evaluation(before)
        after = _evaluation(after)
    if before is None or after is None:
        return ""
    if before.config.data is None and after.config.data is None:
        return ""
    same = _same_images(before, after)
    if same is None:
        return "not known"
    return "the same" if same else "others"


def _same_images(before: Record, after: Record) -> bool | None:
    """Return True if all images that both runs read are the same.

    Returns None for folders without fingerprints.
    """
    prints_before = before.config.fingerprints
    prints = after.config.fingerprints
    parts = prints_before.keys() & prints.keys()
    if not parts:
        return None
    return all(prints_before[part] == prints[part] for part in parts)


def compare_verdicts(before: Any, after: Any) -> list[JudgedRow]:
    """Return the verdicts of both reports, those that differ first."""
    aliases = dict(zip(after.aliases, before.aliases))
    claims_after = _claims(after)
    states_before = {(claim.question, claim.subject): claim.state for claim in _claims(before)}
    rows = []
    for claim in claims_after:
        subject_before = aliases.get(claim.subject, claim.subject)
        state_before = states_before.get((claim.question, subject_before), "")
        if claim.state and state_before:
            rows.append(
                JudgedRow(f"{claim.question} of {claim.subject}", state_before, claim.state)
            )
    return sorted(rows, key=lambda row: row.before == row.after)


def _claims(record: Any) -> Sequence[Claim]:
    """Return the claims of a report.

    Returns () for a folder without its arrays, of which no report can be made.
    """
    report = COMMANDS[record.command].report
    with suppress(InputError), foreign_contents(record):
        if isinstance(report, Report):
            return tuple(report.claims(record))
        return report(record).claims
    return ()


def compare_settings(before: Any, after: Any) -> list[SettingRow]:
    """Return the options, versions, data, device and weights that differ between the runs."""
    rows = []
    for name, old, new in _setting_pairs(before.config, after.config):
        if old != new:
            rows.append(SettingRow(name, str(old), str(new)))
    return rows


def _setting_pairs(before: Any, after: Any) -> Iterator[tuple[str, object, object]]:
    """Yield every setting of two configurations: its name, its value before and after."""
    yield from _mapping_pairs("option ", before.options, after.options)
    yield from _mapping_pairs("", before.versions, after.versions)
    for name in ("seed", "device", "precision"):
        yield name, getattr(before, name), getattr(after, name)
    for part in sorted(before.fingerprints.keys() & after.fingerprints.keys()):
        name = f"fingerprint of the {fingerprinted(part)}"
        yield name, before.fingerprints[part][:_DIGITS], after.fingerprints[part][:_DIGITS]
    if before.data is not None and after.data is not None:
        yield "data", before.data.title, after.data.title
        yield "images", before.data.images, after.data.images
    for old, new in zip(before.models, after.models):
        yield f"model {new.alias}", old.alias, new.alias
        yield f"weights of {new.alias}", old.sha256, new.sha256


def _mapping_pairs(prefix: str, before: Any, after: Any) -> Iterator[tuple[str, object, object]]:
    for name in sorted({*before, *after} - _IGNORED):
        yield f"{prefix}{name}", before.get(name), after.get(name)
