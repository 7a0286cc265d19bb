"""The report of `vitlens attack`: the accuracy under attacks and corruptions, and what changes inside the models."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from matplotlib.figure import Figure

from vitlens.charts import Picture, amplification, histogram, images, intervals, lines, matrix
from vitlens.commands.attack.claims import FEW, claims, informative, too_strong
from vitlens.commands.attack.record import (
    JUDGED,
    AttackCurveRow,
    AttackedModelRow,
    AttackRecord,
    AttackRow,
    AttentionShiftRow,
    MapAgreementRow,
    RobustClassRow,
    TransferRow,
    scale_of,
    strongest,
)
from vitlens.figures.style import shortened
from vitlens.record import by, col
from vitlens.report.prose import listed, say
from vitlens.report.sections import Chart, Glance, Report, Section
from vitlens.uncertainty import LEVEL, Estimate, Side, apart, beyond, widened

LEAST: Final = 0.01  # of a statistic's value before the attack: smaller changes of attention are not counted
PICTURES: Final = 6  # of the first page, of all models together
_ORDER: Final = ("failed", "inconclusive")


@dataclass(frozen=True)
class SmallestRow:
    """The smallest perturbation found of one image."""

    model: str = col("model")
    attack: str = col("attack")
    distance: float = col("smallest perturbation")


@dataclass(frozen=True)
class SeverityRow:
    """Accuracy of one model under one corruption, at severity 0 on clean images."""

    model: str = col("model")
    title: str = col("corruption")
    severity: int = col("severity")
    accuracy: Estimate = col("accuracy")
    chance: Estimate = col("chance")


def unknown(record: AttackRecord) -> Iterator[str]:
    """What could overturn this report, the most serious first."""
    open_ = [row for row in record.checks if row.state == "inconclusive"]
    if record.images < FEW:
        yield say(
            "Only {{ n }} image{{ n|s }} {{ verb }} attacked: too few for any claim.",
            n=record.images,
            verb="was" if record.images == 1 else "were",
        )
    if open_:
        yield say(
            "{{ open|length }} of {{ rows|length }} self-checks could not have failed, as nothing was fooled in them: "
            "they are no evidence that the attacks are sound.",
            open=open_, rows=record.checks,
        )  # fmt: skip
    yield from _weak_attacks(record)
    if record.overall and all(row.robust is None for row in record.overall):
        yield "No L∞ attack was run at `1/255`, where robustness is judged; add `--epsilon 0,1,2,4,8`."
    yield from _bound(record)
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
    few = list(_too_few(record))
    if few and record.images >= FEW:
        yield say("Measured on too few images to be shown: {{ few }}; the numbers are in `tables/`.", few=listed(few))
    if any(row.rate is not None and row.made_for != row.shown_to for row in record.transfer):
        yield "Attacks stop when their own model is fooled: an attack designed for transfer may fool more other models."
    yield "One set of weights of each model was attacked: another training may be more or less robust."
    yield (
        "Adversarial pixels are floating-point numbers: saved with eight bits, the smallest perturbations are partly "
        "undone."
    )


def _weak_attacks(record: AttackRecord) -> Iterator[str]:
    """Models that keep at 8/255 what no undefended model keeps."""
    for row in record.overall if record.images >= FEW else ():
        far = too_strong([each for each in record.curves if each.model == row.model], row)
        if far is not None:
            yield say(
                "{{ row.model }} still has {{ far.accuracy|value }} at {{ far.at }}, more than undefended models keep: "
                "unless it was trained against attacks, these are too weak.",
                row=row, far=far,
            )  # fmt: skip


def _bound(record: AttackRecord) -> Iterator[str]:
    """The strongest attack on the model that keeps most at the smallest L∞ epsilon is only an upper bound."""
    rows = [row for row in record.curves if row.norm == "linf" and row.epsilon > 0 and row.accuracy.value > 0]
    if not rows:
        return
    least = min(row.epsilon for row in rows)
    known = [strongest(own, least) for own in by(rows, "model").values()]
    row = max((each for each in known if each), key=lambda each: each.accuracy.value)
    how = next(each for each in record.attacks if (each.model, each.attack) == (row.model, row.attack))
    yield say(
        "Robust accuracies are upper bounds: {{ row.accuracy|value }} of {{ row.model }} at {{ row.at }} was found by "
        "{{ row.title }} with {{ how.steps }} step{{ how.steps|s }} and {{ how.restarts }} start{{ how.restarts|s }}; "
        "a stronger attack (`--attack auto`) may lower it.",
        row=row, how=how,
    )  # fmt: skip


def _too_few(record: AttackRecord) -> Iterator[str]:
    """The parts of the record that were measured on fewer than FEW images."""
    if record.transfer and not _transfer(record):
        yield "transfer"
    if record.agreements and not _agreements(record):
        yield "changes of maps"
    if record.blocks and not _halfway(record):
        yield "changes of blocks"
    if record.by_class and not _classes(record):
        yield "accuracy by class"


def _strongest_rows(record: AttackRecord) -> list[AttackCurveRow]:
    """The strongest attack at each epsilon of each norm, on each model, without clean accuracies."""
    places = by([row for row in record.curves if row.epsilon > 0], "norm")
    rows = []
    for own in places.values():
        for epsilon in sorted({row.epsilon for row in own}):
            for model in record.aliases:
                here = [row for row in own if (row.model, row.epsilon) == (model, epsilon)]
                rows += [min(reversed(here), key=lambda row: row.accuracy.value)] if here else []
    return rows


def _curves(rows: Sequence[Any], title: str) -> Figure:
    """A panel for each attack with a curve for each model; of one model a panel for each norm."""
    if len(by(rows, "model")) > 1:
        return lines("epsilon", "accuracy", of="model", panel="panel")(rows, title)
    return lines("epsilon", "accuracy", of="title", panel="family")(rows, title)


def _counted(record: AttackRecord) -> str:
    """How many of the tests that could show something do, for each pair of models."""
    parts = []
    for first, second in dict.fromkeys((row.first, row.second) for row in record.pairs):
        own = [row for row in record.pairs if (row.first, row.second) == (first, second)]
        attacked = [row for row in own if row.attack != "clean"]
        telling = [row for row in attacked if informative(record, row)]
        clear = [row for row in telling if row.p_holm <= LEVEL]
        more = [row for row in clear if row.difference.value > 0]
        less = [row for row in clear if row.difference.value < 0]
        if len(less) > len(more):
            first, second, more, less = second, first, less, more
        known = {
            "telling": telling, "silent": len(attacked) - len(telling), "first": first, "second": second,
            "more": more, "less": less,
            "clean": next((row for row in own if row.attack == "clean" and row.p_holm <= LEVEL), None),
        }  # fmt: skip
        parts.append(say(
            "{% if more or less %}**{{ first }}** keeps more accuracy than **{{ second }}** in {{ more|length }} of "
            "{{ telling|length }} paired tests{% if less %} and less in {{ less|length }}{% endif %}, after Holm's "
            "correction{% elif telling %}In none of {{ telling|length }} paired tests do **{{ first }}** and "
            "**{{ second }}** differ significantly{% else %}**{{ first }}** and **{{ second }}** cannot be compared "
            "under attack{% endif %}{% if silent %}; in {{ silent }} {% if telling %}more {% endif %}tests both have "
            "lost all accuracy or none{% endif %}.{% if clean %} On clean images they differ by "
            "{{ clean.difference|alone }}, which robust accuracies include.{% endif %}",
            **known,
        ))  # fmt: skip
    return " ".join(parts)


def _smallest(record: AttackRecord) -> list[SmallestRow]:
    """The smallest perturbations of correctly classified images under the one attack that searches for them, else under
    the L∞ attack that fools most."""
    chosen = _searched(record)
    rows = []
    for attack in chosen:
        arrays = record.attacked[attack.model]
        values = arrays.distance[attack.attack] * scale_of(attack.norm)
        kept = values[arrays.clean & np.isfinite(values) & (values > 0)]
        rows += [SmallestRow(attack.model, attack.title, float(each)) for each in kept]
    return rows


def _searched(record: AttackRecord) -> list[AttackRow]:
    """The rows of the attack whose smallest perturbations are drawn."""
    able = [row for row in record.attacks if row.norm != "patch" and row.right and row.model in record.attacked]
    able = [row for row in able if row.kind == "minimum"] or able
    most = max(by(able, "attack").values(), key=lambda rows: sum(row.broken for row in rows), default=())
    return list(most)


def _classes(record: AttackRecord) -> list[RobustClassRow]:
    """The classes of at least FEW images, those that lose most first."""
    rows = [row for row in record.by_class if (row.clean.n or 0) >= FEW]
    return sorted(rows, key=lambda row: row.robust.value - row.clean.value)


def _classes_apart(record: AttackRecord) -> str:
    parts = []
    for model, rows in by(_classes(record), "model").items():
        ordered = sorted(rows, key=lambda row: row.robust.value)
        least, most = ordered[0], ordered[-1]
        differ = apart(widened(least.robust, len(rows)), widened(most.robust, len(rows))) is Side.BELOW
        parts.append(say(
            "**{{ model }}** keeps least of class {{ least.class_name }}, {{ least.robust }}, and most of "
            "{{ most.class_name }}, {{ most.robust }}{% if not differ %}; over so many classes their intervals "
            "overlap{% endif %}.",
            model=model, least=least, most=most, differ=differ,
        ))  # fmt: skip
    return " ".join(parts)


def _transfer(record: AttackRecord) -> list[TransferRow]:
    """All pairs, where any of two models has at least FEW images that count."""
    counted = [row.rate.n or 0 for row in record.transfer if row.rate is not None and row.made_for != row.shown_to]
    return list(record.transfer) if max(counted, default=0) >= FEW else []


def _agreements(record: AttackRecord) -> list[MapAgreementRow]:
    return [row for row in record.agreements if (row.spearman.n or 0) >= FEW]


def _halfway(record: AttackRecord) -> list[AttackedModelRow]:
    """The models whose blocks were compared with those of another image, on at least FEW images."""
    known = {row.model for row in record.blocks if row.kind == "another image" and (row.distance.n or 0) >= FEW}
    return [row for row in record.overall if row.model in known]


def _shifts(record: AttackRecord) -> list[AttentionShiftRow]:
    return [row for row in record.shifts if (row.change.n or 0) >= FEW]


def _shifted(record: AttackRecord) -> Iterator[str]:
    """In which layers attention changes: beyond 0 for as many looks as layers, and by enough to matter."""
    shifts = by(_shifts(record), "model").items()
    for model, title, rows in (
        (model, title, rows) for model, own in shifts for title, rows in by(own, "title").items()
    ):
        sides = {
            row.layer: beyond(widened(row.change, len(rows)), 0.0)
            for row in rows
            if abs(row.change.value) >= LEAST * abs(row.before)
        }
        known = {
            "model": model, "what": title.partition(",")[0],
            "up": [layer for layer, side in sides.items() if side is Side.ABOVE],
            "down": [layer for layer, side in sides.items() if side is Side.BELOW],
        }  # fmt: skip
        yield say(
            "The {{ what }} of **{{ model }}** {% if up %}rises in {{ up|ranges }}{% endif %}{% if up and down %} and "
            "{% endif %}{% if down %}falls in {{ down|ranges }}{% endif %}{% if not up and not down %}is not shown to "
            "change by a hundredth in any layer{% endif %}.",
            **known,
        )  # fmt: skip


def _severities(record: AttackRecord) -> list[SeverityRow]:
    """The rows of the chart of corruptions, from the clean accuracy on."""
    clean = {row.model: row.clean for row in record.overall}
    classes = record.config.data.classes if record.config.data else 0
    chance = Estimate(1 / max(classes, 1))
    rows = []
    for row in record.corruptions:
        if row.severity == 1:
            rows.append(SeverityRow(row.model, row.title, 0, clean[row.model], chance))
        rows.append(SeverityRow(row.model, row.title, row.severity, row.accuracy, chance))
    return rows


def _examples(record: AttackRecord) -> Iterator[Picture]:
    """Images that fool the models: clean, perturbation and adversarial, with maps of the true class."""
    each = max(1, PICTURES // max(1, len(record.examples)))
    for model, arrays in [(alias, record.examples[alias]) for alias in record.aliases if alias in record.examples]:
        times = amplification(arrays.change.astype(np.float32))
        for at in range(min(each, len(arrays.pixels))):
            row = f"{shortened(model, 10)} {arrays.image[at]}"
            clean = arrays.pixels[at].astype(np.float32) / 255
            change = arrays.change[at].astype(np.float32)
            changed = np.clip(clean + change, 0, 1)
            before, after = (
                f"{shortened(str(word), 12)}, {100 * probability:.0f} %"
                for word, probability in zip(arrays.answers[:, at], arrays.probability[:, at])
            )
            yield Picture(clean, None, row, "clean", before)
            yield Picture(np.clip(0.5 + times * change, 0, 1), None, row, "perturbation", f"× {times}")
            yield Picture(changed, None, row, "adversarial", after)
            yield Picture(clean, arrays.before[at], row, "map before")
            yield Picture(changed, arrays.after[at], row, "map after")


def _changes(record: AttackRecord) -> str:
    """What the attack changes in the last block beside noise, from which block on it is halfway, and in attention."""
    parts = []
    for row in _halfway(record):
        own = [each for each in record.blocks if each.model == row.model]
        last = {each.kind: each.distance for each in own if each.block == own[-1].block}
        parts.append(say(
            "In the last block of **{{ row.model }}** the attack changes the output by {{ attack|value }} (one minus "
            "the cosine), noise of the same strength by {{ noise|value }}, another image by "
            "{{ other|value }}{% if row.halfway %}; from block {{ row.halfway|value }} on it changes half as much as "
            "another image{% endif %}.",
            row=row, attack=last["adversarial"], noise=last["noise"], other=last["another image"],
        ))  # fmt: skip
    return " ".join((*parts, *_shifted(record)))


def _pairs(rows: Sequence[Any], title: str) -> Figure:
    """The paired differences, under the names of the models where there are two."""
    named = list(dict.fromkeys(row.models for row in rows))
    drawn = intervals("test", "difference", of="models", reference=0.0)
    return drawn(rows, title if len(named) > 1 else f"{named[0]} under attack")


def _gap_at_one(record: AttackRecord) -> Estimate | None:
    """The difference of two models at 1/255, where one attack is the strongest on both."""
    best = {model: strongest(rows, JUDGED) for model, rows in by(record.curves, "model").items()}
    names = {None if row is None else row.attack for row in best.values()}
    return next((row.difference for row in record.pairs if {row.attack} == names and row.epsilon == JUDGED), None)


def _gap_when_clean(record: AttackRecord) -> Estimate | None:
    return next((row.difference for row in record.pairs if row.attack == "clean"), None)


REPORT: Final = Report(
    AttackRecord,
    claims=claims,
    unknown=unknown,
    picture=Chart(
        "examples",
        images(),
        "Images that fool a model: clean, perturbation (amplified, around grey), adversarial, and the maps of the true "
        "class, each scaled to its maximum; below: predicted class and probability.",
        title="{{ record.sample[0].title }} at {{ record.sample[0].at }}: images that fool a model",
        rows=lambda record: list(_examples(record)),
    ),
    glance=(
        Glance("overall", "robust", question="robustness", difference=_gap_at_one),
        Glance("overall", "clean", difference=_gap_when_clean),
        Glance("overall", "lost", question="common corruptions"),
        Glance("overall", "relative_error"),
        Glance("overall", "failed", question="self-checks"),
    ),
    sections=(
        Section(
            "How much accuracy is left under attack?", _strongest_rows,
            opening="At each epsilon the strongest of the attacks counts; a better attack may leave less.",
            columns=("model", "title", "epsilon", "accuracy"), about=("robustness",),
            charts=(Chart(
                "curves", _curves,
                "Robust accuracy over epsilon; bands: confidence intervals. It falls to nothing for undefended models. "
                "Epsilons of different norms cannot be compared.",
                title="Accuracy under attack, {{ first.accuracy.n }} image{{ first.accuracy.n|s }}", rows="curves",
            ),),
        ),
        Section(
            "Which model is more robust?", "pairs", opening=_counted, about=("difference under attack",),
            order=lambda row: (row.p_holm, -abs(row.difference.value)),
            charts=(Chart(
                "pairs", _pairs,
                "Accuracy of the first model minus the second's, paired by image, for each attack and epsilon. Right "
                "of the dashed line the first keeps more.",
                title="Differences of the models under attack",
            ),),
        ),
        Section(
            "How large must a perturbation be?", "attacks",
            says="Half of the {{ right }} images that **{{ model }}** has right are fooled by {{ title }} within "
            "{{ median|alone }}.",
            otherwise="More than half of the images that **{{ row.model }}** has right withstand all that "
            "{{ row.title }} tried.",
            only=lambda row: row.right > 0 and row.kind == "minimum",
            columns=("model", "title", "source", "steps", "broken", "median"),
            charts=(Chart(
                "distances", histogram("distance", of="model", bins=24),
                "How many images are fooled by a smallest perturbation of each size, in the unit of epsilon. Every "
                "size is an upper bound.",
                title="Smallest perturbations under {{ first.attack }}", rows=_smallest,
            ),),
        ),
        Section(
            "Which classes does the attack break?", _classes, opening=_classes_apart,
            charts=(Chart(
                "classes", intervals("class_name", "robust", of="model"),
                "Robust accuracy of each class, those that lose most first. Classes of low clean accuracy have less to "
                "lose.",
                title="Accuracy by class under {{ record.sample[0].title }} at {{ record.sample[0].at }}",
            ),),
        ),
        Section(
            "Do adversarial images of one model fool the other?", _transfer,
            says="Of the images that fool **{{ made_for }}**, {{ rate }} also fool **{{ shown_to }}**.",
            otherwise="No image that fools **{{ row.made_for }}** is right in **{{ row.shown_to }}** when clean.",
            only=lambda row: row.made_for != row.shown_to,
            charts=(Chart(
                "transfer",
                matrix("made_for", "shown_to", "rate", below=lambda row: f"of {row.rate.n}" if row.rate else ""),
                "Share of the images that fool the model of the row and also the model of the column, of those that it "
                "has right when clean.",
                title="Transfer of {{ record.sample[0].title }} at {{ record.sample[0].at }}",
            ),),
        ),
        Section(
            "How much do common corruptions cost?", lambda record: [row for row in record.overall if row.lost],
            about=("common corruptions",),
            says="**{{ model }}** makes {{ mean_error|alone }} errors under corruptions: {{ lost|alone }} more than on "
            "clean images.",
            charts=(Chart(
                "corruptions",
                lines("severity", "accuracy", of="model", panel="title", reference="chance"),
                "Accuracy over severity, from clean images on; dashed: chance. All models get the same pixels. "
                "Severities of different kinds cannot be compared.",
                title="Accuracy under common corruptions, {{ first.accuracy.n }} image{{ first.accuracy.n|s }}",
                rows=_severities,
            ),),
        ),
        Section(
            "What changes inside the models?", _agreements, opening=_changes,
            columns=("model", "title", "spearman", "top"),
            charts=(
                Chart(
                    "paths", lines("block", "distance", of="kind", panel="panel", log=True),
                    "One minus the cosine between a block's outputs for a clean image and its counterpart. The gap "
                    "between attack and noise of the same strength is the attack's own effect.",
                    title="Change of the outputs of blocks", rows="blocks",
                    only=lambda row: (row.distance.n or 0) >= FEW,
                ),
                Chart(
                    "shifts", lines("layer", "change", of="model", panel="title", shared=False, reference="none"),
                    "Attention after minus before the attack, mean over heads and images; dashed: no change. Opposite "
                    "changes of heads cancel.",
                    title="Change of attention under attack", rows=_shifts,
                ),
            ),
        ),
        Section(
            "Are the attacks sound?", "overall",
            says="{% if failed %}{{ failed }}{% else %}None{% endif %} of {{ checks }} self-checks of the attacks on "
            "**{{ model }}** failed{% if inconclusive %}; {{ inconclusive }} could not have failed, as nothing was "
            "fooled in them{% endif %}.",
            about=("self-checks",),
        ),
        Section(
            "Which self-checks did not pass?", lambda record: [row for row in record.checks if row.state != "passed"],
            opening="A faulty attack makes a model look robust: the checks test properties of every sound attack, and "
            "look for signs of masked gradients.",
            order=lambda row: _ORDER.index(row.state),
            columns=("model", "name", "attack", "expected", "found", "state"),
        ),
    ),
)  # fmt: skip
