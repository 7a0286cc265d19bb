"""What `vitlens features` claims: whose features serve best, what classifiers leave unread, and what is not shown."""

from collections.abc import Iterator, Sequence
from typing import Final

from vitlens.commands.features.record import (
    PROBE,
    DepthRow,
    FeaturesRecord,
    FeaturesRow,
    HeadRow,
    PairRow,
    PatchesRow,
    classifier_name,
)
from vitlens.commands.shared.comparison import FEWEST, signed
from vitlens.names import OBJECTIVES
from vitlens.record import by
from vitlens.report.claims import Claim, Kind, found
from vitlens.report.prose import say
from vitlens.report.verdicts import LIMITS
from vitlens.uncertainty import LEVEL, Estimate, Side, apart, beyond, widened

GROUP: Final = 10  # images of a class from which on a map can show it as a group
SEARCHED: Final = 100  # images from which on the nearest of them says something
_FEW: Final = 30  # images below which an accuracy beside another is not judged


def most_neighbours(record: FeaturesRecord) -> str:
    """The classifier by the most neighbours: "knn-20"."""
    return f"knn-{max(record.options['ks'])}"


def tested(record: FeaturesRecord, rows: Sequence[PairRow | HeadRow | DepthRow]) -> list[str]:
    """The classifiers that conclusions are drawn from: the probe and the most neighbours, where they were run."""
    return [name for name in (PROBE, most_neighbours(record)) if any(row.classifier == name for row in rows)]


def claims(record: FeaturesRecord) -> Iterator[Claim]:
    """Which model's features serve best, what each classifier leaves unread, and layers and wordings that differ."""
    if record.images < FEWEST:
        return
    if tested(record, record.pairs):
        yield _ahead(record)
    for row in record.features:
        yield from _classifier(record, row)
        yield from _better_layer([each for each in record.depth if (each.model, each.classifier) == (row.model, PROBE)])
        yield from _zero_shot(record, row)
    yield from _objects(record)
    yield from _unlike(record)
    for patches in record.patches if not record.depth else ():
        if patches.share == "position" and patches.layer == "embedding":
            yield _places(patches)


def _objectives(rows: Sequence[FeaturesRow]) -> list[str]:
    """The objectives of pretraining that are known, each once."""
    return [objective for objective in OBJECTIVES if any(row.objective == objective for row in rows)]


def _ahead(record: FeaturesRecord) -> Claim:
    """Whether the model with the highest accuracy is ahead of all others, or, where several objectives are known, of
    all models of another."""
    told = len(_objectives(record.features)) > 1
    known = [row for row in record.features if not told or row.objective in OBJECTIVES]
    parts, titles, winners = [], [], dict[str, Estimate]()
    for name in tested(record, record.pairs):
        top = max(known, key=lambda row: each.value if (each := row.reached(name)) else 0.0)
        rivals = {row.model for row in known if not (told and row.objective == top.objective)} - {top.model}
        own = [row for row in record.pairs if row.classifier == name and top.model in (row.first, row.second)]
        pairs = {row.second if row.first == top.model else row.first: row for row in own}
        beaten = [other for other, row in pairs.items() if other in rivals and row.better == top.model]
        alike = [other for other in pairs if other in rivals and other not in beaten]
        closest = min(beaten, key=lambda other: pairs[other].gain(top.model).value, default="")
        gain = pairs[closest].gain(top.model) if beaten else None
        given = {"top": top, "beaten": beaten, "alike": alike, "closest": closest, "gain": gain, "told": told}
        parts.append(say(
            "By the {{ name }} **{{ top.model }}**{% if told %} ({{ top.words }}){% endif %} is {% if beaten %}ahead "
            "of "
            "{{ beaten|names }}{% if beaten|length > 1 %}, of {{ closest }}{% endif %} by {{ gain }}{% if alike %}, "
            "but {% endif %}{% endif %}{% if alike %}not significantly ahead of {{ alike|names }}{% endif %}.",
            name=classifier_name(name), **given,
        ))  # fmt: skip
        titles.append(
            say(
                "{% if alike %}{{ top.model }} has no significant lead over {{ alike[0] }} by its features"
                "{% elif told %}{{ top.model }} ({{ top.objective }}) is ahead of the models of other pretrainings"
                "{% else %}The features of {{ top.model }} give the class best{% endif %}",
                **given,
            )
        )
        if gain and not alike:
            winners.setdefault(top.objective if told else top.model, gain)
    if len(winners) > 1:
        parts.append("Which features are better depends on how they are used.")
        titles = ["Probe and neighbours disagree on which features are better"]
    effect = next(iter(winners.values()), None)
    return Claim(
        "features", " and ".join(record.aliases), " ".join(parts), titles[0], effect=effect, kind="answer",
        place="depth",
    )  # fmt: skip


def _classifier(record: FeaturesRecord, row: FeaturesRow) -> Iterator[Claim]:
    """What a probe (without one, neighbours) reads from the last layer, beside the model's own classifier."""
    named = tested(record, [each for each in record.depth if each.model == row.model])
    if not named:
        return
    gap = next((each for each in record.head if (each.model, each.classifier) == (row.model, named[0])), None)
    given = {"m": row.model, "by": classifier_name(named[0]), "reached": row.reached(named[0]), "own": row.accuracy,
             "chance": record.sets[0].chance}  # fmt: skip
    only = len(record.features) == 1
    if gap is None:
        words = (
            "From the last layer of **{{ m }}**, {{ reached }} of the images are classified correctly by the {{ by }} "
        )
        words += "({{ chance|percent }} by chance)."
        title = say("The last layer of {{ m }} gives the class of {{ reached|value(0) }} of the images", **given)
        kind: Kind = "answer" if only else "fact"
        yield Claim("classifier", row.model, say(words, **given), title, kind=kind, place="depth")
        return
    gain, decided, judged = signed(gap.difference, keep=False), gap.p_holm <= LEVEL, named[0] == PROBE
    more = decided and gain.value < 0
    state = LIMITS["classifier"].judge_difference(gain)
    if (gain.n or 0) < _FEW or (state in ("warn", "fail") and not decided):
        state = "inconclusive"
    yield Claim(
        "classifier", row.model,
        say("{% if more %}The last layer of **{{ m }}** holds more than its classifier reads: {% else %}From the last "
            "layer of **{{ m }}**, {% endif %}{{ reached|alone }} of the images are classified correctly by the {{ by "
            "}} ({{ chance|percent }} by chance) and {{ own|value }} by its own classifier ({{ gap.difference|alone }}"
            "{% if not decided %}, not significant{% endif %}; McNemar's exact test, p = {{ gap.p_holm|number }}).",
            more=more, decided=decided, gap=gap, **given),
        title=say("{% if more %}The last layer of {{ m }} holds more than its classifier reads{% else %}The last layer "
                  "of {{ m }} gives the class of {{ reached|value(0) }} of the images{% endif %}", more=more, **given),
        state=state if judged else "", effect=gain, p=gap.p_holm, limit="classifier" if judged else "",
        kind="answer" if only else "hidden fault" if more else "comparison", place="depth",
        because="its accuracy minus that of a linear probe of its last layer",
    )  # fmt: skip


def _better_layer(rows: Sequence[DepthRow]) -> Iterator[Claim]:
    """A layer whose probe is better than that of the last, also for as many looks as layers."""
    if len(rows) < 2:
        return
    last, best = rows[-1], max(rows, key=lambda row: row.accuracy.value)
    looks = len(rows) - 1
    if apart(widened(best.accuracy, looks), widened(last.accuracy, looks)) is Side.ABOVE:
        yield found(
            "best layer", best.model,
            "A linear probe reads the class better from {{ best.place }} of **{{ best.model }}** than from its last "
            "layer: {{ effect|alone }} beside {{ last.accuracy|alone }}.",
            best.accuracy, given={"best": best, "last": last}, reference=last.accuracy.value, place="depth",
        )  # fmt: skip


def _zero_shot(record: FeaturesRecord, model: FeaturesRow) -> Iterator[Claim]:
    """Zero-shot accuracy, and the template that changes it most."""
    rows = [row for row in record.templates if row.model == model.model]
    if not rows:
        return
    yield found(
        "zero-shot", model.model,
        "Given only the names of the classes, **{{ m }}** classifies {{ effect }} of the images correctly (ensemble of "
        "{{ n }} template{{ n|s }}).",
        rows[0].accuracy, given={"m": model.model, "n": len(rows) - 1}, kind="answer",
        title=say("Zero-shot, {{ m.model }} classifies {{ m.zero_shot|value(0) }} of the images correctly", m=model),
    )  # fmt: skip
    differing = [(row, row.gain) for row in rows if row.gain and row.p_holm is not None and row.p_holm <= LEVEL]
    if differing:
        row, gain = max(differing, key=lambda each: abs(each[1].value))
        yield found(
            "wording", model.model,
            "“{{ row.template }}” alone changes the zero-shot accuracy of **{{ row.model }}** by {{ effect }} beside "
            "the ensemble of all templates.",
            gain, given={"row": row}, p=row.p_holm, place="templates",
        )  # fmt: skip


def _objects(record: FeaturesRecord) -> Iterator[Claim]:
    """Whose patches find the object best, of models of several objectives; only where they find it better than the
    patches before any attention do."""
    rows = [row for row in record.patches if row.share == "object"]
    last = {row.model: row.value for row in rows if row.layer != "embedding"}
    before = {row.model: row.value for row in rows if row.layer == "embedding"}
    known = [row for row in record.features if row.model in last and row.objective in OBJECTIVES]
    if len(_objectives(known)) < 2:
        return
    best = max(known, key=lambda row: last[row.model].value)
    own, start = last[best.model], before.get(best.model)
    others = [last[row.model] for row in known if row.objective != best.objective]
    easy = start is not None and apart(own, start) is not Side.ABOVE
    first = not easy and all(apart(own, other) is Side.ABOVE for other in others)
    yield Claim(
        "object by patches", " and ".join(row.model for row in known),
        say("{% if easy %}The patches of the last layer find the object no better than those before any attention: "
            "{{ own|value }} and {{ start|value }} intersection over union for **{{ m.model }}**{% elif first %}The "
            "patches of **{{ m.model }}** ({{ m.words }}) find the object best without training: {{ own|alone }} "
            "intersection over union{% else %}By how well patches find the object no pretraining is ahead{% endif %}.",
            easy=easy, first=first, own=own, start=start, m=best),
        effect=own if first else None, reference=max(other.value for other in others), kind="comparison",
        place="space_embedding",
    )  # fmt: skip


def _unlike(record: FeaturesRecord) -> Iterator[Claim]:
    """That the last layers of two models are less alike than the first of one and the last of the other."""
    for own in by(record.between, "models").values():
        last = own[-1]
        first = next(row.cka for row in own if row.layer == "0" and row.other == last.other)
        if last.cka and first and apart(last.cka, first) is Side.BELOW:
            yield found(
                "last layers", f"{last.first} and {last.second}",
                "The last layers of **{{ r.first }}** and **{{ r.second }}** are less alike ({{ effect|alone }} linear "
                "CKA) than the first of {{ r.first }} and the last of {{ r.second }} ({{ first|alone }}).",
                last.cka, given={"r": last, "first": first}, reference=first.value, place="cka",
            )  # fmt: skip


def _places(row: PatchesRow) -> Claim:
    """Whether, of images without classes, positions decide which patches are similar before any attention."""
    what = "their place" if beyond(row.value, row.chance) is Side.ABOVE else "what they show"
    return found(
        "positions", row.model,
        "Before any attention, {{ effect|alone }} of the nearest patches in other images lie at the same place in "
        "**{{ row.model }}** ({{ row.chance|percent }} by chance).",
        row.value, given={"row": row}, reference=row.chance, kind="answer",
        title=say("Before any attention, {{ w }} makes patches of {{ m }} similar", m=row.model, w=what),
        place="space_embedding",
    )  # fmt: skip


def unknown(record: FeaturesRecord) -> Iterator[str]:
    """What could overturn this, the most serious first."""
    (data,), rows = record.sets, record.features
    if record.images < FEWEST:
        yield say("{{ n }} image{{ n|s }} {{ n|are }} too few for a claim about others.", n=record.images)
    if data.bank is None:
        yield say("k-NN and linear probe are left out: {{ reason|whole }}.", reason=data.no_bank)
    for row in rows:
        if row.no_zero_shot:
            yield say("{{ r.model }} has no zero-shot accuracy: {{ r.no_zero_shot|whole }}.", r=row)
    if record.notes:
        yield say("{{ first.note|whole }}{% if more %} (more in `tables/notes.csv`){% endif %}.",
                  first=record.notes[0], more=record.notes[1:])  # fmt: skip
    yield from _pretrainings(rows) if len(rows) > 1 else ()
    if data.bank is not None:
        yield say("Neighbours and probes learn from {{ n }} images of the training part: a model that was trained on "
                  "them separates them better than unseen images.", n=data.bank)  # fmt: skip
    few = [row.searched for row in rows if 0 < row.searched < SEARCHED]
    if few:
        yield say("The nearest of {{ n }} images need not be similar; search {{ least }} or more.",
                  n=few[0], least=SEARCHED)  # fmt: skip
    if 0 < data.largest < GROUP:
        yield say("Maps cannot show groups: the largest class has {{ n }} image{{ n|s }}.", n=data.largest)
    if record.depth:
        yield "That a layer gives the class does not show that the model uses it; `vitlens ablate` tests that."
        yield "The best layer is best partly by chance: the images that choose it also measure it."
    shares = [row for row in record.maps if row.explained is not None and row.of in ("images", "patches")]
    if shares:
        yield say("PCA of the {{ r.of }} of {{ r.model }} shows {{ r.explained|percent }} of their variance, and t-SNE "
                  "distorts distances.", r=min(shares, key=lambda row: row.explained or 0.0))  # fmt: skip


def _pretrainings(rows: Sequence[FeaturesRow]) -> Iterator[str]:
    """What keeps these models from comparing pretrainings."""
    without = [row.model for row in rows if row.objective == "not known"]
    random = [row.model for row in rows if row.objective == "random weights"]
    known = _objectives(rows)
    if without:
        yield say("The pretraining of {{ w|names }} is not known; `--objective ALIAS=OBJECTIVE` states it.", w=without)
    if random:
        yield say("{{ r|names }}: random weights, which say nothing about pretraining.", r=random)
    if len(known) == 1:
        yield say("All known pretrainings are {{ k }}: these numbers compare models, not pretrainings.", k=known[0])
    elif known:
        yield "The models differ in data, recipe and size too, so no difference is that of the pretraining alone."
