"""Why transfer wins, or does not, and what to do: conclusions that follow from the numbers by stated rules."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

from vitlens.commands.study.report.transfer.facts import Gap, TransferFacts, share_estimate, words
from vitlens.commands.study.transfer.record import PROBE_GAIN
from vitlens.commands.study.transfer.regimes import DISTILLED, FROZEN, FULL, LAST, MARGIN, PRETRAINED, RANDOM, SCRATCH
from vitlens.report.document import Finding, Section, Sentence, Table, Verdict
from vitlens.report.findings import finding
from vitlens.report.numbers import in_time, in_words, number
from vitlens.uncertainty import Estimate, Side, apart, beyond

Outcome = Literal["wins", "loses", "not decided"]
State = Literal["supported", "contradicted", "not decided"]
Choice = Literal["frozen", "full", "from scratch", "frozen first"]
_BY_SIDE: Final[dict[Side, State]] = {
    Side.ABOVE: "supported", Side.BELOW: "contradicted", Side.UNDECIDED: "not decided",
}  # fmt: skip
_RULE: Final = (
    "Transfer wins where the frozen, the last-blocks or the full regime is significantly better than training from "
    "scratch, and loses where all three are significantly worse (p (Holm) to 0.05). A reason is supported where the "
    "number that it predicts to be above 0 is so, and contradicted where it is below 0: by p (Holm) for differences of "
    "regimes, by the 95 % interval for the others."
)


@dataclass(frozen=True)
class Reason:
    """A possible reason for the outcome: what it claims, the number that must be above 0 (points), and its state."""

    claim: str
    measured: str
    value: Estimate
    state: State
    rows: tuple[object, ...]


def outcome(facts: TransferFacts) -> Outcome:
    """Whether transfer wins over training from scratch."""
    sides = [facts.gap(regime, SCRATCH).side for regime in (FULL, LAST, FROZEN)]
    if Side.ABOVE in sides:
        return "wins"
    return "loses" if set(sides) == {Side.BELOW} else "not decided"


def reasons(facts: TransferFacts) -> tuple[Reason, ...]:
    """Every reason that was measured, with its state."""
    gain = facts.record.metric(PROBE_GAIN(model=PRETRAINED, against=RANDOM))
    found = [
        Reason(
            "the pretrained features separate these classes better than random ones",
            "linear probe on the last layer: pretrained minus random weights",
            gain,
            _BY_SIDE[beyond(gain, 0.0)],
            (gain,),
        ),
        _of_gap("the unchanged features alone are enough to win", facts.gap(FROZEN, SCRATCH)),
        _of_gap("adapting the features adds to it", facts.gap(FULL, FROZEN)),
        _of_gap("a teacher's outputs help without its weights", facts.gap(DISTILLED, SCRATCH)),
    ]
    return (*found, *_few_images(facts))


def _of_gap(claim: str, gap: Gap) -> Reason:
    measured = f"{words(gap.first)} minus {words(gap.second)}"
    return Reason(claim, measured, gap.estimate, _BY_SIDE[gap.side], gap.rows)


def _few_images(facts: TransferFacts) -> Iterator[Reason]:
    """That the images are few: the advantage is greater with fewer. By intervals that do not overlap."""
    rows = facts.share_gaps(FULL)
    if len(rows) < 2:
        return
    fewest, most = share_estimate(rows[0]), share_estimate(rows[-1])
    change = Estimate(fewest.value - most.value, unit="points")
    measured = (
        f"advantage of full over from scratch: on {rows[0].images} images minus on {rows[-1].images}; by intervals "
        "that do not overlap"
    )
    state = _BY_SIDE[apart(fewest, most)]
    yield Reason("the advantage is one of few images", measured, change, state, (rows[0], rows[-1], change))


def why_section(facts: TransferFacts) -> Section:
    """The answer, and the table of reasons."""
    found = reasons(facts)
    gap = facts.gap(FULL, SCRATCH)
    columns = {
        "reason": lambda each: each.claim,
        "number that must be above 0": lambda each: each.measured,
        "points": lambda each: in_words(each.value, with_n=False),
        "the numbers say": lambda each: each.state,
    }
    sentences = (Sentence(_answer(facts, gap, found), (*gap.rows, *(row for each in found for row in each.rows))),)
    return Section(
        "Why transfer wins, or does not",
        (*sentences, *_catch_up_in_short(facts), Sentence(_RULE, says="method")),
        (Table.of("Reasons, and what was measured", found, columns),),
        question="Does what was learned elsewhere help here, and by what?",
        leading=True,
    )


def _answer(facts: TransferFacts, gap: Gap, found: tuple[Reason, ...]) -> str:
    told = {
        "wins": "**Transfer wins.**",
        "loses": "**Transfer loses.**",
        "not decided": "**It is not decided whether transfer wins.**",
    }[outcome(facts)]
    parts = [f"{told} Full minus from scratch: {in_words(gap.estimate, with_n=False)}."]
    for state in ("supported", "contradicted", "not decided"):
        named = [f"{each.claim} ({number(each.value.value, 1)} points)" for each in found if each.state == state]
        if named:
            parts.append(f"{state.capitalize()}: {'; '.join(named)}.")
    return " ".join(parts)


def _catch_up_in_short(facts: TransferFacts) -> Iterator[Sentence]:
    """From which share of full training on all images alone training from scratch would be matched."""
    whole = facts.shares(SCRATCH)[-1]
    enough = next((row for row in facts.shares(FULL) if row.accuracy >= whole.accuracy), None)
    if enough is None:
        text = (
            f"On no number of images that was measured does full training reach the mean accuracy of training from "
            f"scratch on all {whole.images}."
        )
        yield Sentence(text, (whole, *facts.shares(FULL)))
    elif enough.images < whole.images:
        text = (
            f"Full training on {enough.images} images reaches the mean accuracy that training from scratch reaches on "
            f"all {whole.images} ({_percent(enough.accuracy)} against {_percent(whole.accuracy)})."
        )
        yield Sentence(text, (whole, enough))


def _percent(share: float) -> str:
    return in_words(Estimate(share))


def choice(facts: TransferFacts) -> Choice:
    """Frozen or full: full where it is significantly better, frozen where full gains at most MARGIN points."""
    if outcome(facts) == "loses":
        return "from scratch"
    gap = facts.gap(FULL, FROZEN)
    if gap.side is not Side.UNDECIDED:
        return "full" if gap.side is Side.ABOVE else "frozen"
    high = gap.estimate.high
    return "frozen" if high is not None and high <= MARGIN else "frozen first"


def recommendation(facts: TransferFacts) -> Section:
    """The decision that the numbers support, the range in which it holds, and what was not tested."""
    sentences = (_decision(facts), *_range(facts), *_not_tested(facts))
    return Section("Recommendation", sentences, question="Frozen or full?", leading=True)


def _decision(facts: TransferFacts) -> Sentence:
    gap, full, frozen = facts.gap(FULL, FROZEN), facts.regime(FULL), facts.regime(FROZEN)
    size = in_words(gap.estimate, with_n=False)
    told = {
        "full": f"**Train all weights**: full is better than frozen by {size}.",
        "frozen": f"**Keep the model frozen and train a head**: full minus frozen is {size}.",
        "from scratch": "**Train from scratch**: all regimes that start from the pretrained weights are worse.",
        "frozen first": f"**Undecided; start with the frozen model**, which trains {frozen.trained:,} of "
        f"{frozen.parameters:,} parameters: full minus frozen is {size}. More test images or seeds may decide.",
    }[choice(facts)]
    parts = [told, f"A frozen training took {in_time(frozen.seconds)}, a full one {in_time(full.seconds)}."]
    if outcome(facts) == "not decided":
        parts.append(
            "No regime that starts from the pretrained weights is shown to be better than training from scratch."
        )
    return Sentence(" ".join(parts), (*gap.rows, full, frozen))


def _range(facts: TransferFacts) -> Iterator[Sentence]:
    design = facts.design
    rows = list(zip(facts.shares(FULL), facts.shares(FROZEN), strict=True))
    held = [full.images for full, frozen in rows if full.accuracy > frozen.accuracy]
    others = [full.images for full, frozen in rows if full.accuracy <= frozen.accuracy]
    parts = [f"full is above frozen in mean accuracy on {_listed(held)} training images"] if held else []
    parts += [f"frozen is at least as high as full on {_listed(others)}"] if others else []
    yield Sentence(
        f"Range: {design.model}, {design.classes} classes of {design.data}, {rows[0][0].images} to "
        f"{design.train_images} training images, {design.epochs} epochs ({facts.regime(FROZEN).epochs} of the head "
        f"alone). Within it, {' and '.join(parts)}.",
        (design, facts.regime(FROZEN), *(row for pair in rows for row in pair)),
    )


def _listed(counts: list[int]) -> str:
    *most, last = (f"{count:,}" for count in counts)
    return f"{', '.join(most)} and {last}" if most else last


def _not_tested(facts: TransferFacts) -> Iterator[Sentence]:
    design = facts.design
    yield Sentence(
        f"Not tested: more than {design.train_images:,} training images, other models than {design.model}, more than "
        f"{design.epochs} epochs, other learning rates than the one of each regime, other augmentation than mirroring, "
        "another number of last blocks, other teachers than the fully trained model, and test images from another "
        "source.",
        (design,),
    )


def verdicts(facts: TransferFacts) -> Iterator[Verdict]:
    """Whether transfer wins; with one seed, nothing is known about other seeds."""
    design, gap = facts.design, facts.gap(FULL, SCRATCH)
    threshold = "a regime with pretrained weights above training from scratch, p (Holm) to 0.05"
    if design.seeds < 2:
        because = "one seed: how much seeds differ is not known; --seeds 3"
        yield Verdict("transfer", "inconclusive", gap.estimate, threshold, because)
        return
    found = outcome(facts)
    state: Literal["pass", "fail", "inconclusive"] = (
        "pass" if found == "wins" else "fail" if found == "loses" else "inconclusive"
    )
    yield Verdict("transfer", state, gap.estimate, threshold, f"full minus from scratch; transfer {_verb(found)}")


def _verb(found: Outcome) -> str:
    return "is not shown to win or to lose" if found == "not decided" else found


def findings(facts: TransferFacts) -> Iterator[Finding | None]:
    """The differences that are significant over seeds, and the probe's."""
    if facts.design.seeds < 2:
        return
    for first, second in ((FULL, SCRATCH), (FROZEN, SCRATCH), (FULL, FROZEN), (FULL, LAST), (DISTILLED, SCRATCH)):
        gap = facts.gap(first, second)
        own, other = facts.accuracy(first.label), facts.accuracy(second.label)
        word = "higher" if gap.estimate.value > 0 else "lower"
        yield finding(
            f"**{first.words}** reaches a {word} top-1 accuracy than **{second.words}**, "
            f"{in_words(own, with_n=False)} against {in_words(other, with_n=False)}.",
            gap.estimate,
            kind="answer",
            p=gap.row.p_holm,
            figure="regimes",
            rows=(own, other, gap.row),
        )
    gain = facts.record.metric(PROBE_GAIN(model=PRETRAINED, against=RANDOM))
    word = "more" if gain.value > 0 else "less"
    yield finding(
        f"A linear probe on the last layer is {word} accurate with the pretrained weights than with random ones.",
        gain,
        kind="fact",
        figure="probes",
        rows=(gain,),
    )
