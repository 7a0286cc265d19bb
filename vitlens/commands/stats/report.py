"""The report of `vitlens stats`: what each head attends to, how far and how sharply, and how two models differ."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
from matplotlib.figure import Figure

from vitlens.analysis.heads.labels import LABELS, THRESHOLD, UNLABELLED
from vitlens.analysis.heads.registry import STATISTICS, View, shown_in
from vitlens.charts import Picture, board, images, lines
from vitlens.commands.stats.claims import claims, differs, heads_shown, models_shown, title_of
from vitlens.commands.stats.record import HeadEpochRow, HeadRow, LayerRow, StatsRecord
from vitlens.figures.stats.specialisation import specialisation_matrix
from vitlens.record import by, col
from vitlens.report.claims import above, below
from vitlens.report.prose import counts, listed, say
from vitlens.report.sections import Chart, Glance, Report, Section
from vitlens.uncertainty import Estimate, Side, beyond

_TOKENS: Final = ("token_norm", "greatest_norm")


@dataclass(frozen=True)
class HeadChange:
    """One head of two models: the differences of its statistics, first minus second."""

    layer: int = col("layer")
    head: int = col("head")
    differences: Mapping[str, Estimate] = col("differences")
    differs: bool = col("differs significantly")


def _keys(column: str, view: View) -> list[str]:
    """The columns of the statistics of a view."""
    return [f"{column}.{name}" for name in shown_in(view)]


def _range(name: str) -> tuple[float, float] | None:
    """The whole range of a statistic, where its colours have it."""
    known = STATISTICS[name.rpartition(".")[2]]
    return (0.0, 100.0) if known.whole_range and known.unit == "fraction" else None


def definitions(record: StatsRecord) -> Iterator[tuple[str, str]]:
    """What each measured statistic and each label is."""
    statistics = [row.statistics for row in record.heads] + [row.statistics for row in record.layers]
    measured = {name for each in statistics for name in each}
    for name, each in STATISTICS.items():
        if name in measured and not each.internal:
            yield each.title, f"{each.meaning}{f' ({each.unit})' if each.unit else ''}. {each.reading}"
    for label, rule in LABELS.items():
        yield label, f"{rule.sentence}."


def _unclear(record: StatsRecord) -> str:
    """What was found for the heads without a clear label."""
    heads = [head for head in heads_shown(record) if head.label is not None and not head.is_clear]
    if not heads:
        return ""
    nearest = counts(Counter(head.best for head in heads if head.best))
    top = max(heads, key=lambda head: head.score.value if head.score else 0.0)
    return say(
        "The nearest patterns of the {{ heads|length }} other heads are {{ nearest }}; the best explained is {{ "
        "top.name }} ({{ top.best }}, score {{ top.score|value }}). What they attend to may depend on content that no "
        "pattern describes.",
        heads=heads, nearest=nearest, top=top,
    )  # fmt: skip


def _rank(head: HeadRow) -> tuple[object, ...]:
    return (not head.is_clear, -(head.score.value if head.score else 0.0), head.model, head.layer, head.head)


def _labelled(record: StatsRecord, model: int) -> list[HeadRow]:
    """The heads of the model of this number that have a label."""
    known = [head for head in heads_shown(record) if head.label is not None and head.model in record.offsets]
    return [head for head in known if head.model == record.aliases[model]] if model < len(record.aliases) else []


def _offsets(model: int, record: StatsRecord, title: str) -> Figure:
    labelled = by(_labelled(record, model), "layer")
    ratios = record.offsets[record.aliases[model]].ratio
    return specialisation_matrix(
        ratios=[ratios.get(layer) for layer in labelled],
        labels=[[row.label if row.label in LABELS else UNLABELLED for row in own] for own in labelled.values()],
        scores=[[row.score.value if row.score else np.nan for row in own] for own in labelled.values()],
        layers=list(labelled),
        title=title,
    )


def _has_offsets(model: int, record: StatsRecord) -> bool:
    return bool(_labelled(record, model))


def _sharpest(record: StatsRecord) -> str:
    name = "normalised_entropy"
    parts = []
    for model, heads in by(heads_shown(record), "model").items():
        known = [head for head in heads if name in head.statistics]
        if known:
            sharp, even = (choose(known, key=lambda head: head.statistics[name].value) for choose in (min, max))
            parts.append(
                say(
                    "In **{{ model }}** the sharpest head is {{ sharp.name }}, with {{ least|value }} of the entropy "
                    "of uniform attention, the most even {{ even.name }}, with {{ most|value }}",
                    model=model, sharp=sharp, even=even, least=sharp.statistics[name], most=even.statistics[name],
                )
            )  # fmt: skip
    return f"{'; '.join(parts)}." if parts else ""


def _with_norms(record: StatsRecord) -> list[LayerRow]:
    models = {row.model for row in models_shown(record)}
    return [row for row in record.layers if row.model in models and set(_TOKENS) <= row.statistics.keys()]


def _outliers(record: StatsRecord) -> str:
    """How much longer than the others the longest token is, in each model."""
    parts = []
    for model, rows in by(_with_norms(record), "model").items():
        known = [row for row in rows if row.statistics["token_norm"].value]
        if known:
            longest = max(known, key=_ratio)
            many = max(known, key=lambda row: row.statistics["high_norm_patches"].value)
            parts.append(
                say(
                    "In **{{ model }}** the longest token of an image has at most {{ ratio|number }} times the median "
                    "norm (after block {{ layer }}), and at most {{ many|value }} of its patches have a high norm",
                    model=model, ratio=_ratio(longest), layer=longest.layer, many=many.statistics["high_norm_patches"],
                )
            )  # fmt: skip
    return f"{'; '.join(parts)}." if parts else ""


def _ratio(row: LayerRow) -> float:
    return row.statistics["greatest_norm"].value / row.statistics["token_norm"].value


def _head_changes(record: StatsRecord) -> Iterator[HeadChange]:
    for rows in by(record.changes, "name").values():
        shown = {row.statistic: row.difference for row in rows if row.p_all is not None}
        yield HeadChange(rows[0].layer, rows[0].head, shown, any(map(differs, rows)))


def _means_over_pair(record: StatsRecord) -> str:
    pair = record.pair[0]
    if pair.identical:
        return "Their backbones are equal value by value: there is no difference to measure."
    if pair.changed is None:
        return "The models differ in shape, or there is one image only, so single heads are not compared."
    clear = {
        name: each
        for name, each in pair.statistics.items()
        if name in shown_in("differences") and beyond(each, 0.0) is not Side.UNDECIDED
    }
    means = listed(
        [say("{{ what }} {{ each|points|alone }}", what=title_of(name), each=each) for name, each in clear.items()]
    )
    return say(
        "{{ k }} of {{ n }} heads differ significantly (paired t tests, Holm over heads and statistics); {{ first }} "
        "minus {{ second }}, mean of all heads: {{ means }}.",
        k=round(pair.changed.value * (pair.changed.n or 0)), n=pair.changed.n, first=pair.first, second=pair.second,
        means=means,
    )  # fmt: skip


def _gap(name: str, record: StatsRecord) -> Estimate | None:
    return record.pair[0].statistics.get(name) if record.pair else None


def _has(name: str, row: HeadEpochRow) -> bool:
    return name in row.statistics


def _learned(record: StatsRecord) -> str:
    first, last = record.learning[0], record.learning[-1]
    parts = [
        say("mean {{ what }} {{ a|alone }} to {{ b|alone }}", what=title_of(name), a=first.statistics[name], b=each)
        for name, each in last.statistics.items()
        if name in first.statistics
    ]
    return say(
        "From epoch {{ first.epochs }} to {{ last.epochs }} ({{ rows|length }} checkpoints): {{ parts }}.",
        first=first, last=last, rows=record.learning, parts=listed(parts),
    )  # fmt: skip


def _position_maps(record: StatsRecord) -> Iterator[Picture]:
    if record.positions is not None:
        every = record.positions.similarity
        for at in sorted({int(place) for place in np.linspace(0, len(every) - 1, min(len(every), 6)).round()}):
            yield Picture(None, every[at], below=f"epoch {record.learning[at].epochs}")


def unknown(record: StatsRecord) -> Iterator[str]:
    """What statistics of attention do not show."""
    heads = [head for head in heads_shown(record) if head.label is not None]
    near = [
        head for head in heads if head.score and not above(head.score, THRESHOLD) and not below(head.score, THRESHOLD)
    ]
    if heads:
        yield "No head was removed: whether a prediction depends on what a head attends to, `vitlens ablate` measures."
    if near:
        yield say(
            "The scores of {{ near|names }} lie within their interval of the threshold of {{ threshold }}: other "
            "images may give them another label.",
            near=near, threshold=THRESHOLD,
        )  # fmt: skip
    without = [head for head in heads_shown(record) if head.label is None]
    if without:
        yield say("{{ n }} heads have no label, as their tokens have no place in the image.", n=len(without))
    if record.images < 20:
        yield say("These are means over {{ n }} image{{ n|s }}: other images may give others.", n=record.images)
    if record.options.get("predicted"):
        yield "Statistics of heads need no labels, so `--predicted` changes nothing here."


REPORT: Final = Report(
    StatsRecord,
    claims=claims,
    unknown=unknown,
    definitions=definitions,
    picture=Chart(
        "specialisation",
        partial(_offsets, 0),
        "Mean weight of keys by their offset from the query, which is in the middle, for every head. Frame and code "
        "name its pattern, the number is the score.",
        title="What every head of {{ record.aliases[0] }} attends to",
        only=partial(_has_offsets, 0), whole=True,
    ),
    glance=(
        *(Glance("means", "statistics", key=name, title=title_of(name),
                 difference=partial(_gap, name))
          for name in ("distance", "normalised_entropy", "hoyer", "self_mass", "cls_mass", "sink_mass")),
        Glance("means", "faulty", question="attention health"),
        Glance("means", "sinks_off_object", question="sinks"),
    ),
    sections=(
        Section(
            "How do the two models differ?", "pair", opening=_means_over_pair, about=("difference",),
            charts=(Chart(
                "differences",
                board(partial(_keys, "differences", "differences"), signed=True,
                      titles=title_of,
                      marked=lambda row: row.differs),
                "Every head, first model minus second, on the same images; dots: heads that differ significantly in "
                "some statistic. Heads of one number need not correspond.",
                title="{{ record.aliases|join(' minus ') }}, head by head",
                rows=lambda record: [] if record.pair[0].identical else list(_head_changes(record)),
            ),),
        ),
        Section(
            "What does each head attend to?", heads_shown, opening=_unclear, about=("attention health",), order=_rank,
            columns=("model", "layer", "head", "label", "best", "score"),
            charts=(Chart(
                "specialisation_other", partial(_offsets, 1),
                "Mean weight of keys by their offset from the query, which is in the middle, for every head.",
                title="What every head of {{ record.aliases[1] }} attends to",
                only=partial(_has_offsets, 1), whole=True,
            ),),
        ),
        Section(
            "How far do heads look?", "local",
            says="In {{ layers|ranges }}, {{ local }} of {{ heads }} heads of **{{ model }}** look at most half as far "
                 "as uniform attention; the mean is {{ share|percent }} of that distance.",
            charts=(Chart(
                "distance", lines("layer", "statistics.distance", of="model"),
                "Mean distance between a patch and the patches that it attends to: a dot a head, the line their mean. "
                "Low: local.",
                title="Attention distance by layer", rows=heads_shown, only=lambda row: "distance" in row.statistics,
            ),),
        ),
        Section(
            "How sharp is their attention?", heads_shown, opening=_sharpest,
            charts=(Chart(
                "heads",
                board(partial(_keys, "statistics", "maps"), titles=title_of, ranges=_range),
                "Statistics of every head, means over the rows of patches and over images; each panel has its own "
                "colours.",
                title="How sharp every head of {{ first.model }} is", each="model",
            ),),
        ),
        Section(
            "Do a few tokens stand out?", _with_norms, opening=_outliers, about=("sinks",),
            charts=(Chart(
                "tokens", lines("layer", "statistics.token_norm", "statistics.greatest_norm", panel="model", log=True),
                "Norms of the residual stream after each block: the median of an image's tokens and the greatest, "
                "means over images.",
                title="Norms of tokens by layer",
            ),),
        ),
        Section(
            "How did the heads change over the training?", "learning", opening=_learned,
            columns=("epochs", "neighbours", "others"),
            charts=(
                *(Chart(
                    f"learning_{name}", lines("epochs", f"statistics.{name}", panel="layer", band=False),
                    f"{title_of(name).capitalize()} of every head by epoch: a dot a head, the line their mean.",
                    title=f"{title_of(name).capitalize()} over the training", rows="learning_heads",
                    only=partial(_has, name),
                ) for name in shown_in("training")),
                Chart(
                    "learning_positions", images(label="cosine similarity"),
                    "Cosine similarity of position embeddings by offset; the middle is a position with itself. Pattern "
                    "grows where space is learned.",
                    title="Position embeddings over the training", rows=lambda record: list(_position_maps(record)),
                ),
            ),
        ),
    ),
)  # fmt: skip
