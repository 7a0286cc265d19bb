"""What `vitlens features` claims: whose features serve best, what classifiers leave unread, and what is not shown."""

from collections.abc import Iterator, Sequence
from typing import Final

from vitlens.commands.features import record as kept
from vitlens.commands.features.record import PROBE, FeaturesRecord, FeaturesRow, classifier_name
from vitlens.commands.shared.comparison import signed
from vitlens.commands.shared.maps.report import count_uniform, uniform_claim
from vitlens.names import OBJECTIVES
from vitlens.record import by
from vitlens.report.claims import FEWEST, Claim, Kind, few_images, found
from vitlens.report.prose import say
from vitlens.report.verdicts import LIMITS, Verdict
from vitlens.uncertainty import LEVEL, Estimate, Side, apart, beyond, widened

GROUP: Final = 10  # images of a class from which on a map can show it as a group
SEARCHED: Final = 100  # images from which on the nearest of them says something
_FEW: Final = 30  # images below which an accuracy beside another is not judged


def most_neighbours(record: FeaturesRecord) -> str:
    """Return the classifier by the most neighbours: "knn-20"."""
    return f"knn-{max(record.options['ks'])}"


def tested(record: FeaturesRecord, rows: Sequence[kept.PairRow | kept.HeadRow | kept.DepthRow]) -> list[str]:
    """Return the classifiers that conclusions are drawn from: the probe and the most neighbours, where they were
    run."""
    return [name for name in (PROBE, most_neighbours(record)) if any(row.classifier == name for row in rows)]


def claims(record: FeaturesRecord) -> Iterator[Claim]:
    """Yield which model's features serve best, what each classifier leaves unread, and layers and wordings that
    differ."""
    for model, arrays in record.shown.items():
        if arrays.prompts is not None:
            maps = arrays.prompts.reshape(-1, *arrays.prompts.shape[-2:])
            yield from uniform_claim(model, {"the prompts": count_uniform(maps)}, len(maps))
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


def effects(record: FeaturesRecord) -> Iterator[Claim]:
    """Yield the difference of each classifier on two models' features, with p before any correction."""
    for row in record.pairs:
        ahead, behind = (row.first, row.second) if row.difference.value >= 0 else (row.second, row.first)
        given = {"ahead": ahead, "behind": behind, "by": classifier_name(row.classifier)}
        yield found(
            f"features by {row.classifier}",
            f"{row.first} and {row.second}",
            "From the features of **{{ ahead }}** the {{ by }} reads the class of {{ effect|alone }} more images than "
            "from those of **{{ behind }}**.",
            row.gain(ahead),
            given=given,
            p=row.p,
            kind="comparison",
            place="depth",
        )


def _objectives(rows: Sequence[FeaturesRow]) -> list[str]:
    """Return the objectives of pretraining that are known, each once."""
    return [objective for objective in OBJECTIVES if any(row.objective == objective for row in rows)]


def _ahead(record: FeaturesRecord) -> Claim:
    """Return whether the model with the highest accuracy is ahead of all others, or, where several objectives are
    known, of all models of another."""
    told = len(_objectives(record.features)) > 1
    known = [row for row in record.features if not told or row.objective in OBJECTIVES]
    parts = []
    titles = []
    winners = dict[str, Estimate]()
    for name in tested(record, record.pairs):
        top = max(known, key=lambda row: each.value if (each := row.reached(name)) else 0.0)
        rivals = {row.model for row in known if not (told and row.objective == top.objective)} - {top.model}
        pairs = {
            ({row.first, row.second} - {top.model}).pop(): row
            for row in record.pairs
            if row.classifier == name and top.model in (row.first, row.second)
        }
        beaten = {
            other: row.gain(top.model) for other, row in pairs.items() if other in rivals and row.better == top.model
        }
        alike = [other for other in pairs if other in rivals and other not in beaten]
        closest = min(beaten, key=lambda other: beaten[other].value, default="")
        gain = beaten.get(closest)
        given = {"top": top, "beaten": beaten, "alike": alike, "closest": closest, "gain": gain, "told": told}
        parts.append(
            say(
                "By the {{ name }} **{{ top.model }}**{% if told %} ({{ top.words }}){% endif %} is "
                "{% if beaten %}ahead of {{ beaten|names }}{% if beaten|length > 1 %}, of {{ closest }}{% endif %} by "
                "{{ gain }}{% if alike %}, but {% endif %}{% endif %}{% if alike %}not significantly ahead of "
                "{{ alike|names }}{% endif %}.",
                name=classifier_name(name),
                **given,
            )
        )
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
    subject = " and ".join(record.aliases)
    return Claim("features", subject, " ".join(parts), titles[0], effect=effect, kind="answer", place="depth")


def _classifier(record: FeaturesRecord, row: FeaturesRow) -> Iterator[Claim]:
    """Yield what a probe (without one, neighbours) reads from the last layer, beside the model's own classifier."""
    named = tested(record, [each for each in record.depth if each.model == row.model])
    if not named:
        return
    gap = next((each for each in record.head if (each.model, each.classifier) == (row.model, named[0])), None)
    gain = None if gap is None else signed(gap.difference, keep=False)
    decided = gap is not None and gap.p_holm <= LEVEL
    more = decided and gain is not None and gain.value < 0
    kind: Kind = "hidden fault" if more else "comparison" if gap else "fact"
    verdict: Verdict | None = None
    if gain is not None and gap is not None and named[0] == PROBE:
        state = LIMITS["classifier"].judge_difference(gain)
        if (gain.n or 0) < _FEW or (state in ("warn", "fail") and not decided):
            state = "inconclusive"
        verdict = Verdict(state, "its accuracy minus that of a linear probe of its last layer", "classifier")
    yield found(
        "classifier",
        row.model,
        "{% if more %}The last layer of **{{ m }}** holds more than its classifier reads: {% else %}From the last "
        "layer of **{{ m }}**, {% endif %}{{ reached|alone }} of the images are classified correctly by the {{ by }} "
        "({{ chance|percent }} by chance){% if gap %} and {{ own|value }} by its own classifier "
        "({{ gap.difference|alone }}{% if not decided %}, not significant{% endif %}; McNemar's exact test, "
        "p = {{ gap.p_holm|number }}){% endif %}.",
        gain,
        headline="{% if more %}The last layer of {{ m }} holds more than its classifier reads{% else %}The last layer "
        "of {{ m }} gives the class of {{ reached|value(0) }} of the images{% endif %}",
        given={
            "m": row.model,
            "by": classifier_name(named[0]),
            "reached": row.reached(named[0]),
            "own": row.accuracy,
            "chance": record.sets[0].chance,
            "more": more,
            "decided": decided,
            "gap": gap,
        },
        p=gap.p_holm if gap else None,
        kind="answer" if len(record.features) == 1 else kind,
        place="depth",
        verdict=verdict,
    )


def _better_layer(rows: Sequence[kept.DepthRow]) -> Iterator[Claim]:
    """Yield a layer whose probe is better than that of the last, also for as many looks as layers."""
    if len(rows) < 2:
        return
    last, best = rows[-1], max(rows, key=lambda row: row.accuracy.value)
    looks = len(rows) - 1
    if apart(widened(best.accuracy, looks), widened(last.accuracy, looks)) is Side.ABOVE:
        yield found(
            "best layer",
            best.model,
            "A linear probe reads the class better from {{ best.place }} of **{{ best.model }}** than from its last "
            "layer: {{ effect|alone }} beside {{ last.accuracy|alone }}.",
            best.accuracy,
            given={"best": best, "last": last},
            reference=last.accuracy.value,
            place="depth",
        )


def _zero_shot(record: FeaturesRecord, model: FeaturesRow) -> Iterator[Claim]:
    """Zero-shot accuracy, and the template that changes it most."""
    rows = [row for row in record.templates if row.model == model.model]
    if not rows:
        return
    yield found(
        "zero-shot",
        model.model,
        "Given only the names of the classes, **{{ m }}** classifies {{ effect }} of the images correctly "
        "(ensemble of {{ n }} template{{ n|s }}). It chooses among the {{ classes }} classes of the data, where "
        "chance is {{ (1 / classes)|percent(1) }}.",
        rows[0].accuracy,
        given={"m": model.model, "n": len(rows) - 1, "classes": model.candidates},
        kind="answer",
        headline="Among {{ classes }} classes, {{ m }} classifies {{ effect|value(0) }} of the images zero-shot",
    )
    differing = [(row, row.gain) for row in rows if row.gain and row.p_holm is not None and row.p_holm <= LEVEL]
    if differing:
        row, gain = max(differing, key=lambda each: abs(each[1].value))
        yield found(
            "wording",
            model.model,
            "“{{ row.template }}” alone changes the zero-shot accuracy of **{{ row.model }}** by {{ effect }} beside "
            "the ensemble of all templates.",
            gain,
            given={"row": row},
            p=row.p_holm,
            place="templates",
        )


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
    own = last[best.model]
    start = before.get(best.model)
    others = [last[row.model] for row in known if row.objective != best.objective]
    easy = start is not None and apart(own, start) is not Side.ABOVE
    first = not easy and all(apart(own, other) is Side.ABOVE for other in others)
    yield found(
        "object by patches",
        " and ".join(row.model for row in known),
        "{% if easy %}The patches of the last layer find the object no better than those before any attention: "
        "{{ own|value }} and {{ start|value }} intersection over union for **{{ m.model }}**{% elif first %}The "
        "patches of **{{ m.model }}** ({{ m.words }}) find the object best without training: {{ own|alone }} "
        "intersection over union{% else %}By how well patches find the object no pretraining is ahead{% endif %}.",
        own if first else None,
        given={"easy": easy, "first": first, "own": own, "start": start, "m": best},
        reference=max(other.value for other in others),
        kind="comparison",
        place="space_embedding",
    )


def _unlike(record: FeaturesRecord) -> Iterator[Claim]:
    """Yield a note that two last layers are less alike than the first of one model and the last of the other."""
    for own in by(record.between, "models").values():
        last = own[-1]
        first = next(row.cka for row in own if row.layer == "0" and row.other == last.other)
        if last.cka and first and apart(last.cka, first) is Side.BELOW:
            yield found(
                "last layers",
                f"{last.first} and {last.second}",
                "The last layers of **{{ r.first }}** and **{{ r.second }}** are less alike ({{ effect|alone }} linear "
                "CKA) than the first of {{ r.first }} and the last of {{ r.second }} ({{ first|alone }}).",
                last.cka,
                given={"r": last, "first": first},
                reference=first.value,
                place="cka",
            )


def _places(row: kept.PatchesRow) -> Claim:
    """Return whether of images without classes, positions decide which patches are similar before any attention."""
    return found(
        "positions",
        row.model,
        "Before any attention, {{ effect|alone }} of the nearest patches in other images lie at the same place in "
        "**{{ m }}** ({{ chance|percent }} by chance).",
        row.value,
        reference=row.chance,
        kind="answer",
        place="space_embedding",
        headline="Before any attention, {% if more %}their place{% else %}what they show{% endif %} makes patches of "
        "{{ m }} similar",
        given={"m": row.model, "chance": row.chance, "more": beyond(row.value, row.chance) is Side.ABOVE},
    )


def unknown(record: FeaturesRecord) -> Iterator[str]:
    """Yield what could overturn this, the most serious first."""
    (data,), rows = record.sets, record.features
    yield from few_images(record.images)
    if data.bank is None:
        yield say("k-NN and linear probe are left out: {{ reason|whole }}.", reason=data.no_bank)
    for row in rows:
        if row.no_zero_shot:
            yield say("{{ r.model }} has no zero-shot accuracy: {{ r.no_zero_shot|whole }}.", r=row)
    if record.notes:
        yield say(
            "{{ first.note|whole }}{% if more %} (more in `tables/notes.csv`){% endif %}.",
            first=record.notes[0],
            more=record.notes[1:],
        )
    without, random = ([row.model for row in rows if row.objective == name] for name in ("not known", "random weights"))
    known = _objectives(rows)
    if len(rows) > 1 and without:
        yield say("The pretraining of {{ w|names }} is not known; `--objective ALIAS=OBJECTIVE` states it.", w=without)
    if len(rows) > 1 and random:
        yield say("{{ r|names }}: random weights, which say nothing about pretraining.", r=random)
    if len(rows) > 1 and len(known) == 1:
        yield say("All known pretrainings are {{ k }}: these numbers compare models, not pretrainings.", k=known[0])
    elif len(rows) > 1 and known:
        yield "The models differ in data, recipe and size too, so no difference is that of the pretraining alone."
    if data.bank is not None:
        yield say(
            "Neighbours and probes learn from {{ n }} images of the training part: a model that was trained on "
            "them separates them better than unseen images.",
            n=data.bank,
        )
    few = [row.searched for row in rows if 0 < row.searched < SEARCHED]
    if few:
        yield say(
            "The nearest of {{ n }} images need not be similar; search {{ least }} or more.", n=few[0], least=SEARCHED
        )
    if 0 < data.largest < GROUP:
        yield say("Maps cannot show groups: the largest class has {{ n }} image{{ n|s }}.", n=data.largest)
    if record.depth:
        yield "That a layer gives the class does not show that the model uses it; `vitlens ablate` tests that."
        yield "The best layer is best partly by chance: the images that choose it also measure it."
    shares = [row for row in record.maps if row.explained is not None and row.of in ("images", "patches")]
    if shares:
        yield say(
            "PCA of the {{ r.of }} of {{ r.model }} shows {{ r.explained|percent }} of their variance, and t-SNE "
            "distorts distances.",
            r=min(shares, key=lambda row: row.explained or 0.0),
        )
