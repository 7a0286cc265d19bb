"""The discussion, whose sentences the numbers choose, and the table of which model to take for which need."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from vitlens.commands.attack.record import RobustPairRow
from vitlens.commands.compare.record import HARDENED, MAP_NUMBERS, METHODS, MapMethodRow
from vitlens.commands.features.record import PROBE_ACCURACY
from vitlens.commands.shared.calibration import CALIBRATION_ERROR
from vitlens.commands.shared.maps.on_object import ATTENTION, mass_of
from vitlens.commands.shared.trainings import TRAINING, differences
from vitlens.commands.study.report.whole.chapters import Study
from vitlens.report.document import Section, Sentence, Table
from vitlens.report.numbers import in_words
from vitlens.uncertainty import LEVEL, Estimate, Side, apart, beyond

_JUDGED: Final = 1.0  # 255ths


def discussion(study: Study) -> Iterator[Section]:
    """Where each architecture looks, why robustness differs, and the decision table."""
    sentences = [*_accuracy(study), *_where(study), *_robustness(study)]
    if sentences:
        question = "Why do the models differ, as far as this evidence goes?"
        yield Section("Discussion", tuple(sentences), question=question, leading=True)
    rows = tuple(_decisions(study))
    if rows:
        columns: dict[str, Callable[[Decision], str]] = {
            "need": lambda row: row.need,
            "model": lambda row: row.model,
            "evidence": lambda row: row.evidence,
            "holds for": lambda row: row.holds_for,
            "not tested": lambda row: row.not_tested,
        }
        clear = [row for row in rows if row.decided]
        answer = Sentence(
            f"For {len(clear)} of {len(rows)} needs one model is better beyond the intervals; for the others this "
            "study gives no reason to prefer one.",
            tuple(evidence for row in rows for evidence in row.estimates),
        )
        table = Table.of("Which model for which need", rows, columns)
        yield Section("Decision table", (answer,), (table,), question="Which model for which need?", leading=True)


def _accuracy(study: Study) -> Iterator[Sentence]:
    if study.pair is None:
        return
    vit, cnn = study.pair
    gain = study.metric(f"accuracy_difference/{vit}/{cnn}")
    if gain is None:
        return
    side = beyond(gain, 0.0)
    if side is Side.UNDECIDED:
        yield Sentence(f"{vit} and {cnn} do not differ significantly in accuracy ({in_words(gain)}).", (gain,))
        return
    better, worse = (vit, cnn) if side is Side.ABOVE else (cnn, vit)
    budgets = study.record.rows(TRAINING)
    differing = differences(budgets)
    why = (
        f"as the trainings differ ({', '.join(difference.what.replace('_', ' ') for difference in differing)}), this "
        "cannot be put down to the architectures"
        if differing
        else "both were trained with the same budget"
        if any(budget.known for budget in budgets)
        else "how they were trained is not known"
    )
    yield Sentence(
        f"{better} classifies {in_words(Estimate(abs(gain.value), unit='points'))} more of the images correctly than "
        f"{worse}; {why}.",
        (gain, *budgets),
    )


def _where(study: Study) -> Iterator[Sentence]:
    """Where the ViT's attention goes, and the maps of both models by the methods that were compared."""
    attention = next(study.of("attention"), None)
    rows = [] if attention is None else mass_of(attention.record.on_object, ATTENTION)
    if rows:
        first, best = rows[0], max(rows, key=lambda row: row.estimate.value)
        start = "from its first layer on" if best.layer == first.layer else f"most in layer {best.layer}"
        share, chance = in_words(best.estimate), best.chance_words
        words = {
            Side.ABOVE: f"finds the object by attention, {start}: {share} of the mass, more than {chance}",
            Side.BELOW: f"attends beside the object: {share} of the mass at most, less than {chance}",
            Side.UNDECIDED: f"is not shown to attend to the object more than {chance}: {share} of the mass",
        }
        yield Sentence(f"{study.vits[0]} {words[best.side]}.", (best, best.estimate, best.of_baseline))
    compared = next(study.of("compare"), None)
    if compared is None or study.pair is None:
        return
    methods: dict[str, MapMethodRow] = {row.model: row for row in compared.record.rows(METHODS)}
    inside = {alias: compared.record.metrics.get(MAP_NUMBERS["inside"](model=alias)) for alias in study.pair}
    vit, cnn = study.pair
    first_map, second_map = inside[vit], inside[cnn]
    if first_map is None or second_map is None or vit not in methods or cnn not in methods:
        return
    how = {Side.ABOVE: "more", Side.BELOW: "less", Side.UNDECIDED: "not significantly more or less"}
    same = methods[vit].method == methods[cnn].method
    note = "" if same else "; the methods differ, so this compares the maps, not the models"
    yield Sentence(
        f"The maps of {vit} ({methods[vit].method}) lie {how[apart(first_map, second_map)]} on the object than those "
        f"of {cnn} ({methods[cnn].method}): {in_words(first_map)} and {in_words(second_map)} of their mass{note}.",
        (first_map, second_map, methods[vit], methods[cnn]),
    )


def _robust_pair(study: Study) -> RobustPairRow | None:
    """Both models under the strongest attack, at the smallest epsilon with a significant difference, else 1/255."""
    chapter = next(study.of("attack"), None)
    if chapter is None or study.pair is None:
        return None
    curves = [row for row in chapter.record.curves if row.norm == "linf" and row.epsilon > 0]
    if not curves:
        return None
    strongest = min(curves, key=lambda row: (row.accuracy.value, -row.epsilon)).attack
    rows = [
        row for row in chapter.record.pairs if row.attack == strongest and {row.first, row.second} == set(study.pair)
    ]
    significant = [row for row in rows if row.p_holm <= LEVEL]
    judged = [row for row in rows if row.epsilon == _JUDGED]
    return min(significant, key=lambda row: row.epsilon, default=None) or next(iter(judged or rows), None)


def _robustness(study: Study) -> Iterator[Sentence]:
    row = _robust_pair(study)
    if row is None or study.pair is None:
        return
    vit, cnn = study.pair
    if row.p_holm > LEVEL:
        yield Sentence(
            f"Under {row.title} at {row.at} the models do not differ significantly "
            f"({in_words(row.difference)}, {row.first} minus {row.second}).",
            (row,),
        )
    else:
        better = row.first if row.difference.value > 0 else row.second
        yield Sentence(
            f"{better} is more robust under {row.title} at {row.at}: "
            f"{in_words(row.difference)} ({row.first} minus "
            f"{row.second}).",
            (row,),
        )
    yield from _frequencies(study, vit, cnn)


def _frequencies(study: Study, vit: str, cnn: str) -> Iterator[Sentence]:
    """Which model depends more on high frequencies, by its accuracy on blurred images relative to clean ones."""
    losses = {}
    for alias in (vit, cnn):
        clean, blurred = (
            study.metric(f"accuracy/{alias}"),
            study.metric(HARDENED(model=alias, kind="low-pass", level="0.2")),
        )
        if clean is None or blurred is None:
            return
        losses[alias] = (clean, blurred)
    order = sorted(losses, key=lambda alias: losses[alias][1].value - losses[alias][0].value)
    if apart(losses[order[0]][1], losses[order[1]][1]) is Side.UNDECIDED:
        words = "do not differ significantly on images without high frequencies, which explain no difference"
        yield Sentence(
            f"{vit} and {cnn} {words} in robustness ({in_words(losses[vit][1])} and {in_words(losses[cnn][1])} on "
            "blurred images).",
            (losses[vit][1], losses[cnn][1]),
        )
        return
    worse, better = order
    yield Sentence(
        f"{worse} depends more on high frequencies than {better}: on blurred images it keeps "
        f"{in_words(losses[worse][1])}, {better} {in_words(losses[better][1])}. Where {worse} is also the "
        "less robust one, perturbations of high frequency are a likely reason; where it is not, they are not.",
        (losses[worse][1], losses[better][1]),
    )


@dataclass(frozen=True)
class Decision:
    """One need: the model to take, the evidence, where it holds, and what was not tested."""

    need: str
    model: str
    evidence: str
    holds_for: str
    not_tested: str
    decided: bool
    estimates: tuple[Estimate, ...]


@dataclass(frozen=True)
class Need:
    """A need and the metric that decides it; higher: whether more is better."""

    need: str
    metric: Callable[[str], str]
    higher: bool
    holds_for: str
    not_tested: str


_NEEDS: Final = (
    Need("correct answers", lambda alias: f"accuracy/{alias}", True, "images like the test images", "other data"),
    Need("probabilities that can be believed", lambda alias: CALIBRATION_ERROR(model=alias), False,
         "images like the test images", "shifted data"),
    Need("features for another task", lambda alias: PROBE_ACCURACY(model=alias), True, "the same classes, linear probe",
         "other tasks"),
    Need("objects that are half hidden", lambda alias: HARDENED(model=alias, kind="occlusion", level="0.5"), True,
         "grey squares on half of the image", "real occluders"),
    Need("blurred images", lambda alias: HARDENED(model=alias, kind="low-pass", level="0.2"), True,
         "a low-pass filter", "other blur"),
    Need("speed", lambda alias: f"latency/{alias}/1", False, "one image at a time on this machine",
         "other hardware"),
    Need("few parameters", lambda alias: f"parameters/{alias}", False, "these models", "quantised weights"),
)  # fmt: skip


def _decisions(study: Study) -> Iterator[Decision]:
    if study.pair is None:
        return
    for need in _NEEDS:
        known = {alias: study.metric(need.metric(alias)) for alias in study.pair}
        estimates = {alias: estimate for alias, estimate in known.items() if estimate is not None}
        if len(estimates) == 2:
            yield _decision(need, estimates, study.metric("accuracy_difference/{}/{}".format(*study.pair)))
    row = _robust_pair(study)
    if row is not None:
        decided = row.p_holm <= LEVEL
        better = row.first if row.difference.value > 0 else row.second
        where = f"{row.title} at {row.at}"
        evidence = f"{where}: {in_words(row.difference)} ({row.first} minus {row.second})"
        yield Decision(
            "small adversarial changes", better if decided else "either", evidence, "L∞, white box, that epsilon",
            "stronger attacks, other norms", decided, (row.difference,),
        )  # fmt: skip


def _decision(need: Need, estimates: dict[str, Estimate], difference: Estimate | None) -> Decision:
    """difference: of the accuracies, on the same images."""
    (first, one), (second, other) = estimates.items()
    paired = need.need == _NEEDS[0].need and difference is not None
    side = beyond(difference, 0.0) if paired and difference is not None else apart(one, other)
    exact = one.low is None and other.low is None and one.value != other.value  # a count needs no interval
    decided = side is not Side.UNDECIDED or exact
    better = first if (one.value > other.value) == need.higher else second
    evidence = "; ".join(f"{alias} {in_words(estimate)}" for alias, estimate in estimates.items())
    return Decision(
        need.need, better if decided else "either", evidence, need.holds_for, need.not_tested, decided, (one, other)
    )
