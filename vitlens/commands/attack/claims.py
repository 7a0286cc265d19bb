"""What `vitlens attack` claims: which model is more robust, how robust each is, and whether the attacks are sound."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

from vitlens.commands.attack.record import (
    JUDGED,
    AttackCheckRow,
    AttackCurveRow,
    AttackedModelRow,
    AttackRecord,
    RobustPairRow,
    strongest,
)
from vitlens.report.claims import Claim, found
from vitlens.report.document import State
from vitlens.report.findings import SMALLEST, clear
from vitlens.report.prose import Marked, say
from vitlens.report.verdicts import LIMITS
from vitlens.uncertainty import LEVEL, Estimate, wilson

FEW: Final = 20  # images, below which nothing is claimed
FAR: Final = 8.0  # 255ths, at which no undefended model keeps most of its accuracy
KEPT: Final = 0.8  # of the clean accuracy: what none keeps there
_FAULTS: Final = {
    "gradients": "the gradient of the loss is zero everywhere for {{ against }} of {{ of }} correctly classified "
    "images",
    "gradients read": "the gradients that {{ weaker }} read are zero everywhere for {{ against }} of {{ of }} "
    "correctly classified images",
    "no limit": "{{ weaker }} leaves {{ against }} of {{ of }} correctly classified images correct without any limit "
    "on the perturbation",
}


def claims(record: AttackRecord) -> Iterator[Claim]:
    """Masked gradients, which model is more robust, how robust each is, and what corruptions cost."""
    enough = record.images >= FEW
    masked = {row.model: list(_masked(record, row)) if enough else [] for row in record.overall}
    for signs in masked.values():
        yield from signs
    for first, second in dict.fromkeys((row.first, row.second) for row in record.pairs):
        if enough:
            yield _difference(record, first, second)
    for row in record.overall:
        yield from _robustness(record, row)
    for row in record.overall:
        yield _soundness(record, row, spoken=enough and not masked[row.model])
        yield from _corruptions(record, row)


def _masked(record: AttackRecord, row: AttackedModelRow) -> Iterator[Claim]:
    """The strongest sign that the attacks on a model fail because of its gradients, and transfer that beats them."""
    failed = [each for each in _checks(record, row.model) if each.state == "failed" and each.share is not None]
    signs = [_fault_claim(record, each) for each in failed]
    clearly = [each for each in signs if each.effect and clear(each.effect, each.reference)]
    yield from sorted(clearly, key=lambda claim: -claim.rank)[:1]
    shown = [each for each in record.transfer if each.shown_to == row.model]
    own = next((each for each in shown if each.made_for == row.model), None)
    others = [each for each in shown if each.made_for != row.model]
    sample = next((each for each in record.sample if each.model == row.model), None)
    if own is None or sample is None or not others:
        return
    other = min(others, key=lambda each: each.accuracy.value)
    kept = wilson(round(own.accuracy.value * sample.n), sample.n)
    if other.accuracy.value < own.accuracy.value and clear(kept, other.accuracy.value):
        yield found(
            "transfer beats the attack", row.model,
            "The gradients of **{{ sample.model }}** are masked: adversarial images made for {{ other.made_for }} "
            "({{ sample.title }} at {{ sample.at }}) lower its accuracy to {{ other.accuracy|value }}, its own only to "
            "{{ effect }}.",
            kept, given={"sample": sample, "other": other}, reference=other.accuracy.value, kind="answer",
            title=say("The gradients of {{ row.model }} are masked: its robustness is not known", row=row),
            evidence="intervened", place="transfer",
        )  # fmt: skip


def _fault_claim(record: AttackRecord, row: AttackCheckRow) -> Claim:
    """A failed self-check, with the share of the images that contradict it."""
    compared = ", " in row.attack
    gradients = compared or row.name in ("gradients", "gradients read")
    fault = "gradients of {{ model }} are masked" if gradients else "attacks on {{ model }} are too weak"
    return found(
        "masked gradients", row.model,
        f"The {fault.replace('{{ model }}', '**{{ model }}**')}: {{{{ fault }}}}. Its accuracy under attack is no sign "
        "of robustness.",
        row.share or Estimate(0.0), given={"model": row.model, "fault": fault_of(record, row)},
        reference=0.5 if compared else 0.0, kind="answer", evidence="intervened", place="curves",
        title=say(f"The {fault}: its robustness is not known", model=row.model),
    )  # fmt: skip


def fault_of(record: AttackRecord, row: AttackCheckRow) -> Marked:
    """A failed self-check in words."""
    titles = {curve.attack: curve.title for curve in record.curves}
    names = [titles.get(name, name) for name in row.attack.split(", ")]
    template = "{{ name }}, {{ weaker }}: {{ found }}"
    if len(names) > 1 and row.against is not None:
        template = (
            "{{ weaker }} fools {{ against }} images that {{ stronger }}, the stronger attack, does not, of {{ of }} "
            "on which the two differ"
        )
    elif row.name in _FAULTS and row.against is not None:
        template = _FAULTS[row.name]
    known = {"name": row.name, "found": row.found, "against": row.against, "of": row.of}
    return Marked(say(template, **known, weaker=names[0], stronger=names[-1]))


def _difference(record: AttackRecord, first: str, second: str) -> Claim:
    """Which of two models keeps more accuracy, at the test with the largest difference of those that can show one."""
    between = f"{first} and {second}"
    tests = [row for row in record.pairs if (row.first, row.second) == (first, second) and row.attack != "clean"]
    telling = [row for row in tests if informative(record, row)]
    known: dict[str, Any] = {"first": first, "second": second, "tests": tests, "telling": telling}
    large = [row for row in telling if row.p_holm <= LEVEL and abs(row.difference.value) >= SMALLEST]
    if not large:
        says = (
            "In none of {{ telling|length }} paired tests under attack do **{{ first }}** and **{{ second }}** differ "
            "significantly (McNemar, Holm)."
            if telling
            else "**{{ first }}** and **{{ second }}** cannot be compared under attack: in all {{ tests|length }} "
            "paired tests both have lost all accuracy or none."
        )
        verb = "are not shown to differ" if telling else "cannot be compared"
        title = f"{{{{ first }}}} and {{{{ second }}}} {verb} under attack"
        return Claim(
            "difference under attack", between, say(says, **known), say(title, **known), kind="answer",
            evidence="intervened", place="curves",
        )  # fmt: skip
    row = max(large, key=lambda each: abs(each.difference.value))
    better, worse = (first, second) if row.difference.value > 0 else (second, first)
    against = [each for each in large if each.difference.value * row.difference.value < 0]
    kept = {
        curve.model: curve.accuracy
        for curve in record.curves
        if (curve.attack, curve.epsilon) == (row.attack, row.epsilon)
    }
    known |= {"better": better, "worse": worse, "row": row, "against": against, "large": large}
    known["p"] = "< 0.001" if row.p_holm < 0.001 else f"= {row.p_holm:.2g}"
    known |= {"high": kept.get(better), "low": kept.get(worse), "effect": _positive(row.difference)}
    says = (
        "Under {{ row.title }} at {{ row.at }} **{{ better }}** keeps {{ high|value }} accuracy, **{{ worse }}** "
        "{{ low|value }}: {{ effect|alone }} more (McNemar, Holm: p {{ p }}){% if against %}; in {{ against|length }} "
        "of {{ telling|length }} tests it is the other way round{% endif %}."
    )
    title = (
        "Which of {{ better }} and {{ worse }} is more robust depends on the attack"
        if against
        else "{{ better }} withstands attacks better than {{ worse }}: {{ high|value(0) }} against {{ low|value(0) "
        "}} under {{ row.title }} at {{ row.at }}"
    )
    return Claim(
        "difference under attack", between, say(says, **known), say(title, **known), effect=_positive(row.difference),
        p=row.p_holm, kind="answer", evidence="intervened", place="curves",
    )  # fmt: skip


def informative(record: AttackRecord, row: RobustPairRow) -> bool:
    """Whether a test under attack can show a difference: the models are neither both at 0 % nor both at their clean
    accuracy."""
    clean = {each.model: each.clean.value for each in record.overall}
    kept = {
        curve.model: curve.accuracy.value
        for curve in record.curves
        if curve.model in (row.first, row.second) and (curve.attack, curve.epsilon) == (row.attack, row.epsilon)
    }
    return any(kept.values()) and any(value != clean.get(model) for model, value in kept.items())


def _positive(each: Estimate) -> Estimate:
    if each.value >= 0 or each.low is None or each.high is None:
        return replace(each, value=abs(each.value))
    return replace(each, value=-each.value, low=-each.high, high=-each.low)


def _robustness(record: AttackRecord, row: AttackedModelRow) -> Iterator[Claim]:
    """Accuracy under the strongest attack at 1/255, and where less than half of the clean accuracy is left."""
    curves = [each for each in record.curves if each.model == row.model and each.epsilon > 0]
    judged = strongest(curves, JUDGED)
    at = judged or _weakest(curves)
    if at is None:
        return
    tried = {each.attack for each in curves if (each.norm, each.epsilon) == (at.norm, at.epsilon)}
    beyond_it = [each for each in curves if each.norm == at.norm and each.epsilon > at.epsilon]
    lost = [] if 2 * at.accuracy.value < row.clean.value else [
        each for each in beyond_it if 2 * each.accuracy.value < row.clean.value
    ]  # fmt: skip
    gone = [each for each in beyond_it if each.accuracy.value == 0 < at.accuracy.value]
    least = min(gone or lost, key=lambda each: (each.epsilon, each.accuracy.value), default=None)
    says = (
        "Under {{ at.title }} at {{ at.at }}{% if tried|length > 1 %}, the strongest of {{ tried|length }} "
        "attacks,{% endif %} **{{ row.model }}** keeps {{ at.accuracy }} {% if predicted %}of its predictions{% else %}"
        "top-1 accuracy, of {{ row.clean|value }} on clean images{% endif %}{% if gone %}; at {{ least.at }} nothing "
        "is left{% elif least %}; at {{ least.at }} less than half is left{% endif %}."
        if row.clean.value
        else "**{{ row.model }}** classifies none of the {{ row.clean.n }} images correctly: there is nothing to "
        "attack."
    )
    title = (
        "{{ at.title }} at {{ at.at }} leaves {{ row.model }} {{ at.accuracy|value(0) }} {% if predicted %}of its "
        "predictions{% else %}accuracy, of {{ row.clean|value(0) }}{% endif %}"
    )
    predicted = bool(record.options.get("predicted"))
    known = {"at": at, "tried": tried, "row": row, "gone": gone, "least": least, "predicted": predicted}
    spoken = record.images >= FEW
    claim = Claim(
        "robustness", row.model, say(says, **known) if spoken else "",
        say(title, **known) if spoken and row.clean.value else "",
        effect=at.accuracy, limit="robustness" if judged else "", kind="answer", evidence="intervened", place="curves",
        reference=at.accuracy.value,  # the verdict says it: no finding of audit and study
    )  # fmt: skip
    yield replace(claim, **_verdict(record, row, curves, judged)) if judged else claim


def _weakest(curves: Sequence[AttackCurveRow]) -> AttackCurveRow | None:
    """The strongest attack at the smallest epsilon, of L∞ attacks where there are any."""
    first = [row for row in curves if row.norm == curves[0].norm]
    chosen = [row for row in curves if row.norm == "linf"] or first
    return min(chosen, key=lambda row: (row.epsilon, row.accuracy.value), default=None)


def _verdict(
    record: AttackRecord, row: AttackedModelRow, curves: Sequence[AttackCurveRow], judged: AttackCurveRow
) -> dict[str, Any]:
    """State and reason of the judgement; faulty or weak attacks leave no praise."""
    tried = {each.attack for each in curves if (each.norm, each.epsilon) == (judged.norm, judged.epsilon)}
    words = (
        "accuracy under {{ row.title }} at {{ row.at }}{% if tried|length > 1 %}, the strongest of {{ tried|length }} "
        "attacks{% endif %}"
    )
    because = Marked(say(words, row=judged, tried=tried))
    if row.clean.value == 0:
        return {"state": "inconclusive", "effect": None, "because": "it classifies no clean image correctly"}
    if min(each.accuracy.value for each in curves) >= row.clean.value:
        silent = "no attack fooled it at any epsilon, which says more about these attacks than about the model"
        return {"state": "inconclusive", "effect": None, "because": silent}
    if (row.clean.n or 0) < FEW:
        return {"state": "inconclusive", "because": say("{{ b }}, on fewer than {{ n }} images", b=because, n=FEW)}
    state = LIMITS["robustness"].judge(judged.accuracy)
    failed = [each for each in _checks(record, row.model) if each.state == "failed"]
    if failed and state in ("pass", "warn"):
        words = "{{ b }}, but {{ k }} of {{ n }} self-checks failed ({{ fault }}): it is too high by an unknown amount"
        known = {"b": because, "k": len(failed), "n": row.checks, "fault": fault_of(record, failed[0])}
        return {"state": "inconclusive", "because": say(words, **known)}
    far = too_strong(curves, row)
    if state == "pass" and far is not None:
        words = (
            "{{ b }}; but at {{ far.at }} it still has {{ far.accuracy|alone }}, which no undefended model keeps: "
            "unless it was trained against attacks, these are too weak"
        )
        return {"state": "warn", "because": say(words, b=because, far=far)}
    return {"state": state, "because": because}


def too_strong(curves: Sequence[AttackCurveRow], row: AttackedModelRow) -> AttackCurveRow | None:
    """The strongest attack at 8/255 or more, where it leaves what no undefended model keeps."""
    far = strongest(each for each in curves if each.epsilon >= FAR)
    return far if far is not None and far.accuracy.value >= KEPT * row.clean.value > 0 else None


def _checks(record: AttackRecord, model: str) -> list[AttackCheckRow]:
    return [each for each in record.checks if each.model == model]


def _soundness(record: AttackRecord, row: AttackedModelRow, *, spoken: bool) -> Claim:
    """The self-checks of the attacks on one model: those that could not have failed are not passed. spoken: whether a
    failure is said, where no claim of masked gradients says it."""
    rows = _checks(record, row.model)
    failed = [each for each in rows if each.state == "failed"]
    open_ = [each for each in rows if each.state == "inconclusive"]
    known = {"rows": rows, "failed": failed, "open": open_, "row": row}
    if failed:
        because = "{{ failed|length }} of {{ rows|length }} failed: robust accuracies are too high"
    elif open_:
        because = "{{ open|length }} of {{ rows|length }} could not have failed, as nothing was fooled in them"
    elif rows:
        because = "{{ rows|length }} of {{ rows|length }} as expected, each on images that were fooled"
    else:
        because = "no image was classified correctly, so there was nothing to check the attacks on"
    state: State = "fail" if failed else "pass" if rows and not open_ else "inconclusive"
    words = "{{ k }} of {{ n }} self-checks of the attacks on **{{ model }}** failed: {{ fault }}."
    named = {
        "k": len(failed),
        "n": len(rows),
        "model": row.model,
        "fault": fault_of(record, failed[0]) if failed else "",
    }
    says = say(words, **named) if failed and spoken else ""
    return Claim("self-checks", row.model, says, state=state, because=say(because, **known), evidence="intervened")


def _corruptions(record: AttackRecord, row: AttackedModelRow) -> Iterator[Claim]:
    """What common corruptions cost, and the errors relative to the baseline."""
    if row.lost is None:
        return
    own = [each for each in record.corruptions if each.model == row.model]
    hardest = min(own, key=lambda each: each.accuracy.value)
    classes = record.config.data.classes if record.config.data else 0
    says = say(
        "Common corruptions change {{ row.mean_error }} of the predictions of **{{ row.model }}**, the mean over "
        "{{ kinds|length }} kinds at five severities; most under {{ hardest.title }} at severity "
        "{{ hardest.severity }}, where {{ hardest.accuracy|value }} stay the same."
        if record.options.get("predicted")
        else "Common corruptions cost **{{ row.model }}** {{ row.lost }} of top-1 accuracy, the mean over "
        "{{ kinds|length }} kinds at five severities; accuracy is lowest under {{ hardest.title }} at severity "
        "{{ hardest.severity }}, {{ hardest.accuracy|value }}.",
        row=row, hardest=hardest, kinds={each.kind for each in own},
    )  # fmt: skip
    claim = Claim(
        "common corruptions", row.model, says if record.images >= FEW else "", effect=row.lost, limit="corruptions",
        state=LIMITS["corruptions"].judge(row.lost), evidence="intervened", place="corruptions",
        because="clean accuracy minus the mean accuracy over all kinds and severities",
    )  # fmt: skip
    if row.clean.low is None or row.clean.low <= 1 / max(classes, 1):
        claim = replace(claim, state="inconclusive", because="its clean accuracy is not above chance: nothing to lose")
    elif record.images < FEW:
        claim = replace(claim, state="inconclusive", because=say("{{ b }}, of few images", b=Marked(claim.because)))
    yield claim
    if row.relative_error is not None and row.baseline != row.model and record.images >= FEW:
        yield found(
            "mean corruption error", row.model,
            "Under common corruptions **{{ row.model }}** makes {{ word }} errors than **{{ row.baseline }}**: "
            "{{ effect|alone }} of its errors, mean over kinds.",
            row.relative_error, given={"row": row, "word": "fewer" if row.relative_error.value < 1 else "more"},
            kind="comparison", reference=1.0, evidence="intervened", place="corruptions",
        )  # fmt: skip
