"""The claims of `vitlens attack`: robustness, its differences, and the soundness of attacks."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

from vitlens.commands.attack import reason_claims
from vitlens.commands.attack.corruption_claims import (
    corruption_cost,
    corruption_gap,
    largest_corruption_gap,
)
from vitlens.commands.attack.record import (
    FAR,
    JUDGED,
    AttackCheckRow,
    AttackCurveRow,
    AttackedModelRow,
    AttackRecord,
    RobustPairRow,
    TransferRow,
    strongest,
)
from vitlens.commands.attack.verdict import (
    Evidence,
    describe_check,
    describe_first,
    failed_checks,
)
from vitlens.commands.shared.comparison import signed
from vitlens.commands.shared.maps.report import count_uniform, uniform_claim
from vitlens.report.claims import FEWEST, SMALLEST, Claim, clear, enough, found
from vitlens.report.document import State
from vitlens.report.prose import listed, say
from vitlens.report.verdicts import Verdict
from vitlens.uncertainty import LEVEL, Estimate

ORDER: Final = ("failed", "inconclusive")
_CHANGE: Final = (  # the beginning of a sentence about images that an attack changes
    "{% if row.norm == 'linf' %}Changing every pixel by at most {{ row.at }} "
    "({{ attack }}) {% else %}The attack {{ row.title }} at {{ row.at }} {% endif %}"
)


def claims(record: AttackRecord) -> Iterator[Claim]:
    """Yield the claims of an attack report.

    They are on masked gradients, on which model is more robust, on the robustness of each model,
    and on the accuracy lost to corruptions.
    """
    enough_images = record.images >= FEWEST
    if record.images == 1:
        yield from _of_one_image(record)
    masking_signs: dict[str, list[Claim]] = {}  # by model
    for row in record.overall:
        masking_signs[row.model] = []
        if enough_images:
            masking_signs[row.model] += _masking_signs(record, row.model)
        yield from masking_signs[row.model]
    if enough_images:
        pairs = dict.fromkeys((row.first, row.second) for row in record.pairs)  # each pair once
        for first, second in pairs:
            yield _difference(record, first, second)
    for row in record.overall:
        curves = [
            curve for curve in record.curves if curve.model == row.model and curve.epsilon > 0
        ]
        if curves:
            yield _robustness(record, row, curves)
    for row in record.overall:
        soundness = _soundness(record, row)
        if masking_signs[row.model] or not enough_images:
            # the signs above say it, or too few images were attacked for a sentence
            soundness = replace(soundness, says="")
        yield soundness
        if row.lost is not None:
            yield corruption_cost(record, row, row.lost)
    yield from largest_corruption_gap(record)
    if enough_images:
        yield from reason_claims.claims(record)
    for model, example in record.examples.items():
        maps = [*example.before, *example.after]  # of the true class
        yield from uniform_claim(model, {"the true class": count_uniform(maps)}, len(maps))


def _of_one_image(record: AttackRecord) -> Iterator[Claim]:
    """Yield what the attack does to the prediction of the only image, for each model."""
    for row in record.overall:
        example = record.examples.get(row.model)
        values: dict[str, Any] = {"model": row.model, "sample": row.sample}
        if example is not None and len(example.image):
            words = (
                "{{ before }} ({{ before_p|percent }}) becomes {{ after }} ({{ after_p|percent }}) "
                "under {{ sample }}"
            )
            # of image 0, the only one: row 0 is before the attack, row 1 after it
            values["before"], values["after"] = example.answers[:, 0].tolist()
            values["before_p"], values["after_p"] = example.probability[:, 0].tolist()
        elif _is_broken(record, row.model):
            continue
        else:
            words = "The prediction of {{ model }} stays the same under every attack tried"
        yield found(
            "one image",
            row.model,
            f"{words}.",
            given=values,
            kind="answer",
            evidence="intervened",
            place="curves",
            headline=words,
        )


def _is_broken(record: AttackRecord, model: str) -> bool:
    """Return True if a model has lost all accuracy under some attack."""
    return any(row.model == model and row.accuracy.value == 0 for row in record.curves)


def _masking_signs(record: AttackRecord, model: str) -> Iterator[Claim]:
    """Yield the signs that attacks on a model fail because of its gradients.

    These are the clearest failed self-check, and transferred images that break it more often than
    its own.
    """
    faults = []
    for check in failed_checks(record, model):
        if check.share is None:
            continue
        fault = _fault(check, check.share)
        if clear(check.share, fault.reference):  # the share by chance, see `_fault`
            faults.append(fault)
    if faults:
        yield max(faults, key=lambda claim: claim.rank)
    transfer_by_source = {row.made_for: row for row in record.transfer if row.shown_to == model}
    direct = transfer_by_source.pop(model, None)  # images made for the model itself
    other = min(transfer_by_source.values(), key=lambda row: row.accuracy.value, default=None)
    if direct is None or other is None:
        return
    if _is_clearly_lower(other.accuracy, direct.accuracy):
        yield _transfer_beats_attack(direct, other, record.overall[0].sample)


def _is_clearly_lower(accuracy: Estimate, reference: Estimate) -> bool:
    return accuracy.value < reference.value and clear(reference, accuracy.value)


def _transfer_beats_attack(direct: TransferRow, other: TransferRow, sample: str) -> Claim:
    """Return the claim that images made for another model break a model more often than its own."""
    return found(
        "transfer beats the attack",
        direct.shown_to,
        "The gradients of **{{ direct.shown_to }}** are masked: adversarial images made "
        "for {{ other.made_for }} ({{ sample }}) lower its accuracy to "
        "{{ other.accuracy|value }}, those made for itself only to {{ effect }}.",
        direct.accuracy,
        given={"direct": direct, "other": other, "sample": sample},
        reference=other.accuracy.value,
        kind="answer",
        evidence="intervened",
        place="transfer",
        headline="The gradients of {{ direct.shown_to }} are masked: its robustness is not known",
    )


def _fault(row: AttackCheckRow, share: Estimate) -> Claim:
    """Return a failed self-check, with the share of the images that contradict it."""
    compares_attacks = ", " in row.attack  # a check of two attacks names both
    fault = "The attacks on {{ m }} are too weak"
    if compares_attacks or row.name in ("gradients", "gradients read"):
        fault = "The gradients of {{ m }} are masked"
    # of two equally strong attacks, each breaks half of the images that only one of them breaks
    reference = 0.5 if compares_attacks else 0.0
    return found(
        "masked gradients",
        row.model,
        fault + " (self-check {{ check }}): its accuracy under attack is no sign of robustness.",
        share,
        given={"m": row.model, "check": describe_check(row)},
        reference=reference,
        kind="answer",
        headline=fault + ": its robustness is not known",
        evidence="intervened",
        place="curves",
    )


def _difference(record: AttackRecord, first: str, second: str) -> Claim:
    """Return which of two models keeps more accuracy.

    Of the tests that can show a difference, the one with the largest difference decides.
    """
    tests = []
    informative_tests = []
    large = []
    for row in record.pairs:
        if (row.first, row.second) != (first, second) or row.attack == "clean":
            continue
        tests.append(row)
        if not informative(record, row):
            continue
        informative_tests.append(row)
        if row.p_holm <= LEVEL and abs(row.difference.value) >= SMALLEST:
            large.append(row)
    if large:
        largest = max(large, key=lambda row: abs(row.difference.value))
        return _difference_at(record, largest, large, informative_tests)
    values = {"first": first, "second": second, "tests": tests, "informative": informative_tests}
    claim = _under_attack(first, second)
    return claim(
        "{% if informative %}"
        "In none of {{ informative|length }} paired tests under attack do **{{ first }}** and "
        "**{{ second }}** differ significantly (McNemar, Holm)."
        "{% else %}"
        "**{{ first }}** and **{{ second }}** cannot be compared under attack: in all "
        "{{ tests|length }} paired tests both have lost all accuracy or none."
        "{% endif %}",
        headline="{{ first }} and {{ second }} "
        "{% if informative %}do not differ significantly{% else %}cannot be compared{% endif %} "
        "under attack",
        given=values,
        is_null=True,
    )


def _under_attack(first: str, second: str) -> Callable[..., Claim]:
    """Return a function that makes claims on two models under attack.

    These claims rest on the verdicts on both models.
    """
    verdicts = []
    for question in ("robustness", "self-checks"):
        verdicts += [(question, first), (question, second)]
    return partial(
        found,
        "difference under attack",
        f"{first} and {second}",
        kind="answer",
        evidence="intervened",
        place="curves",
        rests_on=tuple(verdicts),
    )


def _difference_at(
    record: AttackRecord,
    row: RobustPairRow,
    large: Sequence[RobustPairRow],
    informative_tests: Sequence[RobustPairRow],
) -> Claim:
    """Return the claim of one paired test.

    large: the tests with a significant difference of at least SMALLEST.
    informative_tests: the tests that can show a difference.
    """
    first_leads = row.difference.value >= 0
    better = row.first if first_leads else row.second
    worse = row.second if first_leads else row.first
    values = {
        "row": row,
        "attack": _name(row),
        "better": better,
        "worse": worse,
        "kept": _compared_accuracies(record, row),
        "clean": {overall.model: overall.clean for overall in record.overall},
        "informative": informative_tests,
        "against": [test for test in large if test.difference.value * row.difference.value < 0],
        "p": "< 0.001" if row.p_holm < 0.001 else f"= {row.p_holm:.2g}",
    }
    claim = _under_attack(row.first, row.second)
    return claim(
        "Under {{ row.title }} at {{ row.at }}, **{{ better }}** keeps {{ kept[better]|value }} "
        "accuracy and **{{ worse }}** {{ kept[worse]|value }}. The difference is "
        "{{ effect|alone }} (McNemar's exact test, Holm, p {{ p }}){% if against %}; in "
        "{{ against|length }} of {{ informative|length }} tests it is reversed{% endif %}.",
        signed(row.difference, first_leads),
        brief=_CHANGE + "leaves **{{ better }}** {{ kept[better]|value }} accuracy (clean images: "
        "{{ clean[better]|value }}), **{{ worse }}** {{ kept[worse]|value }} "
        "({{ clean[worse]|value }}; {{ effect.n }} images).",
        headline="{% if against %}"
        "Which of {{ better }} and {{ worse }} is more robust depends on the attack"
        "{% else %}"
        "{{ better }} withstands attacks at {{ row.at }} better than {{ worse }}: "
        "{{ kept[better]|value(0) }} against {{ kept[worse]|value(0) }} under {{ row.title }}"
        "{% endif %}",
        given=values,
        p=row.p_holm,
        better=better,
    )


def _name(row: AttackCurveRow | RobustPairRow) -> str:
    """Return the name of an attack without its norm."""
    return row.title.removesuffix(" L∞")


def _compared_accuracies(record: AttackRecord, row: RobustPairRow) -> dict[str, Estimate]:
    """Return the accuracies that a pair compares, by model."""
    accuracies = {}
    for curve in record.curves:
        is_same_attack = (curve.attack, curve.epsilon) == (row.attack, row.epsilon)
        if is_same_attack and curve.model in (row.first, row.second):
            accuracies[curve.model] = curve.accuracy
    return accuracies


def informative(record: AttackRecord, row: RobustPairRow) -> bool:
    """Return True if a test under attack can show a difference.

    It cannot if both models are at 0 %, or both at their clean accuracy.
    """
    clean = {overall.model: overall.clean.value for overall in record.overall}
    some_accuracy = False
    some_loss = False
    for model, accuracy in _compared_accuracies(record, row).items():
        if accuracy.value > 0:
            some_accuracy = True
        if accuracy.value != clean.get(model):
            some_loss = True
    return some_accuracy and some_loss


# templates of the values of `_robustness_values`
_NOTHING_TO_ATTACK: Final = (
    "**{{ stated.model }}** classifies none of the {{ clean.n }} images correctly: there is "
    "nothing to attack."
)
_ROBUSTNESS: Final = (
    "Under {{ stated.title }} at {{ stated.at }}{% if tried|length > 1 %}, the "
    "strongest of {{ tried|length }} attacks,{% endif %} **{{ stated.model }}** "
    "keeps {{ stated.accuracy }} top-1 accuracy (clean images: "
    "{{ clean|value }})"
    "{% if first_halved and first_halved.epsilon > stated.epsilon %}; at "
    "{{ first_halved.at }} less than half is left{% endif %}."
)
_ROBUSTNESS_TITLE: Final = (
    "Robust accuracy of {{ stated.model }} {{ 'falls to' if fell else 'stays at' }} "
    "{{ stated.accuracy|value }} at {{ stated.at }} ({{ stated.title }}{% if few %}, "
    "{{ stated.accuracy.n }} images{% endif %})"
)


def _robustness(
    record: AttackRecord, row: AttackedModelRow, curves: Sequence[AttackCurveRow]
) -> Claim:
    """Return the accuracy under the strongest attack at 1/255, or else at the smallest epsilon.

    Only the one at 1/255 is judged.
    """
    judged = strongest(curves, JUDGED)  # None where no L∞ attack was run at 1/255
    stated = judged or _at_smallest_epsilon(curves)
    words = _NOTHING_TO_ATTACK
    brief = ""
    headline = ""
    if row.clean.value:
        words = _ROBUSTNESS
        brief = _CHANGE + "leaves {{ left }}."
        headline = _ROBUSTNESS_TITLE
    claim = found(
        "robustness",
        row.model,
        words,
        stated.accuracy,
        kind="answer",
        evidence="intervened",
        place="curves",
        brief=brief,
        given=_robustness_values(record, row, curves, stated),
        headline=headline,
        reference=stated.accuracy.value,  # the verdict says it: no finding of audit and study
    )
    if record.images < FEWEST:
        claim = replace(claim, says="", brief="")
    if judged is None:
        return claim
    return replace(claim, verdict=_evidence(record, row, curves, judged).verdict())


def _robustness_values(
    record: AttackRecord,
    row: AttackedModelRow,
    curves: Sequence[AttackCurveRow],
    stated: AttackCurveRow,
) -> dict[str, Any]:
    """Return the values of the templates about robustness.

    stated: the attack whose accuracy the sentence states.
    """
    same_norm = [curve for curve in curves if curve.norm == stated.norm]
    halved = [curve for curve in same_norm if 2 * curve.accuracy.value < row.clean.value]
    first_halved = min(halved, key=_by_epsilon, default=None)
    # the short version is about the first epsilon at which less than half is left, if there is one
    brief_row = first_halved or stated
    return {
        "stated": stated,
        "tried": {curve.attack for curve in same_norm if curve.epsilon == stated.epsilon},
        "first_halved": first_halved,
        "clean": row.clean,
        # of the title
        "fell": stated.accuracy.value < row.clean.value,
        "few": record.images < FEWEST,
        # of the short version; _CHANGE takes the first two
        "row": brief_row,
        "attack": _name(brief_row),
        "left": _left_under(record, brief_row),
    }


def _evidence(
    record: AttackRecord,
    row: AttackedModelRow,
    curves: Sequence[AttackCurveRow],
    judged: AttackCurveRow,
) -> Evidence:
    """Return the evidence on which the robustness of a model is judged.

    judged: the strongest attack at 1/255.
    """
    survivors = {survivors_row.model: survivors_row for survivors_row in record.survivors}
    return Evidence(
        row=row,
        judged=judged,
        curves=curves,
        failed=failed_checks(record, row.model),
        far=strongest(curve for curve in curves if curve.epsilon >= FAR),
        again=survivors.get(row.model),
    )


def _left_under(record: AttackRecord, at: AttackCurveRow) -> str:
    """Return the accuracy of every model under one attack at one epsilon, and on clean images."""
    clean = {overall.model: overall.clean for overall in record.overall}
    accuracies = []
    for row in record.curves:
        if (row.attack, row.norm, row.epsilon) != (at.attack, at.norm, at.epsilon):
            continue
        accuracy = say(
            "**{{ row.model }}** {{ row.accuracy|value }} accuracy (clean images: "
            "{{ clean|value }})",
            row=row,
            clean=clean[row.model],
        )
        accuracies.append(accuracy)
    return listed(accuracies)


def _at_smallest_epsilon(curves: Sequence[AttackCurveRow]) -> AttackCurveRow:
    """Return the strongest attack at the smallest epsilon, of L∞ attacks if there are any."""
    norms = {curve.norm for curve in curves}
    norm = "linf" if "linf" in norms else curves[0].norm
    same_norm = [curve for curve in curves if curve.norm == norm]
    return min(same_norm, key=_by_epsilon)


def _by_epsilon(curve: AttackCurveRow) -> tuple[float, float]:
    return curve.epsilon, curve.accuracy.value


def _soundness(record: AttackRecord, row: AttackedModelRow) -> Claim:
    """Return the self-checks of the attacks on one model.

    A check that could not have failed does not count as passed.
    """
    checks = [check for check in record.checks if check.model == row.model]
    failed = [check for check in checks if check.state == "failed"]
    undecided = [check for check in checks if check.state == "inconclusive"]
    because = say(
        "{% if row.failed is none %}"
        "the self-checks of the attacks on **{{ model }}** were not finished: an attack may be "
        "faulty"
        "{% elif failed %}"
        "{{ failed|length }} of {{ checks|length }} self-checks of the attacks on "
        "**{{ model }}** failed ({{ fault }}): its robust accuracies are too high."
        "{% elif undecided %}"
        "{{ undecided|length }} of {{ checks|length }} could not have failed, as nothing was "
        "fooled in them"
        "{% elif checks %}"
        "{{ checks|length }} of {{ checks|length }} as expected, each on images that were fooled"
        "{% else %}"
        "no image was classified correctly, so there was nothing to check the attacks on"
        "{% endif %}",
        row=row,
        model=row.model,
        checks=checks,
        failed=failed,
        undecided=undecided,
        fault=describe_first(failed),
    )
    state: State = "inconclusive"
    says = ""
    if failed:
        state = "fail"
        says = because
    elif checks and not undecided:
        state = "pass"
    verdict = Verdict(state, because, doubts=bool(failed))
    return Claim("self-checks", row.model, says, verdict=verdict, evidence="intervened")


def effects(record: AttackRecord) -> Iterator[Claim]:
    """Yield every informative difference under attack and under corruptions.

    The p-values are those before any correction.
    """
    for row in record.pairs:
        if row.attack != "clean" and informative(record, row):
            claim = _difference_at(record, row, large=(), informative_tests=())
            yield replace(claim, question=f"attack: {row.attack}", p=row.p)
    for gap in record.corruption_pairs:
        yield corruption_gap(gap, record)


def unknown(record: AttackRecord) -> Iterator[str]:
    """Yield what could overturn this report, the most serious first."""
    if any(row.failed is None for row in record.overall):
        yield (
            "The self-checks of the attacks are not finished: a faulty attack makes a model look "
            "robust."
        )
    if record.images < FEWEST:
        yield say("Only {{ n }} image{{ n|s }}: too few for any claim.", n=record.images)
    undecided = [row for row in record.checks if row.state == "inconclusive"]
    if undecided:
        yield say(
            "{{ undecided|length }} of {{ checks|length }} self-checks could not have failed, as "
            "nothing was fooled in them: they are no evidence that the attacks are sound.",
            undecided=undecided,
            checks=record.checks,
        )
    if record.images >= FEWEST and all(row.robust is None for row in record.overall):
        yield (
            "No L∞ attack was run at `1/255`, where robustness is judged; add `--epsilon "
            "0,1,2,4,8`."
        )
    yield "Robust accuracies are upper bounds: a stronger attack (`--attack auto`) may lower them."
    if record.options.get("predicted"):
        yield (
            "The models' own predictions are the labels (`--predicted`): accuracy is the share "
            "of predictions that stay the same, right or wrong."
        )
    if record.options.get("downwards"):
        yield (
            "The largest epsilon was tried first (`--downwards`): smaller ones were not tried "
            "for an image that stayed correct, and count as survived."
        )
    hidden_tables = []
    for name, shown_rows in rows_on_sample(record).items():
        if getattr(record, name) and not shown_rows:
            hidden_tables.append(name)
    if hidden_tables:
        yield say(
            "Measured on too few images to be shown: {{ tables }}; the numbers are in `tables/`.",
            tables=listed(hidden_tables),
        )
    yield (
        "One set of weights of each model was attacked: another training may be more or less "
        "robust."
    )


def rows_on_sample(record: AttackRecord) -> dict[str, list[Any]]:
    """Return the rows of transfer and blocks that rest on enough fooling images, by table."""
    transfer = []
    for row in record.transfer:
        if row.made_for != row.shown_to and enough(row.rate):
            transfer.append(row)
    blocks = [row for row in record.blocks if enough(row.distance)]
    return {"transfer": transfer, "blocks": blocks}
