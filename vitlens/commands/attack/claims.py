"""What `vitlens attack` claims: which model is more robust, how robust each is, and whether the attacks are sound."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from vitlens.commands.attack import record as rows
from vitlens.commands.attack.record import JUDGED, AttackRecord, strongest
from vitlens.report.claims import Claim, found
from vitlens.report.document import State
from vitlens.report.findings import SMALLEST, clear
from vitlens.report.prose import Marked, say
from vitlens.report.verdicts import LIMITS
from vitlens.uncertainty import LEVEL, Estimate, wilson

FEW: Final = 20  # images, below which nothing is claimed
_FAR: Final = 8.0  # 255ths, at which no undefended model keeps most of its accuracy
_KEPT: Final = 0.8  # of the clean accuracy: what none keeps there


def claims(record: AttackRecord) -> Iterator[Claim]:
    """Masked gradients, which model is more robust, how robust each is, and what corruptions cost."""
    enough = record.images >= FEW
    masked = {row.model: list(_masked(record, row.model)) if enough else [] for row in record.overall}
    for signs in masked.values():
        yield from signs
    for first, second in dict.fromkeys((row.first, row.second) for row in record.pairs) if enough else ():
        yield _difference(record, first, second)
    for row in record.overall:
        claim = _robustness(record, row)
        yield from [claim] if claim else []
    for row in record.overall:
        soundness = _soundness(record, row)
        yield soundness if enough and not masked[row.model] else replace(soundness, says="")
        if row.lost is not None:
            yield _corruptions(record, row, row.lost)


def _masked(record: AttackRecord, model: str) -> Iterator[Claim]:
    """The strongest sign that the attacks on a model fail because of its gradients, and transfer that beats them."""
    signs = [_fault(row, row.share) for row in _failed(record, model) if row.share is not None]
    clearly = [each for each in signs if each.effect and clear(each.effect, each.reference)]
    yield from sorted(clearly, key=lambda claim: -claim.rank)[:1]
    shown = {row.made_for: row for row in record.transfer if row.shown_to == model}
    own = shown.pop(model, None)
    sample = next((row for row in record.sample if row.model == model), None)
    if own is None or sample is None or not shown:
        return
    other = min(shown.values(), key=lambda row: row.accuracy.value)
    kept = wilson(round(own.accuracy.value * sample.n), sample.n)
    if other.accuracy.value < own.accuracy.value and clear(kept, other.accuracy.value):
        yield found(
            "transfer beats the attack", model,
            "The gradients of **{{ sample.model }}** are masked: adversarial images made for {{ other.made_for }} "
            "({{ sample.title }} at {{ sample.at }}) lower its accuracy to {{ other.accuracy|value }}, its own only to "
            "{{ effect }}.",
            kept, given={"sample": sample, "other": other}, reference=other.accuracy.value, kind="answer",
            title=say("The gradients of {{ model }} are masked: its robustness is not known", model=model),
            evidence="intervened", place="transfer",
        )  # fmt: skip


def _fault(row: rows.AttackCheckRow, share: Estimate) -> Claim:
    """A failed self-check, with the share of the images that contradict it."""
    compared = ", " in row.attack
    masks = compared or row.name in ("gradients", "gradients read")
    fault = "The gradients of {{ m }} are masked" if masks else "The attacks on {{ m }} are too weak"
    return found(
        "masked gradients", row.model,
        fault + " (self-check {{ check }}): its accuracy under attack is no sign of robustness.",
        share, given={"m": row.model, "check": _in_words(row)}, reference=0.5 if compared else 0.0, kind="answer",
        title=say(fault + ": its robustness is not known", m=row.model), evidence="intervened", place="curves",
    )  # fmt: skip


def _in_words(row: rows.AttackCheckRow) -> Marked:
    return Marked(say("“{{ row.name }}” of {{ row.attack }}: {{ row.found|whole }}", row=row))


def _failed(record: AttackRecord, model: str) -> list[rows.AttackCheckRow]:
    return [row for row in record.checks if (row.model, row.state) == (model, "failed")]


def _difference(record: AttackRecord, first: str, second: str) -> Claim:
    """Which of two models keeps more accuracy, at the test with the largest difference of those that can show one."""
    tests = [row for row in record.pairs if (row.first, row.second) == (first, second) and row.attack != "clean"]
    telling = [row for row in tests if informative(record, row)]
    large = [row for row in telling if row.p_holm <= LEVEL and abs(row.difference.value) >= SMALLEST]
    claim = Claim(
        "difference under attack", f"{first} and {second}", kind="answer", evidence="intervened", place="curves"
    )
    known: dict[str, object] = {"first": first, "second": second, "tests": tests, "telling": telling}
    if not large:
        says = (
            "{% if telling %}In none of {{ telling|length }} paired tests under attack do **{{ first }}** and "
            "**{{ second }}** differ significantly (McNemar, Holm).{% else %}**{{ first }}** and **{{ second }}** "
            "cannot be compared under attack: in all {{ tests|length }} paired tests both have lost all accuracy or "
            "none.{% endif %}"
        )
        title = (
            "{{ first }} and {{ second }} {% if telling %}do not differ significantly{% else %}cannot be compared"
            "{% endif %} under attack"
        )
        return replace(claim, says=say(says, **known), title=say(title, **known))
    row = max(large, key=lambda each: abs(each.difference.value))
    effect = row.difference
    if effect.value < 0:
        low, high = (None if end is None else -end for end in (effect.high, effect.low))
        effect, first, second = replace(effect, value=-effect.value, low=low, high=high), second, first
    known |= {
        "row": row, "better": first, "worse": second, "effect": effect, "kept": _kept(record, row),
        "against": [each for each in large if each.difference.value * row.difference.value < 0],
        "p": "< 0.001" if row.p_holm < 0.001 else f"= {row.p_holm:.2g}",
    }  # fmt: skip
    says = (
        "Under {{ row.title }} at {{ row.at }} **{{ better }}** keeps {{ kept[better]|value }} accuracy, "
        "**{{ worse }}** {{ kept[worse]|value }}: {{ effect|alone }} more (McNemar, Holm: p {{ p }}){% if against %}; "
        "in {{ against|length }} of {{ telling|length }} tests it is the other way round{% endif %}."
    )
    title = (
        "{% if against %}Which of {{ better }} and {{ worse }} is more robust depends on the attack{% else %}"
        "{{ better }} withstands attacks better than {{ worse }}: {{ kept[better]|value(0) }} against "
        "{{ kept[worse]|value(0) }} under {{ row.title }} at {{ row.at }}{% endif %}"
    )
    return replace(claim, says=say(says, **known), title=say(title, **known), effect=effect, p=row.p_holm)


def _kept(record: AttackRecord, row: rows.RobustPairRow) -> dict[str, Estimate]:
    """The accuracies that a pair compares, by model."""
    here = [each for each in record.curves if (each.attack, each.epsilon) == (row.attack, row.epsilon)]
    return {each.model: each.accuracy for each in here if each.model in (row.first, row.second)}


def informative(record: AttackRecord, row: rows.RobustPairRow) -> bool:
    """Whether a test under attack can show a difference: the models are neither both at 0 % nor both at their clean
    accuracy."""
    clean = {each.model: each.clean.value for each in record.overall}
    kept = {model: accuracy.value for model, accuracy in _kept(record, row).items()}
    return any(kept.values()) and any(value != clean.get(model) for model, value in kept.items())


def _robustness(record: AttackRecord, row: rows.AttackedModelRow) -> Claim | None:
    """Accuracy under the strongest attack at 1/255, else at the smallest epsilon, and where half of it is lost."""
    curves = [each for each in record.curves if each.model == row.model and each.epsilon > 0]
    judged = strongest(curves, JUDGED)
    first = [each for each in curves if each.norm == "linf"] or [each for each in curves if each.norm == curves[0].norm]
    at = judged or min(first, key=lambda each: (each.epsilon, each.accuracy.value), default=None)
    if at is None:
        return None
    own = [each for each in curves if each.norm == at.norm]
    lost = [each for each in own if 2 * each.accuracy.value < row.clean.value]
    known = {
        "at": at, "row": row, "tried": {each.attack for each in own if each.epsilon == at.epsilon},
        "lost": min(lost, key=lambda each: (each.epsilon, each.accuracy.value), default=None),
    }  # fmt: skip
    says = (
        "Under {{ at.title }} at {{ at.at }}{% if tried|length > 1 %}, the strongest of {{ tried|length }} "
        "attacks,{% endif %} **{{ row.model }}** keeps {{ at.accuracy }} top-1 accuracy, of {{ row.clean|value }} on "
        "clean images{% if lost and lost.epsilon > at.epsilon %}; at {{ lost.at }} less than half is left{% endif %}."
        if row.clean.value
        else "**{{ row.model }}** classifies none of the {{ row.clean.n }} images correctly: there is nothing to "
        "attack."
    )
    title = (
        "{{ at.title }} at {{ at.at }} leaves {{ row.model }} {{ at.accuracy|value(0) }} accuracy, of "
        "{{ row.clean|value(0) }}"
    )
    claim = Claim(
        "robustness", row.model, effect=at.accuracy, kind="answer", evidence="intervened", place="curves",
        reference=at.accuracy.value,  # the verdict says it: no finding of audit and study
    )  # fmt: skip
    if record.images >= FEW:
        claim = replace(claim, says=say(says, **known), title=say(title, **known) if row.clean.value else "")
    return _judged(record, row, judged, claim) if judged else claim


def _judged(record: AttackRecord, row: rows.AttackedModelRow, at: rows.AttackCurveRow, claim: Claim) -> Claim:
    """The claim with its state and the reason; faulty or weak attacks leave no praise."""
    curves = [each for each in record.curves if each.model == row.model and each.epsilon > 0]
    state: State = LIMITS["robustness"].judge(at.accuracy)
    words, failed = "accuracy under {{ at.title }} at {{ at.at }}", _failed(record, row.model)
    far = strongest(each for each in curves if each.epsilon >= _FAR)
    if min(each.accuracy.value for each in curves) >= row.clean.value:
        claim, state = replace(claim, effect=None), "inconclusive"
        words = "no attack fooled it at any epsilon, which says more about these attacks than about the model"
        words = words if row.clean.value else "it classifies no clean image correctly"
    elif (row.clean.n or 0) < FEW:
        state, words = "inconclusive", f"{words}, on fewer than {{{{ few }}}} images"
    elif failed and state in ("pass", "warn"):
        state = "inconclusive"
        words += (
            ", but {{ failed|length }} of {{ row.checks }} self-checks failed ({{ fault }}): it is too high by an "
            "unknown amount"
        )
    elif state == "pass" and far is not None and far.accuracy.value >= _KEPT * row.clean.value:
        state = "warn"
        words += (
            "; but at {{ far.at }} it still has {{ far.accuracy|alone }}, which no undefended model keeps: unless it "
            "was trained against attacks, these are too weak"
        )
    fault = _in_words(failed[0]) if failed else ""
    because = say(words, at=at, row=row, few=FEW, failed=failed, fault=fault, far=far)
    return replace(claim, state=state, limit="robustness", because=because)


def _soundness(record: AttackRecord, row: rows.AttackedModelRow) -> Claim:
    """The self-checks of the attacks on one model: those that could not have failed are not passed."""
    failed = _failed(record, row.model)
    because = (
        "{% if failed %}{{ failed|length }} of {{ row.checks }} self-checks of the attacks on **{{ row.model }}** "
        "failed ({{ fault }}): its robust accuracies are too high.{% elif row.inconclusive %}{{ row.inconclusive }} of "
        "{{ row.checks }} could not have failed, as nothing was fooled in them{% elif row.checks %}{{ row.checks }} of "
        "{{ row.checks }} as expected, each on images that were fooled{% else %}no image was classified correctly, so "
        "there was nothing to check the attacks on{% endif %}"
    )
    because = say(because, row=row, failed=failed, fault=_in_words(failed[0]) if failed else "")
    state: State = "fail" if failed else "pass" if row.checks and not row.inconclusive else "inconclusive"
    says = because if failed else ""
    return Claim("self-checks", row.model, says, state=state, evidence="intervened", because=because)


def _corruptions(record: AttackRecord, row: rows.AttackedModelRow, lost: Estimate) -> Claim:
    """What common corruptions cost."""
    own = [each for each in record.corruptions if each.model == row.model]
    hardest = min(own, key=lambda each: each.accuracy.value)
    classes = record.config.data.classes if record.config.data else 0
    said = say(
        "Common corruptions cost **{{ row.model }}** {{ row.lost }} of top-1 accuracy, the mean over all kinds and "
        "severities; the least is left under {{ hardest.title }} at severity {{ hardest.severity }}, "
        "{{ hardest.accuracy|value }}.",
        row=row, hardest=hardest,
    )  # fmt: skip
    claim = Claim(
        "common corruptions", row.model, said if record.images >= FEW else "", effect=lost, limit="corruptions",
        state=LIMITS["corruptions"].judge(lost), evidence="intervened", place="corruptions",
        because="clean accuracy minus the mean accuracy over all kinds and severities",
    )  # fmt: skip
    if row.clean.low is None or row.clean.low <= 1 / max(classes, 1):
        return replace(claim, state="inconclusive", because="its clean accuracy is not above chance: nothing to lose")
    few = f"{claim.because}, of few images"
    return claim if record.images >= FEW else replace(claim, state="inconclusive", because=few)
