"""The claims of `vitlens features`: the best features, and what each classifier leaves unread."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from vitlens.analysis.features.rows import TemplateRow
from vitlens.commands.features.record import (
    PROBE,
    BetweenRow,
    DepthRow,
    FeaturesRecord,
    FeaturesRow,
    HeadRow,
    PairRow,
    classifier_name,
)
from vitlens.commands.shared.comparison import signed
from vitlens.commands.shared.maps.report import count_uniform, uniform_claim
from vitlens.names import OBJECTIVES
from vitlens.record import by
from vitlens.report.claims import FEWEST, Claim, Kind, found
from vitlens.report.prose import Marked, listed, say
from vitlens.report.verdicts import LIMITS, Verdict
from vitlens.uncertainty import LEVEL, Estimate, Side, apart, beyond, widened

_FEW: Final = 30  # images below which a difference in accuracy is not judged


def most_neighbours(record: FeaturesRecord) -> str:
    """Return the classifier with the most neighbours: "knn-20"."""
    return f"knn-{max(record.options['ks'])}"


def concluding_classifiers(
    record: FeaturesRecord, rows: Sequence[PairRow | HeadRow | DepthRow]
) -> list[str]:
    """Return the classifiers from which conclusions are drawn, if they are in these rows.

    These are the probe and the most neighbours.
    """
    in_rows = {row.classifier for row in rows}
    return [name for name in (PROBE, most_neighbours(record)) if name in in_rows]


def claims(record: FeaturesRecord) -> Iterator[Claim]:
    """Yield which features are best, then what classifiers, layers and templates read of them."""
    yield from _uniform_prompt_maps(record)
    if record.images < FEWEST:
        return
    if concluding_classifiers(record, record.pairs):
        yield _best_features(record)
    for row in record.features:
        yield from _classifier(record, row)
        yield from _better_layer(record, row)
        yield from _zero_shot(record, row)
    yield from _objects(record)
    yield from _dissimilar_last_layers(record)
    if not record.depth:
        yield from _positions(record)


def effects(record: FeaturesRecord) -> Iterator[Claim]:
    """Yield the difference of each classifier on two models' features, without correction of p."""
    for row in record.pairs:
        ahead, behind = row.first, row.second
        if row.difference.value < 0:
            ahead, behind = row.second, row.first
        yield found(
            f"features by {row.classifier}",
            f"{row.first} and {row.second}",
            "With the {{ classifier }}, the features of **{{ ahead }}** give {{ effect|alone }} "
            "more accuracy than those of **{{ behind }}**.",
            row.gain(ahead),
            given={"ahead": ahead, "behind": behind, "classifier": classifier_name(row.classifier)},
            p=row.p,
            kind="comparison",
            place="depth",
        )


def known_objectives(rows: Sequence[FeaturesRow]) -> list[str]:
    """Return the known objectives of pretraining, each once."""
    objectives = {row.objective for row in rows}
    return [objective for objective in OBJECTIVES if objective in objectives]


def _uniform_prompt_maps(record: FeaturesRecord) -> Iterator[Claim]:
    """Yield the claim about uniform relevance of prompts."""
    for model, arrays in record.shown.items():
        if arrays.prompts is not None:
            # (images, prompts, rows, columns) to (maps, rows, columns)
            maps = arrays.prompts.reshape(-1, *arrays.prompts.shape[-2:])
            yield from uniform_claim(model, {"the prompts": count_uniform(maps)}, len(maps))


@dataclass(frozen=True)
class _Ranking:
    """The model with the highest accuracy by one classifier, compared with its rivals.

    top: the model.
    leads: its significant leads, by rival.
    similar: the rivals over which it has no significant lead.
    compares_objectives: True if rivals are only the models with other objectives.
    """

    classifier: str
    top: FeaturesRow
    leads: dict[str, Estimate]
    similar: list[str]
    compares_objectives: bool

    @property
    def closest(self) -> str:
        """Return the rival with the smallest significant lead, "" if there is none."""
        return min(self.leads, key=lambda rival: self.leads[rival].value, default="")

    @property
    def conclusion(self) -> tuple[object, ...]:
        """Return a key that is equal for rankings that can share a sentence.

        Leads are numbers of one classifier, so a ranking with leads has its own sentence. Rankings
        without leads share one if they have the same top model and the same rivals.
        """
        if self.leads:
            return (self.classifier,)
        return (self.top.model, *self.similar)

    @property
    def winner(self) -> str:
        """Return the model, or its objective if objectives are compared."""
        return self.top.objective if self.compares_objectives else self.top.model

    def values(self) -> dict[str, Any]:
        """Return the values of the templates."""
        return {
            "top": self.top,
            "leads": self.leads,
            "similar": self.similar,
            "closest": self.closest,
            "lead": self.leads.get(self.closest),
            "compares_objectives": self.compares_objectives,
        }


def _with_classifiers(rankings: Sequence[_Ranking]) -> Marked:
    """Return the classifiers of some rankings: "With the linear probe and with ..."."""
    parts = [
        say("with the {{ name }}", name=classifier_name(ranking.classifier)) for ranking in rankings
    ]
    words = listed(parts)
    return Marked(words[0].upper() + words[1:])


def _best_features(record: FeaturesRecord) -> Claim:
    """Return which model has the best features, by each classifier.

    If several objectives of pretraining are known, the model is only compared with those of other
    objectives.
    """
    rankings = [
        _rank(record, classifier) for classifier in concluding_classifiers(record, record.pairs)
    ]
    sentences = [_ranking_sentence(alike) for alike in by(rankings, "conclusion").values()]
    title = _ranking_title(rankings[0])
    # by winner, its smallest lead by the first classifier with which it is ahead of all rivals
    leads_by_winner: dict[str, Estimate] = {}
    for ranking in rankings:
        if ranking.leads and not ranking.similar:
            leads_by_winner.setdefault(ranking.winner, ranking.leads[ranking.closest])
    leads = list(leads_by_winner.values())
    if len(leads) > 1:  # two winners
        sentences.append("Which features are better depends on how they are used.")
        title = "Probe and neighbours disagree on which features are better"
    return Claim(
        "features",
        " and ".join(record.aliases),
        " ".join(sentences),
        title,
        effect=leads[0] if leads else None,
        kind="answer",
        place="depth",
    )


def _ranking_sentence(alike: Sequence[_Ranking]) -> str:
    """Return the sentence of some rankings with one conclusion."""
    return say(
        "{{ classifiers }}, **{{ top.model }}**{% if compares_objectives %} "
        "({{ top.words }}){% endif %} is {% if leads %}ahead of "
        "{{ leads|names }}{% if leads|length > 1 %} ({{ lead }} ahead of "
        "{{ closest }}){% else %} by {{ lead }}{% endif %}{% if similar %}, but "
        "{% endif %}{% endif %}{% if similar %}not significantly ahead of "
        "{{ similar|names }}{% endif %}.",
        classifiers=_with_classifiers(alike),
        **alike[0].values(),
    )


def _ranking_title(ranking: _Ranking) -> str:
    return say(
        "{% if similar %}{{ top.model }} has no significant lead over {{ similar[0] }} "
        "in its features{% elif compares_objectives %}{{ top.model }} "
        "({{ top.objective }}) is ahead of the models with other "
        "pretraining{% else %}The features of {{ top.model }} separate the classes "
        "best{% endif %}",
        **ranking.values(),
    )


def _rank(record: FeaturesRecord, classifier: str) -> _Ranking:
    """Return the model with the highest accuracy by a classifier, compared with its rivals."""
    compares_objectives = len(known_objectives(record.features)) > 1
    rows = record.features
    if compares_objectives:
        rows = tuple(row for row in rows if row.objective in OBJECTIVES)
    top = max(rows, key=lambda row: _accuracy(row, classifier))
    rivals = set()
    for row in rows:
        has_same_objective = compares_objectives and row.objective == top.objective
        if row.model != top.model and not has_same_objective:
            rivals.add(row.model)
    leads = {}
    similar = []
    for pair in record.pairs:
        if pair.classifier != classifier or top.model not in (pair.first, pair.second):
            continue
        rival = pair.second if pair.first == top.model else pair.first
        if rival not in rivals:
            continue
        if pair.better == top.model:
            leads[rival] = pair.gain(top.model)
        else:
            similar.append(rival)
    return _Ranking(classifier, top, leads, similar, compares_objectives)


def _accuracy(row: FeaturesRow, classifier: str) -> float:
    """Return the accuracy of a classifier on the last layer, 0 if it was not run."""
    reached = row.reached(classifier)
    return 0.0 if reached is None else reached.value


def _classifier(record: FeaturesRecord, row: FeaturesRow) -> Iterator[Claim]:
    """Yield the accuracy of the probe, or else of the most neighbours, compared with that of the
    model's classifier.
    """
    rows = [depth for depth in record.depth if depth.model == row.model]
    classifiers = concluding_classifiers(record, rows)
    if not classifiers:
        return
    classifier = classifiers[0]  # the probe, or the most neighbours without a probe
    gap = _gap_to_model(record, row.model, classifier)
    gain = None  # accuracy of the model's classifier minus that of `classifier`
    is_significant = False
    holds_more = False
    if gap is not None:
        gain = signed(gap.difference, keep=False)
        is_significant = gap.p_holm <= LEVEL
        holds_more = is_significant and gain.value < 0
    yield found(
        "classifier",
        row.model,
        "{% if holds_more %}The last layer of **{{ m }}** holds more than its classifier reads. "
        "{% endif %}With the {{ classifier }} on the last layer of **{{ m }}**, "
        "{{ reached|alone }} of the images are classified correctly ({{ chance|percent }} by "
        "chance).{% if gap %} The model's classifier reaches {{ accuracy|value }}; the "
        "difference is {{ gap.difference|alone }} ({% if not decided %}not significant, "
        "{% endif %}McNemar's exact test, p = {{ gap.p_holm|number }})"
        "{{ gap.difference|borderline(gap.p_holm) }}.{% endif %}",
        gain,
        brief="{% if gap %}A {{ classifier }} on the last layer of **{{ m }}** is right on "
        "{{ reached|value }} of {{ reached.n }} images, the model's classifier on "
        "{{ accuracy|value }}.{% endif %}",
        headline="{% if holds_more %}The last layer of {{ m }} holds more than its classifier "
        "reads{% else %}The last layer of {{ m }} gives the class of {{ reached|value(0) }} of the "
        "images{% endif %}",
        given={
            "m": row.model,
            "classifier": classifier_name(classifier),
            "reached": row.reached(classifier),
            "accuracy": row.accuracy,
            "chance": record.sets[0].chance,
            "holds_more": holds_more,
            "decided": is_significant,
            "gap": gap,
        },
        p=gap.p_holm if gap else None,
        kind=_kind_of_classifier(record, gap, holds_more),
        place="depth",
        verdict=_judge_classifier(gap) if classifier == PROBE else None,
    )


def _gap_to_model(record: FeaturesRecord, model: str, classifier: str) -> HeadRow | None:
    """Return a classifier on the last layer compared with the model's classifier, None without."""
    for row in record.head:
        if (row.model, row.classifier) == (model, classifier):
            return row
    return None


def _kind_of_classifier(record: FeaturesRecord, gap: HeadRow | None, holds_more: bool) -> Kind:
    """Return why the claim about a classifier is reported."""
    if len(record.features) == 1:
        return "answer"
    if holds_more:
        return "hidden fault"
    return "fact" if gap is None else "comparison"


def _judge_classifier(gap: HeadRow | None) -> Verdict | None:
    """Return the judgement of the model's classifier by a linear probe, None without a probe."""
    if gap is None:
        return None
    gain = signed(gap.difference, keep=False)
    state = LIMITS["classifier"].judge_difference(gain)
    is_few = (gain.n or 0) < _FEW
    is_unclear = state in ("warn", "fail") and gap.p_holm > LEVEL
    if is_few or is_unclear:
        state = "inconclusive"
    return Verdict(state, "accuracy minus that of a linear probe of the last layer", "classifier")


def _better_layer(record: FeaturesRecord, model: FeaturesRow) -> Iterator[Claim]:
    """Yield a layer with a better probe than the last one, corrected for the number of layers."""
    rows = [row for row in record.depth if (row.model, row.classifier) == (model.model, PROBE)]
    if len(rows) < 2:
        return
    last = rows[-1]
    best = max(rows, key=lambda row: row.accuracy.value)
    tests = len(rows) - 1
    if apart(widened(best.accuracy, tests), widened(last.accuracy, tests)) is Side.ABOVE:
        yield found(
            "best layer",
            best.model,
            "A linear probe reads the class better from {{ best.place }} of **{{ best.model }}** "
            "than from its last layer: {{ effect|alone }} compared with "
            "{{ last.accuracy|alone }}.",
            best.accuracy,
            given={"best": best, "last": last},
            reference=last.accuracy.value,
            place="depth",
        )


def _zero_shot(record: FeaturesRecord, model: FeaturesRow) -> Iterator[Claim]:
    """Yield the zero-shot accuracy, and the template that changes it most."""
    rows = [row for row in record.templates if row.model == model.model]
    if not rows:
        return
    ensemble = rows[0]  # the ensemble of all templates is the first row
    yield found(
        "zero-shot",
        model.model,
        "Given only the names of the classes, **{{ m }}** classifies {{ effect }} of the images "
        "correctly (ensemble of {{ n }} template{{ n|s }}). It chooses among the {{ classes }} "
        "classes of the data, where chance is {{ (1 / classes)|percent(1) }}.",
        ensemble.accuracy,
        given={"m": model.model, "n": len(rows) - 1, "classes": model.candidates},
        kind="answer",
        headline="Among {{ classes }} classes, {{ m }} classifies {{ effect|value(0) }} of the "
        "images zero-shot",
    )
    yield from _wording(rows)


def _wording(rows: Sequence[TemplateRow]) -> Iterator[Claim]:
    """Yield the template with the largest significant difference from the ensemble."""
    largest: TemplateRow | None = None
    largest_gain = Estimate(0.0)
    for row in rows:
        if row.gain is None or row.p_holm is None or row.p_holm > LEVEL:
            continue
        if largest is None or abs(row.gain.value) > abs(largest_gain.value):
            largest = row
            largest_gain = row.gain
    if largest is None:
        return
    yield found(
        "wording",
        largest.model,
        "Used alone, “{{ row.template }}” changes the zero-shot accuracy of **{{ row.model }}** "
        "by {{ effect }} compared with the ensemble of all templates.",
        largest_gain,
        given={"row": largest},
        p=largest.p_holm,
        place="templates",
    )


def _objects(record: FeaturesRecord) -> Iterator[Claim]:
    """Yield the model whose patches find the object best, if there are several pretrainings.

    Nothing is concluded if the patches before any attention find it equally well.
    """
    at_embedding = {}  # overlap of the object and the patches that find it, by model
    at_last = {}  # the same in the last layer
    for row in record.patches:
        if row.share != "object":
            continue
        if row.layer == "embedding":
            at_embedding[row.model] = row.value
        else:  # patches are measured in the embedding and in the last layer only
            at_last[row.model] = row.value
    rows = [row for row in record.features if row.model in at_last and row.objective in OBJECTIVES]
    if len(known_objectives(rows)) < 2:
        return
    best = max(rows, key=lambda row: at_last[row.model].value)
    overlap = at_last[best.model]
    start = at_embedding.get(best.model)
    rivals = [at_last[row.model] for row in rows if row.objective != best.objective]
    is_easy = start is not None and apart(overlap, start) is not Side.ABOVE
    is_first = not is_easy and all(apart(overlap, rival) is Side.ABOVE for rival in rivals)
    yield found(
        "object by patches",
        " and ".join(row.model for row in rows),
        "{% if is_easy %}The patches of the last layer find the object no better than those "
        "before any attention: {{ overlap|value }} and {{ start|value }} intersection over union "
        "for **{{ m.model }}**.{% elif is_first %}The patches of **{{ m.model }}** "
        "({{ m.words }}) find the object best without training: {{ overlap|alone }} intersection "
        "over union.{% else %}In finding the object by patches, no pretraining is "
        "ahead.{% endif %}",
        overlap if is_first else None,
        given={
            "is_easy": is_easy,
            "is_first": is_first,
            "overlap": overlap,
            "start": start,
            "m": best,
        },
        reference=max(rival.value for rival in rivals),
        kind="comparison",
        place="space_embedding",
    )


def _dissimilar_last_layers(record: FeaturesRecord) -> Iterator[Claim]:
    """Yield pairs of models with last layers less similar than the first of one to the last of
    the other.
    """
    for rows in by(record.between, "models").values():
        last = rows[-1]
        first = _first_and_last(rows)
        if last.cka is None or first is None:
            continue
        if apart(last.cka, first) is Side.BELOW:
            yield found(
                "last layers",
                f"{last.first} and {last.second}",
                "The last layers of **{{ r.first }}** and **{{ r.second }}** are less similar "
                "(linear CKA {{ effect|alone }}) than the first layer of {{ r.first }} and the "
                "last layer of {{ r.second }} ({{ first|alone }}).",
                last.cka,
                given={"r": last, "first": first},
                reference=first.value,
                place="cka",
            )


def _first_and_last(rows: Sequence[BetweenRow]) -> Estimate | None:
    """Return the similarity of the first layer of one model and the last layer of the other."""
    last = rows[-1]
    [pair] = [row for row in rows if row.layer == "0" and row.other == last.other]
    return pair.cka


def _positions(record: FeaturesRecord) -> Iterator[Claim]:
    """Yield whether position decides which patches are similar before any attention."""
    for row in record.patches:
        if row.share != "position" or row.layer != "embedding":
            continue
        yield found(
            "positions",
            row.model,
            "Before any attention, {{ effect|alone }} of the nearest patches in other images lie "
            "at the same place in **{{ m }}** ({{ chance|percent }} by chance).",
            row.value,
            reference=row.chance,
            kind="answer",
            place="space_embedding",
            headline="Before any attention, "
            "{% if by_position %}position{% else %}content{% endif %} makes patches of "
            "{{ m }} similar",
            given={
                "m": row.model,
                "chance": row.chance,
                "by_position": beyond(row.value, row.chance) is Side.ABOVE,
            },
        )
