"""The report of `vitlens stats`: what each head attends to, and how far and how sharply."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import log2
from typing import Final

import numpy as np

from vitlens.analysis.heads.registry import (
    FAULTY,
    LABELS,
    STATISTICS,
    THRESHOLD,
    UNLABELLED,
    View,
    shown_in,
)
from vitlens.analysis.naming.words import CORRELATES, MATTERS, SEVERAL
from vitlens.charts import Picture, board, images, lines
from vitlens.commands.shared.label_rows import NameRow, note_sentences
from vitlens.commands.stats.record import HeadEpochRow, HeadRow, HeadsRow, LayerRow, StatsRecord
from vitlens.report.claims import Claim, above, below, found, judge, unjudged
from vitlens.report.prose import listed, say
from vitlens.report.sections import Chart, Glance, Report, Section
from vitlens.report.verdicts import LIMITS
from vitlens.uncertainty import Estimate

UNIFORM: Final = 0.5  # bits of a row, below which attention is uniform
DEAD: Final = 0.005  # of the mean norm of the heads' outputs
ON_ONE: Final = 0.25  # of the attention on one patch, from which on a head attends to one place
_RATIOS: Final = (1 / 8, 32)  # times uniform attention, the ends of the colours
_CODED: Final = 150  # heads, above which there is no room for codes
FEW: Final = 2  # images, below which nothing is judged
_OVERVIEW: Final = ("distance", "normalised_entropy", "hoyer", "self_mass", "cls_mass", "sink_mass")
_OUTLYING: Final = 3.0  # times the median norm, below which no token is an outlier
_TOKENS: Final = ("token_norm", "greatest_norm", "high_norm_patches")


def title_of(name: str) -> str:
    """Return the title of a statistic, or of a column that holds it."""
    return STATISTICS[name.rpartition(".")[2]].title


def claims(record: StatsRecord) -> Iterator[Claim]:
    """Yield how many heads follow a pattern, and which are at fault."""
    for row in record.means:
        heads = [head for head in record.heads if head.model == row.model]
        if row.heads:
            yield _patterns(row, heads)
        yield from _writes(record, row.model)
        if row.faulty is not None:
            yield _health(record, row, heads)
        if row.sinks_off_object is not None and record.images >= FEW:
            yield _sinks(row.model, row.sinks_off_object)
        yield from _faults(record, row.model, heads)


def _patterns(row: HeadsRow, heads: Sequence[HeadRow]) -> Claim:
    """Count the heads that follow one pattern."""
    clear = [head for head in heads if head.is_clear]
    return found(
        "pattern",
        row.model,
        "{{ clear }} of {{ n }} heads of **{{ model }}** follow{{ 's' if clear == 1 }} one "
        "pattern{% if clear %} ({{ labels|counts }}){% endif %}; for the others no single pattern "
        "explains half of their attention.",
        headline="{{ clear }} of {{ n }} heads of {{ model }} follow{{ 's' if clear == 1 }} one "
        "pattern",
        given={
            "clear": len(clear),
            "n": row.heads,
            "model": row.model,
            "labels": Counter(head.label for head in clear),
        },
        kind="answer",
        place="specialisation",
    )


def _sinks(model: str, off_object: Estimate) -> Claim:
    """Judge the attention on sinks off the object."""
    claim = judge(
        "sinks",
        model,
        off_object,
        "sinks",
        says=say(
            "{{ share }} of the attention in **{{ m }}** lies on sinks off the object.",
            share=off_object,
            m=model,
        ),
        because="attention of patches on sinks off the object, mean over heads",
    )
    brief = (
        "In **{{ m }}**, {{ share|value }} of the attention lies on a few patches off the "
        "object (sinks)."
    )
    return replace(claim, brief=say(brief, share=off_object, m=model))


def _writes(record: StatsRecord, model: str) -> Iterator[Claim]:
    """Yield how many heads write a class to which they matter."""
    names = [name for name in record.names if name.model == model and name.state is not None]
    if not names:
        return
    states = Counter(name.state for name in names)
    matter = [name for name in names if name.state == MATTERS]
    matter.sort(key=lambda name: -_margin(name))
    lead = matter[0] if matter else None
    yield found(
        "writes",
        model,
        "{{ matter }} of {{ n }} heads of **{{ model }}** {% if matter == 1 %}matters more to the "
        "classes or attributes that it separates{% else %}matter more to the classes or attributes "
        "that they separate{% endif %} best than to the others{% if lead %}, most of all "
        "{{ lead.name }}: without it, images of {{ lead.writes }} lose {{ effect|alone }} more "
        "log-odds than others{% endif %}. Of the others {{ correlate }} "
        "separate{{ 's' if correlate == 1 }} one that removing "
        "{{ 'it' if correlate == 1 else 'them' }} does not hurt most, {{ several }} "
        "separate{{ 's' if several == 1 }} too many equally well, {{ rest }} "
        "separate{{ 's' if rest == 1 }} none.",
        None if lead is None else lead.margin,
        brief="{% if lead %}Removing **{{ lead.name }}** hurts images of {{ lead.writes }} "
        "most.{% endif %}",
        given={
            "matter": len(matter),
            "n": len(names),
            "model": model,
            "lead": lead,
            "correlate": states[CORRELATES],
            "several": states[SEVERAL],
            "rest": len(names) - len(matter) - states[CORRELATES] - states[SEVERAL],
        },
        kind="answer",
        evidence="intervened",
    )


def _health(record: StatsRecord, row: HeadsRow, heads: Sequence[HeadRow]) -> Claim:
    """Judge the share of dead and uniform heads.

    Its upper end counts heads that more images may show to be so.
    """
    undecided = 0
    for head in heads:
        is_labelled_otherwise = head.label not in (None, *FAULTY)
        if is_labelled_otherwise and head.best in FAULTY and not below(head.score, THRESHOLD):
            undecided += 1
    share = 0.0 if row.faulty is None else row.faulty.value
    highest = share + undecided / row.heads
    if record.images < FEW:
        return unjudged("attention health", row.model, "one image; give more", limit="heads")
    because = "dead or uniform heads"
    limit = LIMITS["heads"]
    if limit.state(share) == limit.state(highest):
        value = Estimate(share, share, highest, row.heads)
        return judge("attention health", row.model, value, "heads", because=because)
    because = f"{because}; {undecided} heads are undecided"
    return unjudged("attention health", row.model, because, limit="heads")


@dataclass(frozen=True)
class _Fault:
    """A fault of heads with one label.

    question: the question of its claim.
    number: what is tested.
    template: the sentence about all heads that have it, of which {{ lead }} has the most extreme
        number.
    brief: the short sentence.
    is_low: True if low numbers are the fault.
    """

    question: str
    label: str
    number: Callable[[HeadRow], Estimate | None]
    template: str
    brief: str = ""
    is_low: bool = False

    def value(self, head: HeadRow) -> float:
        """Return the number of a head; 0 for a head without one."""
        number = self.number(head)
        return 0.0 if number is None else number.value


_FAULTS: Final = (
    _Fault(
        "dead heads",
        "dead",
        lambda head: head.output,
        "{{ heads|names }} of **{{ model }}** {{ heads|are }} dead: at most {{ effect|value }} "
        "of the mean norm of the heads' outputs is added to the residual stream.",
        brief="Heads {{ heads|names }} of **{{ model }}** add next to nothing.",
        is_low=True,
    ),
    _Fault(
        "uniform heads",
        "uniform",
        lambda head: head.statistics.get("normalised_entropy"),
        "The attention of {{ heads|names }} of **{{ model }}** is uniform: the entropy of a row "
        "is at least {{ effect|value }} of that of uniform attention.",
        brief="Heads {{ heads|names }} of **{{ model }}** attend to all patches alike.",
    ),
    _Fault(
        "fixed place",
        "position",
        lambda head: head.place_mass,
        "{{ heads|names }} of **{{ model }}** {{ heads|are }} fixed to places of their own: in "
        "{{ lead.name }} {{ effect }} of the patches' attention lies on the patch in row "
        "{{ lead.place[0] }}, column {{ lead.place[1] }}, whatever the image "
        "({{ lead.place_chance|percent(1) }} if it were uniform).",
    ),
)


def _faults(record: StatsRecord, model: str, heads: Sequence[HeadRow]) -> Iterator[Claim]:
    """Yield the heads that are dead, attend uniformly, or attend to one fixed place."""
    keys = {row.layer: row.keys for row in record.layers if row.model == model}
    limits: dict[str, Callable[[HeadRow], float]] = {
        "dead": lambda _: DEAD,
        "uniform": lambda head: _uniform_entropy(keys[head.layer]),
        "position": lambda _: ON_ONE,
    }
    for fault in _FAULTS:
        limit = limits[fault.label]
        passes = below if fault.is_low else above
        faulty = []
        for head in heads:
            if head.label == fault.label and passes(fault.number(head), limit(head), len(heads)):
                faulty.append(head)
        if not faulty:
            continue
        # the sentence gives a bound that holds for all of them; of fixed places, the strongest
        # example
        lead = max(faulty, key=fault.value)
        if fault.label == "uniform":
            lead = min(faulty, key=fault.value)
        yield found(
            fault.question,
            model,
            fault.template,
            fault.number(lead) or Estimate(0.0),
            brief=fault.brief,
            reference=limit(lead),
            kind="hidden fault",
            given={"heads": faulty, "model": model, "lead": lead},
            place="specialisation",
        )


def _uniform_entropy(keys: int) -> float:
    """Return the entropy of a row, as a share of that of uniform attention, from which attention is
    uniform.
    """
    return 1 - UNIFORM / log2(keys) if keys > 1 else 2.0


def _keys(view: View) -> list[str]:
    return [f"statistics.{name}" for name in shown_in(view)]


def _range(name: str) -> tuple[float, float] | None:
    """Return the range of a statistic's colours, None if they fit the data."""
    statistic = STATISTICS[name.rpartition(".")[2]]
    if statistic.whole_range and statistic.unit == "fraction":
        return 0.0, 100.0
    return None


def definitions(record: StatsRecord) -> Iterator[tuple[str, str]]:
    """Yield the definitions of the statistics and labels that the report shows."""
    measured: set[str] = set()
    for head in record.heads:
        measured |= head.statistics.keys()
    for layer in record.layers:
        measured |= layer.statistics.keys()
    shown = {*_OVERVIEW, *_TOKENS, *shown_in("maps")}
    for name, statistic in STATISTICS.items():
        if name in measured & shown:
            unit = f" ({statistic.unit})" if statistic.unit else ""
            yield statistic.title, f"{statistic.meaning}{unit}. {statistic.reading}"
    labels = {label for row in record.heads for label in (row.label, row.best)}
    for label, rule in LABELS.items():
        if label in labels:
            title = label if rule.code in ("", label) else f"{label} ({rule.code})"
            yield title, f"{rule.sentence}."


def _without_pattern(record: StatsRecord) -> str:
    """Describe the heads without a clear label."""
    heads = [head for head in record.heads if head.label is not None and not head.is_clear]
    if not heads:
        return ""
    return say(
        "The nearest patterns of the {{ n }} other heads are {{ nearest|counts }}; the best "
        "explained is {{ top.name }} ({{ top.best }}, score {{ top.score|value }}). What they "
        "attend to may depend on content that no pattern describes.",
        n=len(heads),
        nearest=Counter(head.best for head in heads if head.best),
        top=min(heads, key=_rank),
    )


def _labels_opening(record: StatsRecord) -> str:
    """Count the heads, and the labels, that survived an intervention test."""
    attends = [name for name in record.names if name.holds is not None]
    looks = [name for name in record.names if name.looks_hold is not None]
    return say(
        "For {{ tested }} of {{ heads }} heads, at least one label survived its intervention "
        "test{% if removed %}; of the rest {{ correlate }} "
        "separate{{ 's' if correlate == 1 }} a class that removing "
        "{{ 'it' if correlate == 1 else 'them' }} does not hurt most{% endif %}. On shuffled "
        "patches {{ held }} of {{ attends }} heads "
        "{{ 'attends by what its' if held == 1 else 'attend by what their' }} label says, and "
        "{{ kept }} of {{ looks }} patterns {{ 'is' if kept == 1 else 'are' }} still there. "
        "One head's page: `vitlens head`.",
        heads=len(record.names),
        tested=sum(name.tested for name in record.names),
        correlate=sum(name.correlates for name in record.names),
        removed=any(name.state for name in record.names),
        attends=len(attends),
        held=sum(bool(name.holds) for name in attends),
        looks=len(looks),
        kept=sum(bool(name.looks_hold) for name in looks),
    )


def _margin(name: NameRow) -> float:
    """Return by how much more the images lose that need a head than the others; 0 if unknown."""
    return 0.0 if name.margin is None else name.margin.value


def _tested_first(name: NameRow) -> tuple[object, ...]:
    return (name.state != MATTERS, not name.tested, -_margin(name), name.layer, name.head)


def _rank(head: HeadRow) -> tuple[object, ...]:
    """Return the key that sorts heads with a clear label, and then the best explained, first."""
    score = 0.0 if head.score is None else head.score.value
    return (not head.is_clear, -score, head.model, head.layer, head.head)


def _offsets(record: StatsRecord) -> Iterator[Picture]:
    """Yield the mean weight by offset of every head.

    Layers run down the figure, or across it if there are more than twice as many layers as heads.
    """
    alias = record.aliases[0]
    labelled = [
        head
        for head in record.heads
        if head.label is not None and head.model == alias in record.offsets
    ]
    layers = {head.layer for head in labelled}
    most_heads = max((head.head + 1 for head in labelled), default=0)
    layers_run_across = len(layers) > 2 * most_heads
    has_codes = len(labelled) <= _CODED
    for head in labelled:
        ratio = record.offsets[alias].ratio.get(head.layer)
        values = np.full((1, 1), np.nan)
        if ratio is not None:
            values = np.log2(np.clip(ratio[head.head], *_RATIOS))
        layer_name = f"L{head.layer}"
        head_name = f"H{head.head}"
        label = LABELS[head.label if head.label in LABELS else UNLABELLED]
        yield Picture(
            image=None,
            map=values,
            row=head_name if layers_run_across else layer_name,
            column=layer_name if layers_run_across else head_name,
            below=label.code if has_codes else "",
            frame=label.colour,
        )


def _sharpest(record: StatsRecord) -> str:
    name = "normalised_entropy"
    heads = [head for head in record.heads if name in head.statistics]
    if not heads:
        return ""
    ordered = sorted(heads, key=lambda head: head.statistics[name].value)
    return say(
        "The sharpest head is {{ sharp.name }} of {{ sharp.model }}, with {{ least|value }} of "
        "the entropy of uniform attention, the most even {{ even.name }} of {{ even.model }}, "
        "with {{ most|value }}.",
        sharp=ordered[0],
        even=ordered[-1],
        least=ordered[0].statistics[name],
        most=ordered[-1].statistics[name],
    )


def _with_norms(record: StatsRecord) -> list[LayerRow]:
    rows = [row for row in record.layers if set(_TOKENS) <= row.statistics.keys()]
    return [row for row in rows if row.statistics["token_norm"].value]


def _outliers(record: StatsRecord) -> str:
    """Return how much longer than the others the longest token is."""
    rows = _with_norms(record)
    lead = max(rows, key=_ratio)
    most = max((row.statistics["high_norm_patches"] for row in rows), key=lambda share: share.value)
    return say(
        "{% if none %}No register-like outliers: the{% else %}The{% endif %} longest token has "
        "{{ ratio|number }} times the median norm ({{ lead.model }}, after block {{ lead.layer }})"
        "{% if not none %}; at most {{ most|value }} of the patches have a high norm"
        "{% endif %}.",
        ratio=_ratio(lead),
        lead=lead,
        most=most,
        none=_ratio(lead) < _OUTLYING,
    )


def _ratio(row: LayerRow) -> float:
    return row.statistics["greatest_norm"].value / row.statistics["token_norm"].value


def _has(name: str, row: HeadEpochRow) -> bool:
    return name in row.statistics


def _learned(record: StatsRecord) -> str:
    first = record.learning[0]
    last = record.learning[-1]
    parts = []
    for name, value in last.statistics.items():
        if name in first.statistics:
            before = first.statistics[name]
            title = title_of(name)
            parts.append(
                say("mean {{ what }} {{ a|alone }} to {{ b|alone }}", what=title, a=before, b=value)
            )
    return say(
        "From epoch {{ first.epochs }} to {{ last.epochs }} ({{ rows|length }} checkpoints): "
        "{{ parts }}.",
        first=first,
        last=last,
        rows=record.learning,
        parts=listed(parts),
    )


def unknown(record: StatsRecord) -> Iterator[str]:
    """Yield what statistics of attention do not show."""
    labelled = [head for head in record.heads if head.label is not None]
    yield from note_sentences(record.notes)
    if labelled and all(name.state is None for name in record.names):
        yield (
            "No head was removed: `vitlens ablate` measures whether predictions depend on what a "
            "head attends to."
        )
    near = [head for head in labelled if _is_near_threshold(head)]
    if near:
        yield say(
            "The scores of {{ near|names }} lie within their interval of the threshold of "
            "{{ threshold }}: other images may give them another label.",
            near=near,
            threshold=THRESHOLD,
        )
    unlabelled = len(record.heads) - len(labelled)
    if unlabelled:
        yield say(
            "{{ n }} heads have no label, as their tokens have no place in the image.", n=unlabelled
        )
    if record.images < 20:
        yield say(
            "These are means over {{ n }} image{{ n|s }}: other images may give others.",
            n=record.images,
        )


def _is_near_threshold(head: HeadRow) -> bool:
    """Return True if the interval of a head's score holds the threshold of labels."""
    return (
        bool(head.score) and not above(head.score, THRESHOLD) and not below(head.score, THRESHOLD)
    )


REPORT: Final = Report(
    StatsRecord,
    claims=claims,
    unknown=unknown,
    definitions=definitions,
    picture=Chart(
        "specialisation",
        images(scale="joint", label="weight, log2 of times uniform"),
        "Mean weight of keys by their offset from the query in the middle, for every head; grey: "
        "never occurs. Frame and code name its pattern; without a code: no single pattern.",
        title="What every head of {{ record.aliases[0] }} attends to",
        rows=_offsets,
    ),
    glance=(
        *(Glance("means", "statistics", key=name, title=title_of(name)) for name in _OVERVIEW),
        Glance("means", "faulty", question="attention health"),
        Glance("means", "sinks_off_object", question="sinks"),
    ),
    sections=(
        Section(
            "What does each head attend to?",
            "heads",
            opening=_without_pattern,
            about=("attention health",),
            order=_rank,
            columns=("model", "layer", "head", "label", "best", "score"),
        ),
        Section(
            "What does each head do, in three words?",
            "names",
            opening=_labels_opening,
            about=("writes",),
            order=_tested_first,
            columns=("name", "attends", "holds", "looks", "writes", "state"),
        ),
        Section(
            "How far do heads look?",
            "local",
            says="In {{ layers|ranges }}, {{ local }} of {{ heads }} heads of **{{ model }}** look "
            "at most half as far as uniform attention; the mean is {{ share|percent }} of that "
            "distance.",
            charts=(
                Chart(
                    "distance",
                    lines("layer", "statistics.distance", of="model"),
                    "Mean distance between a patch and the patches that it attends to: a dot a "
                    "head, the line their mean. Low: local.",
                    title="Attention distance by layer",
                    rows="heads",
                    only=lambda row: "distance" in row.statistics,
                ),
            ),
        ),
        Section(
            "How sharp is their attention?",
            "heads",
            opening=_sharpest,
            charts=(
                Chart(
                    "heads",
                    board(partial(_keys, "maps"), titles=title_of, ranges=_range),
                    "Statistics of every head, means over the rows of patches and over images; "
                    "each panel has its own colours.",
                    title="How sharp every head of {{ first.model }} is",
                    each="model",
                ),
            ),
        ),
        Section(
            "Do a few tokens stand out?",
            _with_norms,
            opening=_outliers,
            about=("sinks",),
            charts=(
                Chart(
                    "tokens",
                    lines(
                        "layer",
                        "statistics.token_norm",
                        "statistics.greatest_norm",
                        panel="model",
                        log=True,
                    ),
                    "Norms of the residual stream after each block: the median of an image's "
                    "tokens and the greatest, means over images.",
                    title="Norms of tokens by layer",
                ),
            ),
        ),
        Section(
            "How did the heads change over the training?",
            "learning",
            opening=_learned,
            charts=tuple(
                Chart(
                    f"learning_{name}",
                    lines("epochs", f"statistics.{name}", panel="layer", band=False),
                    f"{title_of(name).capitalize()} of every head by epoch: a dot a head, the line "
                    "their mean.",
                    title=f"{title_of(name).capitalize()} over the training",
                    rows="learning_heads",
                    only=partial(_has, name),
                )
                for name in shown_in("training")
            ),
        ),
    ),
)
