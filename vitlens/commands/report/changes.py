"""The differences between two runs of one command: metrics, verdicts, settings and images.

A metric is tested with the strongest test that the runs allow: by predictions on the same images,
by values of the same images, else by both intervals as if images were independent.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any, Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vitlens.analysis.failures.properties import PROPERTIES
from vitlens.analysis.heads.registry import STATISTICS
from vitlens.commands.evaluate.record import EvaluateRecord, PredictionArrays
from vitlens.commands.registry import COMMANDS
from vitlens.commands.report.record import ACCURACY, JudgedRow, MetricChange, SameImages, SettingRow
from vitlens.commands.run.chapters import Chaptered
from vitlens.commands.run.publish import foreign_contents
from vitlens.commands.run.requirements import Requirement, outcomes, requirements_of
from vitlens.errors import InputError
from vitlens.names import fingerprinted
from vitlens.record import ImageValues, MetricName, Record
from vitlens.report.claims import Claim
from vitlens.report.document import State
from vitlens.report.sections import Report
from vitlens.report.verdicts import ORDER
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

_DIGITS: Final = 12  # shown of a fingerprint
_STATISTICS: Final = "statistics"  # the title of a column of several statistics
# options that change no number, and the models, which have rows of their own;
# of "run", only the requirements are compared
_IGNORED: Final = frozenset({"run", "out", "overwrite", "quiet", "junit", "model", "models"})


def changes_between(before: Record, after: Record) -> tuple[MetricChange, ...]:
    """Return every metric of both runs, models matched by their place on the command line."""
    changes = []
    for name_after, name_before in common_metrics(before, after).items():
        changes.append(_change(_MetricPair(before, after, name_before, name_after)))
    corrected = _correct_p_values(changes)
    return tuple(replace(change, p_holm=corrected.get(change.metric)) for change in changes)


def _correct_p_values(changes: Sequence[MetricChange]) -> dict[str, float]:
    """Return p after Holm's correction within each family, by metric."""
    p_by_family: dict[str, dict[str, float]] = {}  # by family and metric
    for change in changes:
        if change.p is not None:
            p_by_family.setdefault(change.family, {})[change.metric] = change.p
    corrected: dict[str, float] = {}
    for p_by_metric in p_by_family.values():
        corrected_p_values = holm(list(p_by_metric.values()))
        for metric, p in zip(p_by_metric, corrected_p_values):
            corrected[metric] = p
    return corrected


def common_metrics(before: Record, after: Record) -> dict[str, str]:
    """Return the metrics of both runs, the name before by the name after.

    The names differ by the aliases of the models.
    """
    alias_before = dict(zip(after.aliases, before.aliases))  # by alias after
    declared = COMMANDS[after.command].contents.metrics
    names_before: dict[str, str] = {}
    for name_after in after.metrics:
        # several patterns may fit a name; the first that leads to a metric before counts
        for pattern in declared:
            if pattern.parts(name_after) is None:
                continue
            name_before = pattern.renamed(name_after, alias_before)
            if name_before in before.metrics:
                names_before[name_after] = name_before
                break
    return names_before


@dataclass(frozen=True)
class _MetricPair:
    """One metric of two runs.

    before, after: the runs.
    name_before, name_after: the names of the metric in them.
    """

    before: Record
    after: Record
    name_before: str
    name_after: str

    @property
    def estimate_before(self) -> Estimate:
        """Return the metric of the earlier run."""
        return self.before.metrics[self.name_before]

    @property
    def estimate_after(self) -> Estimate:
        """Return the metric of the later run."""
        return self.after.metrics[self.name_after]

    @property
    def is_accuracy(self) -> bool:
        """Return True for a model's accuracy, "accuracy/ALIAS"."""
        return self.name_after.partition("/")[0] == ACCURACY


class _Difference(NamedTuple):
    """A difference, after minus before, and its test."""

    difference: Estimate
    p: float | None
    test: Literal["paired", "independent", ""]


def _change(pair: _MetricPair) -> MetricChange:
    """Return one metric before and after, with the strongest test that the runs allow."""
    result = _difference_of_predictions(pair)
    if result is None:
        result = _difference_of_values(pair)
    if result is None:
        result = _independent_difference(pair.estimate_before, pair.estimate_after)
    return MetricChange(
        pair.name_after,
        words=_in_words(pair.after, pair.name_after),
        before=pair.estimate_before,
        after=pair.estimate_after,
        difference=result.difference,
        p=result.p,
        test=result.test,
        better=pair.after.better(pair.name_after),
    )


def _difference_of_predictions(pair: _MetricPair) -> _Difference | None:
    """Return the difference of accuracies by the predictions on the same images.

    Returns None without these.
    """
    predictions = _paired_predictions(pair)
    if predictions is None:
        return None
    is_correct_before = _is_correct(predictions.before)
    is_correct_after = _is_correct(predictions.after)
    groups = predictions.after.groups
    return _Difference(
        difference=accuracy_difference(is_correct_after, is_correct_before, groups=groups),
        p=paired_test(is_correct_after, is_correct_before, groups=groups),
        test="paired",
    )


class _PairedPredictions(NamedTuple):
    """Predictions of the earlier and the later run on the same images."""

    before: PredictionArrays
    after: PredictionArrays


def _paired_predictions(pair: _MetricPair) -> _PairedPredictions | None:
    """Return two models' predictions on the same images.

    Returns None for other metrics than an accuracy, and unless images are the same.
    """
    if not pair.is_accuracy:
        return None
    run_before = _evaluation(pair.before)
    run_after = _evaluation(pair.after)
    if run_before is None or run_after is None:
        return None
    if not _same_images(run_before, run_after):
        return None
    before = _predictions(run_before, pair.name_before)
    after = _predictions(run_after, pair.name_after)
    if before is None or after is None:
        return None
    if not np.array_equal(before.label, after.label):
        return None
    return _PairedPredictions(before, after)


def _predictions(run: EvaluateRecord, accuracy_name: str) -> PredictionArrays | None:
    """Return the predictions of the model of an accuracy, "accuracy/ALIAS"."""
    _, _, alias = accuracy_name.partition("/")
    return run.predictions.get(alias)


def _is_correct(predictions: PredictionArrays) -> NDArray[np.bool_]:
    """Return True for each image that is classified correctly."""
    return np.asarray(predictions.prediction == predictions.label)


def _difference_of_values(pair: _MetricPair) -> _Difference | None:
    """Return the difference of means by the values of the same images; None without these."""
    changes = _changes_by_image(pair)
    if changes is None:
        return None
    unit = pair.estimate_after.unit
    mean = student_mean(changes.values, groups=changes.groups, unit=unit)
    p = student_test(changes.values, groups=changes.groups)
    return _Difference(in_points(mean), p, "paired")


def _changes_by_image(pair: _MetricPair) -> ImageValues | None:
    """Return the change of a metric on each image.

    Returns None if the runs keep no values, or of other images.
    """
    before = pair.before.values_by_image().get(pair.name_before)
    after = pair.after.values_by_image().get(pair.name_after)
    if before is None or after is None:
        return None
    if not _same_images(pair.before, pair.after):
        return None
    return ImageValues(after.values - before.values, after.groups)


def _independent_difference(before: Estimate, after: Estimate) -> _Difference:
    """Return the difference of two estimates as if their images were independent."""
    # Newcombe's method, which `difference_of` uses, needs only two intervals, not fractions
    difference = difference_of(after, before)
    if after.unit != "fraction":
        difference = _in_unit(difference, after)
    if before.n != after.n:  # neither number is that of the difference
        difference = replace(difference, n=None)
    if difference.low is None or difference.high is None:
        return _Difference(difference, p=None, test="")
    p = _p_of(difference.value, difference.low, difference.high)
    return _Difference(difference, p, test="" if p is None else "independent")


def _in_unit(points: Estimate, metric: Estimate) -> Estimate:
    """Return a difference of a metric in its unit.

    points: the difference as `difference_of` returns it, in hundredths of the unit.
    """
    low = points.low
    high = points.high
    if low is not None and high is not None:
        low /= 100
        high /= 100
    return Estimate(points.value / 100, low, high, metric.n, metric.unit)


def _p_of(value: float, low: float, high: float) -> float | None:
    """Return the two-sided p of a difference from its 95 % interval.

    The half of the interval towards 0 is taken for that of a normal distribution. Without such a
    half there is no test: the interval is one of undecided heads, and not over images.
    """
    if not value:
        return 1.0
    half_width = value - low if value > 0 else high - value
    if half_width <= 0:
        return None
    z = NormalDist().inv_cdf(0.975) * abs(value) / half_width
    return 2 * NormalDist().cdf(-z)  # 1 - cdf(z) would be 0 for large z


def _in_words(record: Record, name: str) -> str:
    """Return a metric in words with the values in its name, "robust accuracy of vit (pgd-linf, 8)".

    The alias of the model is left out in a run of one model.
    """
    column = record.column(name)
    if column is None:
        return name
    # the values in the name, by the field that the pattern names: {"model": "vit", "layer": "3"}
    parts = dict(MetricName(column.metric).parts(name) or {})
    alias = parts.pop("model", "")
    # a head is written as one value, in patterns with "L{layer}.H{head}" or "L{layer}.H{key}":
    # {"layer": "3", "head": "1"} becomes {"head": "L3.H1"}
    for field in ("head", "key"):
        if f"L{{layer}}.H{{{field}}}" in column.metric:
            parts[field] = f"L{parts.pop('layer')}.H{parts[field]}"
    words = column.title.removeprefix("top-1 ").removesuffix(", clean")
    if alias and len(record.aliases) > 1:
        words += f" of {alias}"
    # the key names the statistic: {"key": "entropy"} becomes a part of the words
    if column.title == _STATISTICS and "key" in parts:
        key = parts.pop("key")
        title = STATISTICS[key].title if key in STATISTICS else key.replace("_", " ")
        words = words.replace(_STATISTICS, title)
    if "covariate" in parts:  # a property of images
        name_of_property = parts["covariate"]
        if name_of_property in PROPERTIES:
            parts["covariate"] = PROPERTIES[name_of_property].title
    if "quarter" in parts:
        parts["quarter"] = f"quarter {parts['quarter']} from the lowest"
    values = ", ".join(value for value in parts.values() if value)
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
    evaluation_before = _evaluation(before)
    with_images_before = before
    with_images_after = after
    # of a study, only the chapters have images; both runs are of the same command
    if before.config.data is None and evaluation_before is not None:
        with_images_before = evaluation_before
        with_images_after = _evaluation(after)
        if with_images_after is None:
            return ""
    if with_images_before.config.data is None and with_images_after.config.data is None:
        return ""
    are_same = _same_images(with_images_before, with_images_after)
    if are_same is None:
        return "not known"
    return "the same" if are_same else "others"


def _same_images(before: Record, after: Record) -> bool | None:
    """Return True if all images that both runs read are the same.

    Returns None for folders without fingerprints.
    """
    fingerprints_before = before.config.fingerprints
    fingerprints_after = after.config.fingerprints
    parts = fingerprints_before.keys() & fingerprints_after.keys()
    if not parts:
        return None
    return all(fingerprints_before[part] == fingerprints_after[part] for part in parts)


class ComparedVerdicts(NamedTuple):
    """The verdicts of two reports.

    rows: the verdicts of both, those that differ first.
    alone: the verdicts that only one report has.
    failures: what the later run fails: requirements, then other verdicts.
    """

    rows: tuple[JudgedRow, ...]
    alone: tuple[str, ...]
    failures: tuple[str, ...]


def compare_verdicts(before: Any, after: Any) -> ComparedVerdicts:
    """Return the verdicts of both reports, and what the later run fails."""
    alias_after = dict(zip(before.aliases, after.aliases))  # by alias before
    claims_after = _claims(after)
    states_before = _states(_claims(before), alias_after)
    states_after = _states(claims_after, {})
    rows = []
    alone = []
    for judged in (*states_after, *(states_before.keys() - states_after.keys())):
        state_before = states_before.get(judged)
        state_after = states_after.get(judged)
        if state_before is None or state_after is None:
            alone.append(judged)
        else:
            rows.append(JudgedRow(judged, before=state_before, after=state_after))
    rows.sort(key=lambda row: row.before == row.after)
    return ComparedVerdicts(tuple(rows), tuple(sorted(alone)), _failures(after, claims_after))


def _states(claims: Sequence[Claim], aliases: Mapping[str, str]) -> dict[str, State]:
    """Return the states of verdicts by what they judge, such as "accuracy of vit".

    Without what was not tested. Of several states of one verdict, the worst counts.

    aliases: the names of models in the other run.
    """
    states: dict[str, State] = {}
    for claim in claims:
        if claim.state and claim.state != "not tested":
            subject = aliases.get(claim.subject, claim.subject)
            judged = f"{claim.question} of {subject}"
            state = states.get(judged, claim.state)
            states[judged] = min(state, claim.state, key=ORDER.index)
    return states


def _failures(record: Any, claims: Sequence[Claim]) -> tuple[str, ...]:
    """Return the requirements that a run does not meet, and its other failed verdicts."""
    failures: dict[str, None] = {}  # in order, each once
    required = set()
    for outcome in outcomes(_requirements(record), record):
        if not outcome.holds:
            failures[outcome.requirement.words] = None
            required.add(outcome.metric.partition("/")[0])
    for claim in claims:
        # the verdict about a metric with a requirement is this requirement
        if claim.state == "fail" and claim.question not in required:
            failures[f"{claim.question} of {claim.subject}"] = None
    return tuple(failures)


def _requirements(record: Any) -> tuple[Requirement, ...]:
    """Return the requirements of --at-least and --at-most of a run."""
    bounds = _bounds(record.options)
    return requirements_of(bounds["--at-least"], bounds["--at-most"])


def _bounds(options: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Return the values of --at-least and --at-most, each METRIC=VALUE, by the option."""
    run = options.get("run")
    bounds: dict[str, tuple[str, ...]] = {}
    for option, name in (("--at-least", "at_least"), ("--at-most", "at_most")):
        typed = run.get(name) if isinstance(run, Mapping) else None
        bounds[option] = tuple(map(str, typed)) if isinstance(typed, list | tuple) else ()
    return bounds


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
    for setting, value_before, value_after in _setting_pairs(before.config, after.config):
        if value_before != value_after:
            rows.append(SettingRow(setting, before=_shown(value_before), after=_shown(value_after)))
    return rows


def _shown(value: object) -> str:
    """Return the value of a setting without Python's syntax."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_shown, value)) or "none"
    return str(value)


def _setting_pairs(before: Any, after: Any) -> Iterator[tuple[str, object, object]]:
    """Yield every setting of two configurations: its name, its value before and after."""
    yield from _mapping_pairs("option ", before.options, after.options)
    bounds_before = _bounds(before.options)
    for option, bounds in _bounds(after.options).items():
        yield option, ", ".join(bounds_before[option]) or "none", ", ".join(bounds) or "none"
    yield from _mapping_pairs("", before.versions, after.versions)
    for name in ("seed", "device", "precision"):
        yield name, getattr(before, name), getattr(after, name)
    for part in sorted(before.fingerprints.keys() & after.fingerprints.keys()):
        name = f"fingerprint of the {fingerprinted(part)}"
        yield name, before.fingerprints[part][:_DIGITS], after.fingerprints[part][:_DIGITS]
    if before.data is not None and after.data is not None:
        yield "data", before.data.title, after.data.title
        yield "images", before.data.images, after.data.images
    for model_before, model_after in zip(before.models, after.models):
        alias = model_after.alias
        yield f"model {alias}", model_before.name, model_after.name
        yield f"origin of the weights of {alias}", model_before.weights, model_after.weights
        yield f"SHA-256 of the weights of {alias}", model_before.sha256, model_after.sha256


def _mapping_pairs(prefix: str, before: Any, after: Any) -> Iterator[tuple[str, object, object]]:
    """Yield the values of two mappings by key; a mapping inside counts as its keys."""
    for name in sorted({*before, *after} - _IGNORED):
        value_before = before.get(name)
        value_after = after.get(name)
        if isinstance(value_before, dict) and isinstance(value_after, dict):
            yield from _mapping_pairs(prefix, value_before, value_after)
        else:
            yield f"{prefix}{name}", value_before, value_after
