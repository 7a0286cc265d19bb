"""What `vitlens attack` claims: which model is more robust, how robust each is, and whether the attacks are sound."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

from vitlens.commands.attack import record as rows
from vitlens.commands.attack.record import FAR, JUDGED, AttackCurveRow, AttackRecord, strongest
from vitlens.commands.shared.comparison import signed
from vitlens.commands.shared.maps.report import count_uniform, uniform_claim
from vitlens.report.claims import FEWEST, SMALLEST, Claim, clear, enough, found
from vitlens.report.document import State
from vitlens.report.prose import Marked, listed, say
from vitlens.report.verdicts import LIMITS, Verdict
from vitlens.uncertainty import LEVEL, Estimate

_KEPT: Final = 0.8  # of the clean accuracy: what no undefended model keeps at FAR
_CHANGE: Final = (  # of images by an attack, the beginning of a sentence
    "{% if row.norm == 'linf' %}Changing every pixel by at most {{ row.at }} of its range (attack: {{ attack }}) "
    "{% else %}The attack {{ row.title }} at {{ row.at }} {% endif %}"
)
_MISSED: Final = 0.1  # of the survivors, broken by stronger attacks: beyond it the first attacks were too weak
ORDER: Final = ("failed", "inconclusive")


def claims(record: AttackRecord) -> Iterator[Claim]:
    """Masked gradients, which model is more robust, how robust each is, and what corruptions cost."""
    are_enough = record.images >= FEWEST
    if record.images == 1:
        yield from _of_one_image(record)
    masked = {row.model: list(_masked(record, row.model)) if are_enough else [] for row in record.overall}
    for signs in masked.values():
        yield from signs
    for first, second in dict.fromkeys((row.first, row.second) for row in record.pairs) if are_enough else ():
        yield _difference(record, first, second)
    for row in record.overall:
        curves = [each for each in record.curves if each.model == row.model and each.epsilon > 0]
        if curves:
            yield _robustness(record, row, curves)
    for row in record.overall:
        soundness = _soundness(record, row)
        yield soundness if are_enough and not masked[row.model] else replace(soundness, says="")
        if row.lost is not None:
            yield _corruptions(record, row, row.lost)
    yield from _largest_corruption_gap(record)
    for model, example in record.examples.items():
        maps = [*example.before, *example.after]
        yield from uniform_claim(model, {"the true class": count_uniform(maps)}, len(maps))


def _of_one_image(record: AttackRecord) -> Iterator[Claim]:
    """Return what the attack made of the prediction of the only image, for each model."""
    for row in record.overall:
        example = record.examples.get(row.model)
        if example is not None and len(example.image):
            (before, after), (sure, misled) = example.answers[:, 0].tolist(), example.probability[:, 0].tolist()
            said = "{{ before }} ({{ sure|percent }}) becomes {{ after }} ({{ misled|percent }}) under {{ sample }}"
            known = {"before": before, "after": after, "sure": sure, "misled": misled}
        elif any(curve.model == row.model and curve.accuracy.value == 0 for curve in record.curves):
            continue
        else:
            said = "The prediction of {{ model }} stays the same under every attack tried"
            known = {"model": row.model}
        yield found(
            "one image",
            row.model,
            f"{said}.",
            given={**known, "sample": row.sample},
            kind="answer",
            evidence="intervened",
            place="curves",
            headline=said,
        )


def _masked(record: AttackRecord, model: str) -> Iterator[Claim]:
    """Yield the strongest sign that the attacks on a model fail because of its gradients, and transfer that beats
    them."""
    signs = [_fault(row, row.share) for row in _failed(record, model) if row.share is not None]
    clearly = [each for each in signs if each.effect and clear(each.effect, each.reference)]
    yield from sorted(clearly, key=lambda claim: -claim.rank)[:1]
    shown = {row.made_for: row for row in record.transfer if row.shown_to == model}
    own = shown.pop(model, None)
    other = min(shown.values(), key=lambda row: row.accuracy.value, default=None)
    if own and other and other.accuracy.value < own.accuracy.value and clear(own.accuracy, other.accuracy.value):
        yield found(
            "transfer beats the attack",
            model,
            "The gradients of **{{ own.shown_to }}** are masked: adversarial images made for {{ other.made_for }} "
            "({{ sample }}) lower its accuracy to {{ other.accuracy|value }}, its own only to {{ effect }}.",
            own.accuracy,
            given={"own": own, "other": other, "sample": record.overall[0].sample},
            reference=other.accuracy.value,
            kind="answer",
            evidence="intervened",
            place="transfer",
            headline="The gradients of {{ own.shown_to }} are masked: its robustness is not known",
        )


def _fault(row: rows.AttackCheckRow, share: Estimate) -> Claim:
    """Return a failed self-check, with the share of the images that contradict it."""
    compared = ", " in row.attack
    masks = compared or row.name in ("gradients", "gradients read")
    fault = "The gradients of {{ m }} are masked" if masks else "The attacks on {{ m }} are too weak"
    return found(
        "masked gradients",
        row.model,
        fault + " (self-check {{ check }}): its accuracy under attack is no sign of robustness.",
        share,
        given={"m": row.model, "check": _in_words(row)},
        reference=0.5 if compared else 0.0,
        kind="answer",
        headline=fault + ": its robustness is not known",
        evidence="intervened",
        place="curves",
    )


def _in_words(row: rows.AttackCheckRow) -> Marked:
    return Marked(say("“{{ row.name }}” of {{ row.attack }}: {{ row.found|whole }}", row=row))


def _failed(record: AttackRecord, model: str) -> list[rows.AttackCheckRow]:
    return [row for row in record.checks if (row.model, row.state) == (model, "failed")]


def _difference(record: AttackRecord, first: str, second: str) -> Claim:
    """Return which of two models keeps more accuracy, at the test with the largest difference of those that can show
    one."""
    tests = [row for row in record.pairs if (row.first, row.second) == (first, second) and row.attack != "clean"]
    telling = [row for row in tests if informative(record, row)]
    large = [row for row in telling if row.p_holm <= LEVEL and abs(row.difference.value) >= SMALLEST]
    known: dict[str, Any] = {"first": first, "second": second, "tests": tests, "telling": telling}
    claim = _under_attack(first, second)
    if not large:
        return claim(
            "{% if telling %}In none of {{ telling|length }} paired tests under attack do **{{ first }}** and "
            "**{{ second }}** differ significantly (McNemar, Holm).{% else %}**{{ first }}** and **{{ second }}** "
            "cannot be compared under attack: in all {{ tests|length }} paired tests both have lost all accuracy or "
            "none.{% endif %}",
            headline="{{ first }} and {{ second }} {% if telling %}do not differ significantly{% else %}cannot be "
            "compared{% endif %} under attack",
            given=known,
            is_null=True,
        )
    row = max(large, key=lambda each: abs(each.difference.value))
    return _difference_at(record, row, large, telling)


def _under_attack(first: str, second: str) -> Callable[..., Claim]:
    """Return the maker of claims on two models under attack, which rest on the verdicts on both."""
    return partial(
        found,
        "difference under attack",
        f"{first} and {second}",
        kind="answer",
        evidence="intervened",
        place="curves",
        rests_on=tuple((question, model) for question in ("robustness", "self-checks") for model in (first, second)),
    )


def _difference_at(
    record: AttackRecord,
    row: rows.RobustPairRow,
    large: Sequence[rows.RobustPairRow],
    telling: Sequence[rows.RobustPairRow],
) -> Claim:
    """Return the claim of one paired test; large, telling: those with a difference, and those that can show one."""
    first = row.first
    second = row.second
    claim = _under_attack(first, second)
    better, worse = (first, second) if row.difference.value >= 0 else (second, first)
    known = {
        "row": row,
        "attack": _name(row),
        "better": better,
        "worse": worse,
        "kept": _kept(record, row),
        "telling": telling,
        "against": [each for each in large if each.difference.value * row.difference.value < 0],
        "p": "< 0.001" if row.p_holm < 0.001 else f"= {row.p_holm:.2g}",
    }
    return claim(
        "Under {{ row.title }} at {{ row.at }}, **{{ better }}** keeps {{ kept[better]|value }} accuracy and "
        "**{{ worse }}** {{ kept[worse]|value }}. The difference is {{ effect|alone }} (McNemar's exact test, Holm, "
        "p {{ p }}){% if against %}; in {{ against|length }} of {{ telling|length }} tests it is reversed{% endif %}.",
        signed(row.difference, better == first),
        brief=_CHANGE + "leaves **{{ better }}** {{ kept[better]|value }} accuracy, **{{ worse }}** "
        "{{ kept[worse]|value }} ({{ effect.n }} images).",
        headline="{% if against %}Which of {{ better }} and {{ worse }} is more robust depends on the attack{% else %}"
        "{{ better }} withstands attacks at {{ row.at }} better than {{ worse }}: {{ kept[better]|value(0) }} against "
        "{{ kept[worse]|value(0) }} under {{ row.title }}{% endif %}",
        given=known,
        p=row.p_holm,
    )


def _name(row: rows.AttackCurveRow | rows.RobustPairRow) -> str:
    """Return the name of an attack without its norm."""
    return row.title.removesuffix(" L∞")


def _kept(record: AttackRecord, row: rows.RobustPairRow) -> dict[str, Estimate]:
    """Return the accuracies that a pair compares, by model."""
    here = [each for each in record.curves if (each.attack, each.epsilon) == (row.attack, row.epsilon)]
    return {each.model: each.accuracy for each in here if each.model in (row.first, row.second)}


def informative(record: AttackRecord, row: rows.RobustPairRow) -> bool:
    """Return True if a test under attack can show a difference: the models are neither both at 0 % nor both at their
    clean accuracy."""
    clean = {each.model: each.clean.value for each in record.overall}
    kept = {model: accuracy.value for model, accuracy in _kept(record, row).items()}
    return any(kept.values()) and any(value != clean.get(model) for model, value in kept.items())


def _robustness(record: AttackRecord, row: rows.AttackedModelRow, curves: Sequence[AttackCurveRow]) -> Claim:
    """Accuracy under the strongest attack at 1/255, which is judged, else at the smallest epsilon that was tried."""
    judged = strongest(curves, JUDGED)
    first = [each for each in curves if each.norm == "linf"] or [each for each in curves if each.norm == curves[0].norm]
    at = judged or min(first, key=lambda each: (each.epsilon, each.accuracy.value))
    own = [each for each in curves if each.norm == at.norm]
    lost = [each for each in own if 2 * each.accuracy.value < row.clean.value]
    halved = min(lost, key=lambda each: (each.epsilon, each.accuracy.value), default=None)
    known: dict[str, Any] = {
        "at": at,
        "row": halved or at,
        "attack": _name(halved or at),
        "left": _left_under(record, halved or at),
        "clean": row.clean,
        "few": record.images < FEWEST,
        "fell": at.accuracy.value < row.clean.value,
        "tried": {each.attack for each in own if each.epsilon == at.epsilon},
        "lost": halved,
    }
    claim = found(
        "robustness",
        row.model,
        "Under {{ at.title }} at {{ at.at }}{% if tried|length > 1 %}, the strongest of {{ tried|length }} "
        "attacks,{% endif %} **{{ at.model }}** keeps {{ at.accuracy }} top-1 accuracy, of {{ clean|value }} on "
        "clean images{% if lost and lost.epsilon > at.epsilon %}; at {{ lost.at }} less than half is left{% endif %}."
        if row.clean.value
        else "**{{ at.model }}** classifies none of the {{ clean.n }} images correctly: there is nothing to attack.",
        at.accuracy,
        kind="answer",
        evidence="intervened",
        place="curves",
        brief=_CHANGE + "leaves {{ left }} accuracy." if row.clean.value else "",
        given=known,
        headline="Robust accuracy of {{ at.model }} {{ 'falls to' if fell else 'stays at' }} "
        "{{ at.accuracy|value }} at {{ at.at }} ({{ at.title }}"
        "{% if few %}, {{ at.accuracy.n }} images{% endif %})"
        if row.clean.value
        else "",
        reference=at.accuracy.value,  # the verdict says it: no finding of audit and study
    )
    if record.images < FEWEST:
        claim = replace(claim, says="", brief="")
    if judged is None:
        return claim
    return replace(claim, verdict=_judged(record, row, judged, curves))


def _left_under(record: AttackRecord, at: AttackCurveRow) -> str:
    """Return the accuracy of every model under one attack at one epsilon."""
    here = [row for row in record.curves if (row.attack, row.norm, row.epsilon) == (at.attack, at.norm, at.epsilon)]
    return listed([say("**{{ row.model }}** {{ row.accuracy|value }}", row=row) for row in here])


def _judged(
    record: AttackRecord, row: rows.AttackedModelRow, at: AttackCurveRow, curves: Sequence[AttackCurveRow]
) -> Verdict:
    """Return the verdict on the robustness of a model; faulty or weak attacks leave no praise.

    Every attack leaves an upper bound of robust accuracy: one below the limit cannot pass, so it is not inconclusive.
    """
    state = LIMITS["robustness"].judge(at.accuracy)
    failed = _failed(record, row.model)
    doubts = False
    words = "accuracy under {{ at.title }} at {{ at.at }}"
    far = strongest(each for each in curves if each.epsilon >= FAR)
    again = next((each for each in record.survivors if each.model == row.model), None)
    if not row.clean.value:
        state = "inconclusive"
        words = "it classifies no clean image correctly"
    elif min(each.accuracy.value for each in curves) >= row.clean.value:
        state = "inconclusive"
        doubts = True
        words = "no attack fooled it at any epsilon, which says more about these attacks than about the model"
    elif (row.clean.n or 0) < FEWEST:
        state = "inconclusive"
        words = words + ", on fewer than {{ few }} images"
    elif failed and state in ("pass", "warn"):
        state = "inconclusive"
        doubts = True
        words += (
            ", but {{ failed|length }} self-check{{ failed|s }} failed ({{ fault }}): it is too high by an unknown "
            "amount"
        )
    elif again is not None and again.missed > _MISSED * again.survivors:
        state = "warn" if state == "pass" else state
        doubts = True
        words += (
            "; but stronger attacks broke {{ again.missed }} of its {{ again.survivors }} survivors at {{ again.at }}: "
            "these attacks are too weak"
        )
    elif again is not None and (again.margin is not None or again.square is not None):
        words += (
            "; at {{ again.at }} it keeps {{ again.after|alone }}, also under a margin loss and Square on its "
            "{{ again.survivors }} survivors"
        )
    elif state == "pass" and far is not None and far.accuracy.value >= _KEPT * row.clean.value:
        state = "warn"
        doubts = True
        words += (
            "; but the attacks are too weak: at {{ far.at }} it still has {{ far.accuracy|alone }}, which undefended "
            "models rarely keep"
        )
    if state == "inconclusive" and not_robust(at.accuracy) and (row.clean.n or 0) >= FEWEST and row.clean.value:
        state = "warn"
        words += "; as an upper bound it lies below the limit all the same"
    fault = _in_words(failed[0]) if failed else ""
    because = say(words, at=at, few=FEWEST, failed=failed, fault=fault, far=far, again=again)
    return Verdict(state, because, "robustness", doubts)


def not_robust(upper_bound: Estimate) -> bool:
    """Return True if accuracy under an attack, however weak or faulty, shows that a model cannot pass."""
    return LIMITS["robustness"].out_of_reach(upper_bound)


def _soundness(record: AttackRecord, row: rows.AttackedModelRow) -> Claim:
    """Return the self-checks of the attacks on one model: those that could not have failed are not passed."""
    own = [check for check in record.checks if check.model == row.model]
    failed = _failed(record, row.model)
    open_ = [check for check in own if check.state == "inconclusive"]
    because = say(
        "{% if row.failed is none %}the self-checks of the attacks on **{{ model }}** were not finished: an attack may "
        "be faulty{% elif failed %}{{ failed|length }} of {{ own|length }} self-checks of the attacks on "
        "**{{ model }}** failed ({{ fault }}): its robust accuracies are too high."
        "{% elif open %}{{ open|length }} of {{ own|length }} could not have failed, as nothing was fooled in "
        "them{% elif own %}{{ own|length }} of {{ own|length }} as expected, each on images that were fooled{% else %}"
        "no image was classified correctly, so there was nothing to check the attacks on{% endif %}",
        row=row,
        model=row.model,
        own=own,
        failed=failed,
        open=open_,
        fault=_in_words(failed[0]) if failed else "",
    )
    state: State = "fail" if failed else "pass" if own and not open_ else "inconclusive"
    says = because if failed else ""
    verdict = Verdict(state, because, doubts=bool(failed))
    return Claim("self-checks", row.model, says, verdict=verdict, evidence="intervened")


def _corruptions(record: AttackRecord, row: rows.AttackedModelRow, lost: Estimate) -> Claim:
    """Return what common corruptions cost."""
    own = [each for each in record.corruptions if each.model == row.model]
    said = say(
        "Common corruptions cost **{{ row.model }}** {{ row.lost }} of top-1 accuracy on average. The worst is "
        "{{ hardest.title }} at severity {{ hardest.severity }}: {{ hardest.accuracy|value }}.",
        row=row,
        hardest=min(own, key=lambda each: each.accuracy.value),
    )
    because = "accuracy lost, mean over all kinds and severities"
    state = LIMITS["corruptions"].judge(lost)
    classes = record.config.data.classes if record.config.data else 0
    classes = max([classes, *(model.classes for model in record.config.models)])  # the data may have some of them
    if row.clean.low is None or row.clean.low <= 1 / max(classes, 1):
        because = "its clean accuracy is not above chance: nothing to lose"
        state = "inconclusive"
    elif record.images < FEWEST:
        because = f"{because}, of few images"
        state = "inconclusive"
    return Claim(
        "common corruptions",
        row.model,
        said if record.images >= FEWEST else "",
        brief=_worst_corruptions(record) if record.images >= FEWEST else "",
        effect=lost,
        verdict=Verdict(state, because, "corruptions"),
        evidence="intervened",
        place="corruptions",
    )


def _worst_corruptions(record: AttackRecord) -> str:
    """Return the common corruption that leaves each model least."""
    worst: dict[str, rows.CorruptionRow] = {}
    for row in record.corruptions:
        if row.model not in worst or row.accuracy.value < worst[row.model].accuracy.value:
            worst[row.model] = row
    titles = list(dict.fromkeys(row.title for row in worst.values()))
    left = "**{{ row.model }}** {{ row.accuracy|value }}"
    if len(titles) > 1:
        left += " ({{ row.title }})"
    return say(
        "The worst common corruption{% if title %}, {{ title }},{% endif %} leaves {{ left }}.",
        title=titles[0] if len(titles) == 1 else "",
        left=listed([say(left, row=row) for row in worst.values()]),
    )


def _corruption_gap(row: rows.CorruptionPairRow, record: AttackRecord) -> Claim:
    """Return the claim of one difference between two models under a corruption; p is not corrected."""
    ahead = row.first if row.difference.value >= 0 else row.second
    behind = row.second if ahead == row.first else row.first
    here = [each for each in record.corruptions if (each.kind, each.severity) == (row.kind, row.severity)]
    kept = {each.model: each.accuracy for each in here}
    return found(
        f"corruption: {row.kind}",
        f"{row.first} and {row.second}",
        "Under {{ title }} at severity {{ severity }} **{{ ahead }}** keeps {{ kept[ahead]|value }}, **{{ behind }}** "
        "{{ kept[behind]|value }}: {{ effect|alone }}.",
        signed(row.difference, ahead == row.first),
        brief="The corruption {{ title }} (severity {{ severity }}) leaves **{{ ahead }}** {{ kept[ahead]|value }} "
        "accuracy, **{{ behind }}** {{ kept[behind]|value }}.",
        given={"title": row.title, "severity": row.severity, "ahead": ahead, "behind": behind, "kept": kept},
        headline="{{ title }} (severity {{ severity }}) leaves {{ ahead }} {{ kept[ahead]|value(0) }}, {{ behind }} "
        "{{ kept[behind]|value(0) }}",
        p=row.p,
        kind="comparison",
        evidence="intervened",
        place="corruptions",
    )


def _largest_corruption_gap(record: AttackRecord) -> Iterator[Claim]:
    """Yield the largest difference between two models under a corruption that survives Holm's correction."""
    known = [row for row in record.corruption_pairs if row.p_holm <= LEVEL]
    if known and record.images >= FEWEST:
        row = max(known, key=lambda each: abs(each.difference.value))
        yield replace(_corruption_gap(row, record), title="", p=row.p_holm)


def effects(record: AttackRecord) -> Iterator[Claim]:
    """Yield every difference under attack and under corruptions that can show one, with p before any correction."""
    for row in record.pairs:
        if row.attack != "clean" and informative(record, row):
            yield replace(_difference_at(record, row, [], []), question=f"attack: {row.attack}", p=row.p)
    for gap in record.corruption_pairs:
        yield _corruption_gap(gap, record)


def unknown(record: AttackRecord) -> Iterator[str]:
    """Yield what could overturn this report, the most serious first."""
    open_ = [row for row in record.checks if row.state == "inconclusive"]
    if any(row.failed is None for row in record.overall):
        yield "The self-checks of the attacks are not finished: a faulty attack makes a model look robust."
    if record.images < FEWEST:
        yield say("Only {{ n }} image{{ n|s }}: too few for any claim.", n=record.images)
    if open_:
        yield say(
            "{{ open|length }} of {{ rows|length }} self-checks could not have failed, as nothing was fooled in them: "
            "they are no evidence that the attacks are sound.",
            open=open_,
            rows=record.checks,
        )
    if record.images >= FEWEST and all(row.robust is None for row in record.overall):
        yield "No L∞ attack was run at `1/255`, where robustness is judged; add `--epsilon 0,1,2,4,8`."
    yield "Robust accuracies are upper bounds: a stronger attack (`--attack auto`) may lower them."
    if record.options.get("predicted"):
        yield (
            "The models' own predictions are the labels (`--predicted`): accuracy is the share of predictions that "
            "stay the same, right or wrong."
        )
    if record.options.get("downwards"):
        yield (
            "The largest epsilon was tried first (`--downwards`): smaller ones were not tried for an image that stayed "
            "correct, and count as survived."
        )
    few = [name for name, kept in sampled(record).items() if getattr(record, name) and not kept]
    if few:
        yield say("Measured on too few images to be shown: {{ few }}; the numbers are in `tables/`.", few=listed(few))
    yield "One set of weights of each model was attacked: another training may be more or less robust."


def sampled(record: AttackRecord) -> dict[str, list[Any]]:
    """Return the rows of the tables of images that fool a model, where there are enough of them."""
    transfer = [row for row in record.transfer if row.made_for != row.shown_to]
    return {
        "transfer": [row for row in transfer if enough(row.rate)],
        "blocks": [row for row in record.blocks if enough(row.distance)],
    }
