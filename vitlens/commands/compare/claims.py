"""The claims of `vitlens compare`: accuracy, calibration, maps, and disturbed images."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from vitlens.analysis.failures.disturbances import DISTURBANCES
from vitlens.attribution.registry import method_title
from vitlens.commands.compare import outcome_attention
from vitlens.commands.compare.record import CompareRecord, DisturbedPairRow, HarderRow
from vitlens.commands.shared import failures, reliance, shortcut
from vitlens.commands.shared.calibration import FEW, calibration_claim
from vitlens.commands.shared.comparison import (
    accuracy_claims,
    accuracy_effects,
    not_equal,
    too_few_images,
    which_is_better,
)
from vitlens.commands.shared.maps.record import JudgedMap, best_map, judged_maps
from vitlens.commands.shared.maps.report import uniform_claim
from vitlens.commands.shared.trainings import trained
from vitlens.report.claims import FEWEST, Claim, found, unjudged
from vitlens.report.prose import Marked, say
from vitlens.report.verdicts import Verdict
from vitlens.uncertainty import Estimate, Side, apart, beyond, widened

_DISTURBED: Final = {  # descriptions of images by disturbance, with the level of a row
    "low-pass": "with coarse detail only (low-pass at {{ row.level|percent }})",
    "high-pass": "with fine detail only (high-pass at {{ row.level|percent }})",
    "shuffle": "cut into {{ row.level|number }} x {{ row.level|number }} shuffled tiles",
    "occlusion": "with {{ row.level|percent }} of their squares covered",
}


def claims(record: CompareRecord) -> Iterator[Claim]:
    """Yield the better model, the judgements of each model, and its largest lead on disturbed
    images.
    """
    accuracies = {row.model: row.accuracy for row in record.scores}
    if record.images >= FEW:
        yield from which_is_better(accuracies, record.pairs)
    yield from accuracy_claims(accuracies, record.pairs)
    yield from shortcut.claims(record)
    yield from reliance.claims(record)
    yield from failures.claims(record)
    yield from outcome_attention.claims(record)
    for row in record.scores:
        yield calibration_claim(row.model, row.calibration_error)
        yield _explanation(record, row.model)
        yield from _uniform_maps(record, row.model)
        yield from _largest_lead(record, row.model)


def _explanation(record: CompareRecord, model: str) -> Claim:
    """Return the judgement of the maps of a model; a sentence only if they fail."""
    best = best_map([check for check in record.map_checks if check.model == model])
    if best is None:
        return unjudged("explanation", model, "its maps were not checked", state="not tested")
    if record.images < FEWEST:
        because = say("judging a map takes at least {{ few }} images", few=FEWEST)
        return unjudged("explanation", model, because)
    # the verdict is on the best method, the sentence on the maps that the report shows
    row = next(row for row in judged_methods(record) if row.model == model)
    says = ""
    if row.state == "fail":
        says = say(
            "Do not trust the maps of **{{ row.model }}** by {{ method }}: the method "
            "{{ row.lacks|whole }}.",
            row=row,
            method=Marked(method_title(row.method)),
        )
    return Claim(
        "explanation",
        model,
        says,
        verdict=Verdict(best.state, best.because),
        effect=best.margin,
        evidence="intervened",
        place="panels",
    )


def judged_methods(record: CompareRecord) -> list[JudgedMap]:
    """Return the judgement of the method that each model's maps are shown by."""
    methods = {(row.model, row.method) for row in record.methods}
    judged = []
    for alias in record.aliases:
        checks = [check for check in record.map_checks if check.model == alias]
        for row in judged_maps(checks):
            if (row.model, row.method) in methods:
                judged.append(row)
    return judged


def maps_comparable(record: CompareRecord) -> bool:
    """Return True if the maps are by one method, or by two methods that both pass every check."""
    first, second = record.methods
    if first.method == second.method:
        return True
    judged = judged_methods(record)
    return len(judged) == 2 and all(row.state == "pass" for row in judged)


def _uniform_maps(record: CompareRecord, model: str) -> Iterator[Claim]:
    """Yield the claim about unusable maps of a model."""
    for row in record.methods:
        if row.model == model and row.usable.n:
            unusable = round((1 - row.usable.value) * row.usable.n)
            yield from uniform_claim(model, {row.method: unusable}, row.usable.n)


def _largest_lead(record: CompareRecord, model: str) -> Iterator[Claim]:
    """Yield the largest difference on disturbed images in favour of a model that is above chance
    there.

    It is the largest of many, so its interval is corrected for their number.
    """
    leads = []
    for row in record.disturbed_pairs:
        if row.better != model or not _changes_accuracy(record, row):
            continue
        if _is_above_chance(record, row, model):
            leads.append(row)
    if not leads or record.images < FEWEST:
        return
    largest = max(leads, key=lambda row: abs(row.difference.value))
    gain = widened(largest.gain(model), len(record.disturbed_pairs), least=-100.0, most=100.0)
    claim = _on_disturbed(record, largest, model, gain)
    yield replace(claim, question="disturbed images", subject=model, title="", p=largest.p_holm)


def _is_above_chance(record: CompareRecord, row: DisturbedPairRow, model: str) -> bool:
    """Return True if a model is significantly better than guessing on the images of a pair."""
    level = _level_row(record, row, model)
    return beyond(level.accuracy, level.chance) is Side.ABOVE


def _level_row(record: CompareRecord, pair: DisturbedPairRow, model: str) -> HarderRow:
    """Return the row of a model at the level of a pair."""
    for row in record.robustness:
        if (row.model, row.kind, row.level) == (model, pair.kind, pair.level):
            return row
    raise LookupError(f"no accuracy of {model} under {pair.kind} at {pair.level}")


def _on_disturbed(
    record: CompareRecord, row: DisturbedPairRow, ahead: str, gain: Estimate
) -> Claim:
    """Return the claim about one difference on disturbed images; its p is not corrected.

    ahead: the better model. gain: its accuracy minus that of the other one.
    """
    behind = row.second if row.first == ahead else row.first
    on_images = "On images " + _DISTURBED[row.kind]
    return found(
        f"disturbance: {row.kind}",
        f"{row.first} and {row.second}",
        on_images + ", **{{ ahead }}** is {{ effect|alone }} more accurate than **{{ behind }}** "
        "({{ accuracy_ahead|value }} compared with {{ accuracy_behind|value }}).",
        gain,
        brief=on_images + ", **{{ ahead }}** keeps {{ accuracy_ahead|value }} accuracy, "
        "**{{ behind }}** {{ accuracy_behind|value }}.",
        given={
            "row": row,
            "ahead": ahead,
            "behind": behind,
            "accuracy_ahead": _level_row(record, row, ahead).accuracy,
            "accuracy_behind": _level_row(record, row, behind).accuracy,
        },
        headline=on_images + ", {{ ahead }} keeps {{ accuracy_ahead|value(0) }}, {{ behind }} "
        "{{ accuracy_behind|value(0) }}",
        p=row.p,
        better=ahead,
        kind="comparison",
        evidence="intervened",
        place="robustness",
    )


def _changes_accuracy(record: CompareRecord, row: DisturbedPairRow) -> bool:
    """Return True if a level lowers the accuracy of a model.

    If it lowers none, a difference on disturbed images is that of clean images. It is also True if
    the accuracy at the weakest level is not known.
    """
    # the weakest level changes (nearly) nothing, so it stands for clean images
    levels = DISTURBANCES[row.kind].levels
    weakest_level = levels[0] if levels else 1.0  # numbers of tiles depend on the images, from 1 on
    if row.level == weakest_level:
        return False
    at_weakest = {}  # accuracy at the weakest level, by model
    for level_row in record.robustness:
        if (level_row.kind, level_row.level) == (row.kind, weakest_level):
            at_weakest[level_row.model] = level_row.accuracy
    for model in (row.first, row.second):
        accuracy = _level_row(record, row, model).accuracy
        if model not in at_weakest or apart(accuracy, at_weakest[model]) is Side.BELOW:
            return True
    return False


def effects(record: CompareRecord) -> Iterator[Claim]:
    """Yield every difference between the models, with p before any correction."""
    yield from accuracy_effects(record.pairs)
    for row in record.disturbed_pairs:
        ahead = row.first if row.difference.value >= 0 else row.second
        if _changes_accuracy(record, row) and _is_above_chance(record, row, ahead):
            yield _on_disturbed(record, row, ahead, row.gain(ahead))
    yield from failures.effects(record)


def unknown(record: CompareRecord) -> Iterator[str]:
    """Yield what could overturn these numbers, the most serious first."""
    n = record.images
    yield from too_few_images(record.scores, n, "to compare models")
    yield from trained(record.training)
    yield from not_equal(record.pairs)
    yield from _unknown_of_maps(record)
    yield from _few_disturbed(record)
    yield from failures.unknown(record)
    yield from reliance.unknown(record)
    yield say(
        "One training run of each model was compared, on {{ n }} images. With other seeds, the "
        "order of the models may differ.",
        n=n,
    )


def _unknown_of_maps(record: CompareRecord) -> Iterator[str]:
    """Yield how many maps were left out, and a note about maps by two methods."""
    for row in record.methods:
        if row.usable.value < 1:
            yield say(
                "{{ unusable }} of {{ row.usable.n }} maps of {{ row.model }} are uniform or not "
                "finite and were left out.",
                row=row,
                unusable=round((1 - row.usable.value) * (row.usable.n or 0)),
            )
    first, second = record.methods
    if first.method != second.method:
        yield say(
            "The maps are by two methods ({{ first.method }} for {{ first.model }}, "
            "{{ second.method }} for {{ second.model }}), so they may differ for that reason. "
            "Give one method in `--method` to rule it out.",
            first=first,
            second=second,
        )


def _few_disturbed(record: CompareRecord) -> Iterator[str]:
    """Yield a note if too few images were disturbed."""
    if not record.disturbed_pairs:
        return
    n = record.disturbed_pairs[0].difference.n or 0
    if n < FEWEST:
        yield say(
            "Only {{ n }} image{{ n|s }} {{ n|are }} disturbed, too few to compare the models.", n=n
        )
