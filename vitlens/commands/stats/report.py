"""The report of `vitlens stats`: what each head attends to, and how far and how sharply."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np

from vitlens.analysis.heads.registry import LABELS, STATISTICS, UNLABELLED, View, shown_in
from vitlens.analysis.naming.words import MATTERS
from vitlens.charts import Picture, board, images, lines
from vitlens.commands.shared.label_rows import NameRow
from vitlens.commands.stats.claims import claims, margin, unknown
from vitlens.commands.stats.record import HeadEpochRow, HeadRow, LayerRow, StatsRecord
from vitlens.record import OfModel, col
from vitlens.report.prose import listed, say
from vitlens.report.sections import Chart, Glance, Report, Section
from vitlens.uncertainty import Estimate

_RATIOS: Final = (1 / 8, 32)  # times uniform attention, the ends of the colours
_CODED: Final = 150  # heads, above which there is no room for codes
_OUTLYING: Final = 3.0  # times the median norm, from which on a token stands out
_OVERVIEW: Final = ("distance", "normalised_entropy", "hoyer", "self_mass", "cls_mass", "sink_mass")

_TOKENS: Final = ("token_norm", "greatest_norm", "high_norm_patches")


@dataclass(frozen=True)
class DistanceRow(OfModel):
    """The attention distance of one head, and that of uniform attention in its layer."""

    layer: int = col("layer")
    distance: Estimate = col("attention distance", unit="px")
    uniform: float | None = col("distance of uniform attention", unit="px")


def title_of(name: str) -> str:
    """Return the title of a statistic, "distance", or of its column, "statistics.distance"."""
    return STATISTICS[_statistic_of(name)].title


def _statistic_of(column: str) -> str:
    """Return the statistic of a column, "distance" for "statistics.distance"."""
    return column.rpartition(".")[2]


def _columns(view: View) -> list[str]:
    """Return the columns of the statistics that a view shows."""
    return [f"statistics.{name}" for name in shown_in(view)]


def _range(column: str) -> tuple[float, float] | None:
    """Return the range of a statistic's colours, None if it is that of the data."""
    statistic = STATISTICS[_statistic_of(column)]
    if statistic.whole_range and statistic.unit == "fraction":
        return 0.0, 100.0  # fractions are drawn in %
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
    shown_labels = {row.label for row in record.heads} | {row.best for row in record.heads}
    for label, rule in LABELS.items():
        if label in shown_labels:
            title = label
            if rule.code not in ("", label):
                title = f"{label} ({rule.code})"
            yield title, f"{rule.sentence}."


def _without_pattern_words(record: StatsRecord) -> str:
    """Return what is known of the heads without a clear label."""
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


def _labels_words(record: StatsRecord) -> str:
    """Return how many heads, and how many labels, survived an intervention test."""
    # `holds` and `looks_hold` are None for labels that were not tested
    attends = [name for name in record.names if name.holds is not None]
    looks = [name for name in record.names if name.looks_hold is not None]
    return say(
        "For {{ tested }} of {{ heads }} heads, at least one label survived its intervention "
        "test{% if correlate %}; of the rest, {{ correlate }} only "
        "correlate{{ 's' if correlate == 1 }} with a class{% endif %}."
        "{% if attends %} On shuffled patches {{ held }} of {{ attends }} heads "
        "{{ 'attends by what its' if held == 1 else 'attend by what their' }} label says."
        "{% endif %}{% if looks %} {{ kept }} of {{ looks }} patterns {{ kept|are }} still there "
        "on shuffled patches.{% endif %} One head's page: `vitlens head`.",
        heads=len(record.names),
        tested=sum(name.tested for name in record.names),
        correlate=sum(name.correlates for name in record.names),
        attends=len(attends),
        held=sum(bool(name.holds) for name in attends),
        looks=len(looks),
        kept=sum(bool(name.looks_hold) for name in looks),
    )


def _tested_first(name: NameRow) -> tuple[object, ...]:
    """Return the key that sorts heads that matter to a class first, then those with a tested
    label.
    """
    return (name.state != MATTERS, not name.tested, -margin(name), name.layer, name.head)


def _distances(record: StatsRecord) -> Iterator[DistanceRow]:
    """Yield the attention distance of each head that has one, and that of uniform attention."""
    uniform_distances = {}
    for layer in record.layers:
        uniform_distances[layer.model, layer.layer] = layer.uniform_distance
    for head in record.heads:
        distance = head.statistics.get("distance")
        if distance is not None:
            yield DistanceRow(
                model=head.model,
                layer=head.layer,
                distance=distance,
                uniform=uniform_distances.get((head.model, head.layer)),
            )


def _rank(head: HeadRow) -> tuple[object, ...]:
    """Return the key that sorts heads with a clear label, and then the best explained, first."""
    score = 0.0 if head.score is None else head.score.value
    return (not head.is_clear, -score, head.model, head.layer, head.head)


def _offset_pictures(record: StatsRecord) -> Iterator[Picture]:
    """Yield the mean weight by offset of every head.

    Layers run down the figure, or across it if there are more than twice as many layers as heads.
    """
    alias = record.aliases[0]
    if alias not in record.offsets:
        return
    ratio_by_layer = record.offsets[alias].ratio
    labelled = []
    for head in record.heads:
        if head.model == alias and head.label is not None:
            labelled.append(head)
    layers = {head.layer for head in labelled}
    most_heads = max((head.head + 1 for head in labelled), default=0)
    layers_run_across = len(layers) > 2 * most_heads
    has_codes = len(labelled) <= _CODED
    for head in labelled:
        ratio = ratio_by_layer.get(head.layer)
        values = np.full((1, 1), np.nan)
        if ratio is not None:
            values = np.log2(np.clip(ratio[head.head], *_RATIOS))
        row = f"L{head.layer}"
        column = f"H{head.head}"
        if layers_run_across:
            row, column = column, row
        label = LABELS[head.label if head.label in LABELS else UNLABELLED]
        yield Picture(
            image=None,
            map=values,
            row=row,
            column=column,
            below=label.code if has_codes else "",
            frame=label.colour,
        )


def _sharpest_words(record: StatsRecord) -> str:
    name = "normalised_entropy"
    heads = [head for head in record.heads if name in head.statistics]
    if not heads:
        return ""
    ordered = sorted(heads, key=lambda head: head.statistics[name].value)
    sharpest = ordered[0]
    most_even = ordered[-1]
    return say(
        "The sharpest head is {{ sharpest.name }} of {{ sharpest.model }}, with {{ least|value }} "
        "of the entropy of uniform attention, the most even {{ most_even.name }} of "
        "{{ most_even.model }}, with {{ most|value }}.",
        sharpest=sharpest,
        most_even=most_even,
        least=sharpest.statistics[name],
        most=most_even.statistics[name],
    )


def _layers_with_norms(record: StatsRecord) -> list[LayerRow]:
    """Return the layers with norms of tokens, of which the median is not 0."""
    rows = [row for row in record.layers if set(_TOKENS) <= row.statistics.keys()]
    return [row for row in rows if row.statistics["token_norm"].value]


def _outliers_words(record: StatsRecord) -> str:
    """Return how many times as long as the median the longest token is, and how many patches of an
    image are long if that is far.
    """
    rows = _layers_with_norms(record)
    lead = max(rows, key=_norm_ratio)
    most = max(rows, key=_high_norm_patches)
    return say(
        "{% if not stand_out %}No token stands out: the{% else %}The{% endif %} longest has "
        "{{ ratio|number }} times the median norm (**{{ lead.model }}**, after block "
        "{{ lead.layer }}).{% if stand_out %} On average an image has at most "
        "{{ patches|number }} patches of high norm (**{{ most.model }}**, after block "
        "{{ most.layer }}).{% endif %}",
        stand_out=_norm_ratio(lead) >= _OUTLYING,
        ratio=_norm_ratio(lead),
        lead=lead,
        most=most,
        patches=_high_norm_patches(most),
    )


def _high_norm_patches(row: LayerRow) -> float:
    """Return the mean number of patches of an image with a high norm."""
    return row.statistics["high_norm_patches"].value


def _norm_ratio(row: LayerRow) -> float:
    """Return the greatest norm of a token, divided by the median norm."""
    return row.statistics["greatest_norm"].value / row.statistics["token_norm"].value


def _has_statistic(name: str, row: HeadEpochRow) -> bool:
    return name in row.statistics


def _learning_words(record: StatsRecord) -> str:
    """Return the means of statistics at the first and the last checkpoint."""
    first = record.learning[0]
    last = record.learning[-1]
    parts = []
    for name, value in last.statistics.items():
        if name in first.statistics:
            words = say(
                "mean {{ title }} {{ before|alone }} to {{ after|alone }}",
                title=title_of(name),
                before=first.statistics[name],
                after=value,
            )
            parts.append(words)
    return say(
        "From epoch {{ first.epochs }} to {{ last.epochs }} ({{ rows|length }} checkpoints): "
        "{{ parts }}.",
        first=first,
        last=last,
        rows=record.learning,
        parts=listed(parts),
    )


REPORT: Final = Report(
    StatsRecord,
    claims=claims,
    unknown=unknown,
    definitions=definitions,
    picture=Chart(
        "specialisation",
        images(scale="joint", label="weight, log2 of times uniform"),
        "Mean weight of keys by their offset from the query in the middle; grey: never occurs. "
        "Frame and code name a head's label; mixed: two patterns; without a code: no single one.",
        title="What every head of {{ record.aliases[0] }} attends to",
        rows=_offset_pictures,
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
            opening=_without_pattern_words,
            about=("attention health",),
            order=_rank,
            columns=("model", "layer", "head", "label", "best", "score"),
        ),
        Section(
            "What does each head do, in three words?",
            "names",
            opening=_labels_words,
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
                    lines("layer", "distance", of="model", reference="uniform"),
                    "Mean distance between a patch and the patches that it attends to: a dot a "
                    "head, the line their mean. Dashed: uniform attention. Low: local.",
                    title="Attention distance by layer",
                    rows=_distances,
                ),
            ),
        ),
        Section(
            "How sharp is their attention?",
            "heads",
            opening=_sharpest_words,
            charts=(
                Chart(
                    "heads",
                    board(partial(_columns, "maps"), titles=title_of, ranges=_range),
                    "Statistics of every head, means over the rows of patches and over images; "
                    "each panel has its own colours.",
                    title="How sharp every head of {{ first.model }} is",
                    each="model",
                ),
            ),
        ),
        Section(
            "Do a few tokens stand out?",
            _layers_with_norms,
            opening=_outliers_words,
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
                        y_title="norm",
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
            opening=_learning_words,
            charts=tuple(
                Chart(
                    f"learning_{name}",
                    lines("epochs", f"statistics.{name}", panel="layer", band=False),
                    f"{title_of(name).capitalize()} of every head by epoch: a dot a head, the line "
                    "their mean.",
                    title=f"{title_of(name).capitalize()} over the training",
                    rows="learning_heads",
                    only=partial(_has_statistic, name),
                )
                for name in shown_in("training")
            ),
        ),
    ),
)
