"""The claims of `vitlens report --compare`: the release decision, accuracies and other changes."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Final

from vitlens.commands.report.record import ComparedRuns, MetricChange, SameImages
from vitlens.report.claims import Claim, found
from vitlens.report.document import State
from vitlens.report.numbers import in_words
from vitlens.report.prose import say
from vitlens.report.verdicts import Verdict
from vitlens.uncertainty import Estimate

# what is added to a comparison if the images may differ
_ON_IMAGES: Final[Mapping[SameImages, str]] = {
    "the same": "",
    "": "",
    "others": ", but the runs saw other images or labels",
    "not known": ", but it is not known if the runs saw the same images",
}
# The title by the decision; `_release_claim` fills it.
# Such as "top-1 accuracy fell from 91 % to 88 % (may be chance)"
_ACCURACY_FELL: Final = (
    "{{ fell[0].words }} fell from {{ fell[0].before|value }} to {{ fell[0].after|value }}"
    "{% if not fell[0].changed %} (may be chance){% endif %}"
)
# Such as "Do not release new yet: calibration error and 2 more got worse, but the runs saw other
# images or labels"
_REFUSED: Final = (
    "Do not release {{ later }}{% if on_images %} yet{% endif %}: {% if fell %}"
    + _ACCURACY_FELL
    + "{% endif %}"
    "{% if others %}{% if fell %}; {% endif %}{{ others[0] }}{% if others|length > 1 %} and "
    "{{ others|length - 1 }} more{% endif %} got worse{% endif %}{{ on_images }}"
)
# Such as "3 measures changed beyond chance"
_UNJUDGED: Final = (
    "{% if changed %}{{ changed|length }} measure{{ changed|s }} changed beyond "
    "chance{% else %}No measure changed beyond chance{% endif %}"
)
# Such as "Undecided whether to release new: it is not known if the runs saw the same images"
_UNDECIDED: Final = (
    "Undecided whether to release {{ later }}: {% if not tested %}nothing that can be tested was "
    "measured by both runs{% elif fell %}"
    + _ACCURACY_FELL
    + "{{ on_images }}{% elif images == 'others' %}"
    "the runs saw other images or labels{% else %}"
    "it is not known if the runs saw the same images{% endif %}"
)
# Such as "Nothing in new got worse beyond chance on 60 images". This is no permission, as with few
# images nothing differs beyond chance
_NOTHING_WORSE: Final = (
    "Nothing in {{ later }} got worse beyond chance{% if images_of_accuracy %} on "
    "{{ images_of_accuracy }} image{{ images_of_accuracy|s }}{% endif %}"
    "{% if failures %}, but it fails: {{ failures[0] }}{% if failures|length > 1 %} and "
    "{{ failures|length - 1 }} more{% endif %}{% endif %}"
)
_VERBS: Final = {"better": "improved", "worse": "got worse", "": "changed"}


def claims(runs: ComparedRuns) -> Iterator[Claim]:
    """Yield what got worse and what fails, the accuracies that differ, then other changes."""
    yield _release_claim(runs)
    if runs.failures:
        yield _failures_claim(runs)
    for row in runs.accuracies:
        yield _accuracy_claim(row, runs)
    for row in runs.changed:
        if not row.is_accuracy:
            yield _change_claim(row)


def _release_claim(runs: ComparedRuns) -> Claim:
    """Return what speaks against a release of the later model."""
    headline, state = _decision(runs)
    says = (
        "Of {{ tested|length }} measure{{ tested|length|s }} with intervals, "
        "{% if changed %}{{ changed|length }} changed beyond chance, "
        "{{ worse|length or 'none' }} of them for the worse{% if worse %}: "
        "{{ worse|names }}{% endif %}{% else %}none changed beyond chance{% endif %}."
    )
    values = {
        "changed": runs.changed,
        "tested": runs.tested,
        "worse": [row.words for row in runs.worse],
        "later": runs.later,
        "fell": runs.fell[:1],
        "others": _worse_measures(runs),
        "images": runs.same_images,
        "on_images": _ON_IMAGES[runs.same_images],
        "images_of_accuracy": runs.accuracy_images,
        "failures": runs.failures,
    }
    verdict = Verdict(state, say(says, **values).rstrip("."))
    return found(
        "regression",
        runs.later,
        says,
        headline=headline,
        given=values,
        verdict=verdict,
        kind="answer",
    )


def _worse_measures(runs: ComparedRuns) -> list[str]:
    """Return what else than accuracy got worse, without parts of the images if all images say it.

    If accuracy fell, that of dozens of parts of the images fell with it.
    """
    rows = [row for row in runs.worse if not row.is_accuracy]
    of_all_images = [row for row in rows if not row.is_of_part]
    if of_all_images or runs.fell:
        rows = of_all_images
    return [row.words for row in rows]


def _decision(runs: ComparedRuns) -> tuple[str, State]:
    """Return the title's template and the verdict of the release."""
    if runs.worse:
        return _REFUSED, "fail"
    can_be_judged = any(row.better for row in runs.tested)
    if runs.tested and not can_be_judged:
        return _UNJUDGED, "pass"
    may_be_other_images = runs.same_images in ("others", "not known")
    if not runs.tested or runs.fell or may_be_other_images:
        return _UNDECIDED, "inconclusive"
    return _NOTHING_WORSE, "pass"


def _failures_claim(runs: ComparedRuns) -> Claim:
    says = say(
        "{{ later }} itself fails, whether or not it changed: {{ failures|names }}.",
        later=runs.later,
        failures=runs.failures,
    )
    verdict = Verdict("fail", say("{{ failures|names }}", failures=runs.failures))
    return Claim("requirements and verdicts", runs.later, says, verdict=verdict, kind="answer")


def _accuracy_claim(row: MetricChange, runs: ComparedRuns) -> Claim:
    says = say(
        "**{{ row.words }}** {{ verb }} by {{ size }}, from {{ row.before|value }} to "
        "{{ row.after|value }}{% if not row.changed %}, which chance can "
        "explain{% endif %}{{ on_images }}.",
        row=row,
        verb="rose" if row.difference.value > 0 else "fell",
        size=in_words(_size(row.difference)),
        on_images=_ON_IMAGES[runs.same_images],
    )
    return Claim(
        "accuracy",
        row.metric,
        says,
        effect=row.difference,
        p=row.p_holm,
        kind="answer",
    )


def _change_claim(row: MetricChange) -> Claim:
    says = say(
        "**{{ row.words }}** {{ verb }}: {{ row.before }} before, {{ row.after }} after.",
        row=row,
        verb=_VERBS[row.direction],
    )
    return Claim(
        "change",
        row.metric,
        says,
        effect=row.difference,
        p=row.p_holm,
        kind="comparison" if row.direction else "expected fact",
    )


def _size(difference: Estimate) -> Estimate:
    """Return a difference without its sign, for a sentence that names its direction."""
    if difference.value >= 0 or difference.low is None or difference.high is None:
        return replace(difference, value=abs(difference.value))
    # the negative of the upper end is the lower end
    return replace(difference, value=-difference.value, low=-difference.high, high=-difference.low)


def unknown(runs: ComparedRuns) -> Iterator[str]:
    """Yield what could overturn the result."""
    if runs.same_images == "others":
        yield (
            "The runs saw other images or labels, or these in another order. Nothing is paired, "
            "and the images may cause a change."
        )
    if runs.same_images == "not known":
        yield (
            "It is not known if the runs saw the same images, because an earlier version wrote "
            "one of the folders. Nothing is paired, and the images may cause a change."
        )
    independent = [row for row in runs.tested if row.test == "independent"]
    if independent and runs.same_images == "the same":
        yield say(
            "{{ n }} measure{{ n|s }} {{ n|are }} compared as if the runs had other images. On "
            "the same images this misses small changes.",
            n=len(independent),
        )
    if runs.alone:
        yield say(
            "Measured by only one run, and not compared: {{ names|names }}.", names=runs.alone
        )
    if runs.judged_alone:
        yield say(
            "Judged in only one run, and not compared: {{ names|names }}.", names=runs.judged_alone
        )
