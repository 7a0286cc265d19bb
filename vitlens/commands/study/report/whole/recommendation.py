"""The ViT or the CNN: the decision that the paired test of accuracy and the costs of a whole study support."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from vitlens.commands.run.describe import data_sentences
from vitlens.commands.shared.choose import MARGIN, SEEN
from vitlens.commands.shared.pairs import PairRow
from vitlens.commands.shared.trainings import TRAINING, differences
from vitlens.commands.study.report.whole.chapters import Study
from vitlens.report.document import Section, Sentence, sentences
from vitlens.report.numbers import in_words, number
from vitlens.uncertainty import LEVEL, POWER, Estimate, power_of

_RULE: Final = (
    "The rule: the cheaper model (fewer operations, then parameters) where it is significantly more accurate "
    f"(McNemar's test, Holm's correction) or shown to lose at most {MARGIN:g} points (the whole interval of the paired "
    "difference); else the other one if that is significantly more accurate; else there is no difference that the "
    f"study can see, and the cheaper is named, if it would have seen one of {SEEN:g} points (with a probability of "
    f"{100 * POWER:.0f} %); else it is inconclusive."
)
_UNTESTED: Final = (
    "Not tested by this decision: other data and classes, other sizes of either model, the same budget of operations "
    "or of tuning for both, pretrained weights where these models have none, and needs other than accuracy and cost "
    "(the decision table)."
)

Outcome = Literal["cheaper", "better", "no-difference", "inconclusive"]


@dataclass(frozen=True)
class ModelChoice:
    """chosen: the alias to take (None: inconclusive); cheaper, other: the two models by cost, the ViT first where they
    cost the same; gain: accuracy of the cheaper minus the other's in points; detectable: in points."""

    outcome: Outcome
    chosen: str | None
    cheaper: str
    other: str
    gain: Estimate
    pair: PairRow
    detectable: float | None


def choose_model(study: Study) -> ModelChoice | None:
    """The decision between the study's ViT and its CNN; None where they were not compared on the same images."""
    if study.pair is None:
        return None
    vit, cnn = study.pair
    rows = [row for chapter in study.of("evaluate") for row in chapter.record.pairs]
    pair = next((row for row in rows if {row.first, row.second} == {vit, cnn}), None)
    if pair is None:
        return None
    measured = study.metric(f"accuracy_difference/{pair.first}/{pair.second}")
    if measured is None:
        return None
    cheaper, other = sorted(study.pair, key=lambda alias: _cost(study, alias))
    gain = measured if pair.first == cheaper else _reversed(measured)
    detectable = _detectable(pair)
    outcome: Outcome = "inconclusive"
    if pair.p_holm <= LEVEL and gain.value > 0:
        outcome = "better"
    elif gain.low is not None and gain.low >= -MARGIN:
        outcome = "cheaper"
    elif pair.p_holm <= LEVEL:
        outcome = "better"
    elif detectable is not None and detectable <= SEEN:
        outcome = "no-difference"
    better = cheaper if gain.value > 0 else other
    chosen = {"better": better, "inconclusive": None}.get(outcome, cheaper)
    return ModelChoice(outcome, chosen, cheaper, other, gain, pair, detectable)


def _cost(study: Study, alias: str) -> tuple[float, float]:
    """Operations and parameters of a model, 0 where they were not measured."""
    flops, parameters = (study.metric(f"{name}/{alias}") for name in ("flops", "parameters"))
    return (0.0 if flops is None else flops.value, 0.0 if parameters is None else parameters.value)


def _reversed(gain: Estimate) -> Estimate:
    low, high = (None if end is None else -end for end in (gain.high, gain.low))
    return Estimate(-gain.value, low, high, gain.n, gain.unit)


def _detectable(pair: PairRow) -> float | None:
    """The smallest difference in points that a paired comparison on these images would have seen."""
    counts = [pair.only_first_right, pair.only_second_right, pair.both_right + pair.both_wrong]
    power = power_of(np.repeat([100.0, -100.0, 0.0], counts))
    return None if power is None or not power.error else power.detectable


def recommendation_section(study: Study) -> Iterator[Section]:
    """The section with the decision, its range, and what was not tested."""
    choice = choose_model(study)
    if choice is None:
        return
    lines = (_answer(study, choice), *_seen(choice), *_range(study, choice), *sentences(_UNTESTED, says="setting"))
    yield Section(
        "Recommendation",
        (*lines, *sentences(_RULE, says="method")),
        question="The ViT or the CNN?",
        leading=True,
    )


def _answer(study: Study, choice: ModelChoice) -> Sentence:
    accuracies = [study.metric(f"accuracy/{alias}") for alias in (choice.cheaper, choice.other)]
    said = " and ".join(f"{alias} {in_words(each)}" for alias, each in zip((choice.cheaper, choice.other), accuracies))
    gap = f"{choice.cheaper} minus {choice.other} {in_words(choice.gain, with_n=False)}"
    ratio = _ratio(study, choice)
    price = "" if ratio is None else f", for {number(ratio)} times the operations of `{choice.other}`"
    begin = {
        "cheaper": f"Take **{choice.cheaper}**, the cheaper one: it is shown to lose at most {MARGIN:g} points{price}",
        "better": f"Take **{choice.chosen}**: it has the higher top-1 accuracy",
        "no-difference": "There is no difference in accuracy that this study can see. Take the cheaper, "
        f"**{choice.cheaper}**{price}",
        "inconclusive": "Inconclusive: neither a difference in accuracy is shown, nor that there is none of "
        f"{MARGIN:g} points; the cheaper is `{choice.cheaper}`{price}",
    }[choice.outcome]
    if choice.outcome == "better" and ratio is not None:
        times = ratio if choice.chosen == choice.cheaper else 1 / ratio
        loser = choice.other if choice.chosen == choice.cheaper else choice.cheaper
        begin += f", for {number(times)} times the operations of `{loser}`"
    known = [each for each in accuracies if each is not None]
    ratios = () if ratio is None else (ratio, 1 / ratio)
    return Sentence(
        f"{begin}. Top-1 accuracy: {said}; {gap}, p (McNemar, Holm) {choice.pair.p_holm:.2g}.",
        (choice.pair, choice.gain, *known, *ratios, MARGIN),
    )


def _ratio(study: Study, choice: ModelChoice) -> float | None:
    """Operations of the cheaper model over the other's."""
    own, other = (study.metric(f"flops/{alias}") for alias in (choice.cheaper, choice.other))
    return None if own is None or other is None or not other.value else own.value / other.value


def _seen(choice: ModelChoice) -> Iterator[Sentence]:
    if choice.detectable is not None:
        yield Sentence(
            f"On these images the study finds a true difference with a probability of {100 * POWER:.0f} % from "
            f"{number(choice.detectable, 1)} points on; smaller ones it may miss.",
            (choice.pair, choice.detectable, 100 * POWER),
        )


def _range(study: Study, choice: ModelChoice) -> Iterator[Sentence]:
    """Where the decision holds: these images, these trainings."""
    for chapter in study.of("evaluate"):
        for data in data_sentences(chapter.record)[:1]:
            yield Sentence(f"This holds for images like those tested: {data.text}", data.rows, "setting")
    budgets = [row for row in study.record.rows(TRAINING) if row.model in (choice.cheaper, choice.other) and row.epochs]
    if budgets:
        differing = differences(budgets)
        what = " and ".join(each.what.replace("_", " ") for each in differing)
        unequal = f"; the trainings differ in {what}, so it is not one between the architectures" if differing else ""
        yield Sentence(
            f"It is between these two trained models: each was trained once, so other seeds were not tested{unequal} "
            "(`vitlens study --kind data` trains a ViT and a CNN with several seeds).",
            (*budgets, *differing),
        )
