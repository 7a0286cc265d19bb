"""The report of `vitlens stats`: what each head attends to, how far and how sharply, and how two models differ."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import log2
from typing import Any, Final

import numpy as np
from matplotlib.figure import Figure

from vitlens.analysis.heads.labels import FAULTY, LABELS, THRESHOLD, UNLABELLED
from vitlens.analysis.heads.registry import STATISTICS, shown_in
from vitlens.charts import Picture, board, images, lines
from vitlens.commands.stats.record import ChangeRow, HeadEpochRow, HeadRow, HeadsRow, LayerRow, StatsRecord
from vitlens.figures.stats.specialisation import specialisation_matrix
from vitlens.record import by, col
from vitlens.report.claims import Claim, above, below, found, judge
from vitlens.report.prose import counts, listed, say, value_of
from vitlens.report.sections import Chart, Glance, Report, Section
from vitlens.report.verdicts import LIMITS
from vitlens.uncertainty import LEVEL, Estimate, widened

UNIFORM: Final = 0.5  # bits of a row, below which attention is uniform
DEAD: Final = 0.005  # of the mean norm of the heads' outputs
ON_ONE: Final = 0.25  # of the attention on one patch, from which on a head attends to one place
SMALLEST: Final = 0.02  # of a fraction, or of the distance of uniform attention: smaller differences are no findings
FEW: Final = 2  # images, below which nothing is judged
_CHOOSING: Final = ("object", "background", "sink", "similar")
_TITLES: Final = {name: each.title for name, each in STATISTICS.items()}
_RANGES: Final = {
    name: (0.0, 100.0) for name, each in STATISTICS.items() if each.whole_range and each.unit == "fraction"
}
_TOKENS: Final = ("token_norm", "greatest_norm")


@dataclass(frozen=True)
class SpreadRow:
    """One statistic over all heads of a model."""

    model: str = col("model")
    statistic: str = col("statistic")
    mean: Estimate | None = col("mean of heads")
    least: str = col("least")
    most: str = col("most")


@dataclass(frozen=True)
class HeadChange:
    """One head of two models: the differences of its statistics, first minus second."""

    layer: int = col("layer")
    head: int = col("head")
    differences: Mapping[str, Estimate] = col("differences")
    differs: bool = col("differs significantly")


@dataclass(frozen=True)
class NormRow:
    """A norm of the tokens after a block."""

    model: str = col("model")
    layer: int = col("layer")
    what: str = col("tokens")
    norm: Estimate = col("norm of a token")


def _shown(record: StatsRecord) -> tuple[HeadRow, ...]:
    """The heads of the models; of two with the same backbone of the first alone, as their attention is the same."""
    identical = any(row.identical for row in record.pair)
    return tuple(row for row in record.heads if not identical or row.model == record.aliases[0])


def _of_models(record: StatsRecord) -> tuple[HeadsRow, ...]:
    return record.means[:1] if any(row.identical for row in record.pair) else record.means


def claims(record: StatsRecord) -> Iterator[Claim]:
    """Which heads follow a pattern, which are at fault, and how two models differ."""
    for row in _of_models(record):
        heads = [each for each in record.heads if each.model == row.model]
        yield from _pattern(row, heads)
        yield from _faults(record, row, heads)
        yield from _places(row, heads)
    yield from _difference(record)


def _pattern(row: HeadsRow, heads: Sequence[HeadRow]) -> Iterator[Claim]:
    clear = [head for head in heads if head.is_clear]
    if not row.heads:
        return
    kinds = counts({label: count for label, count in row.labels.items() if LABELS[label].function})
    yield Claim(
        "pattern",
        row.model,
        say(
            "{{ clear|length }} of {{ n }} heads of **{{ model }}** follow one pattern{% if clear %} ({{ kinds }}){% "
            "endif %};"
            " for the others no single pattern explains half of their attention.",
            clear=clear, n=row.heads, model=row.model, kinds=kinds,
        ),
        title=f"{len(clear)} of {row.heads} heads of {row.model} follow one pattern",
        kind="answer",
        place="specialisation",
    )  # fmt: skip
    for label in dict.fromkeys(head.label for head in clear if head.label not in (*FAULTY, "position")):
        own = [h for h in clear if h.label == label and above(h.score, THRESHOLD, len(heads))]
        if own and label is not None:
            words = LABELS[label].sentence.split(" (")[0].split(",")[0]
            lead = max(own, key=lambda head: head.score.value if head.score else 0.0)
            yield found(
                f"heads labelled {label}", row.model,
                "{{ heads|names }} of **{{ model }}** (`{{ label }}`): {{ words }}, score {{ effect|value }}"
                "{% if heads|length > 1 %} in {{ lead.name }}{% endif %}.",
                lead.score or Estimate(0.0),
                given={"heads": own, "model": row.model, "label": label, "words": words, "lead": lead},
                reference=THRESHOLD, kind="fact" if label in _CHOOSING else "expected fact", place="specialisation",
            )  # fmt: skip


def _faults(record: StatsRecord, row: HeadsRow, heads: Sequence[HeadRow]) -> Iterator[Claim]:
    if row.faulty is not None:
        yield _health(record, row, heads)
    if row.sinks_off_object is not None and record.images >= FEW:
        says = "{{ effect }} of the patches' attention in **{{ model }}** lies on sinks off the object."
        off = row.sinks_off_object
        yield judge(
            "sinks", row.model, off, "sinks", says=say(says, effect=off, model=row.model),
            because="attention of patches on sinks off the object, mean over heads",
        )  # fmt: skip
    dead = [head for head in heads if head.label == "dead" and below(head.output, DEAD, len(heads))]
    if dead:
        most = max(dead, key=lambda head: head.output.value if head.output else 0.0)
        yield found(
            "dead heads", row.model,
            "{{ heads|names }} of **{{ model }}** {{ heads|are }} dead: at most {{ effect|value }} of the mean norm of "
            "the heads' outputs is added to the residual stream.",
            most.output or Estimate(0.0), given={"heads": dead, "model": row.model}, reference=DEAD,
            kind="hidden fault", place="specialisation",
        )  # fmt: skip
    even = list(_even(record, heads))
    if even:
        least = min(even, key=lambda head: head.statistics["normalised_entropy"].value)
        yield found(
            "uniform heads", row.model,
            "{{ heads|names }} of **{{ model }}** {{ verb }} uniformly: the entropy of a row is at least "
            "{{ effect|value }} of that of uniform attention.",
            least.statistics["normalised_entropy"],
            given={"heads": even, "model": row.model, "verb": "attends" if len(even) == 1 else "attend"},
            reference=_nearly_uniform(record, least), kind="hidden fault", place="heads",
        )  # fmt: skip


def _health(record: StatsRecord, row: HeadsRow, heads: Sequence[HeadRow]) -> Claim:
    """The share of dead and uniform heads; its upper end counts those that more images may show to be so."""
    undecided = sum(
        head.best in FAULTY and not below(head.score, THRESHOLD) for head in heads if head.label not in (None, *FAULTY)
    )
    share = row.faulty.value if row.faulty else 0.0
    value = Estimate(share, share, share + undecided / row.heads, row.heads)
    because = "heads that are dead or attend uniformly"
    if record.images < FEW:
        return Claim("attention health", row.model, state="inconclusive", limit="heads", because="one image; give more")
    limit = LIMITS["heads"]
    if limit.state(value.low or 0.0) != limit.state(value.high or 0.0):
        undecided_words = f"{because}; {undecided} of {row.heads} heads are undecided"
        return Claim("attention health", row.model, state="inconclusive", limit="heads", because=undecided_words)
    return judge("attention health", row.model, value, "heads", because=because)


def _nearly_uniform(record: StatsRecord, head: HeadRow) -> float:
    """The normalised entropy of a row that has UNIFORM bits; 2, beyond all, for a layer of a single key."""
    keys = next(row.keys for row in record.layers if (row.model, row.layer) == (head.model, head.layer))
    return 1 - UNIFORM / log2(keys) if keys > 1 else 2.0


def _even(record: StatsRecord, heads: Sequence[HeadRow]) -> Iterator[HeadRow]:
    for head in heads:
        entropy = head.statistics.get("normalised_entropy")
        if head.label == "uniform" and above(entropy, _nearly_uniform(record, head), len(heads)):
            yield head


def _places(row: HeadsRow, heads: Sequence[HeadRow]) -> Iterator[Claim]:
    """The heads that attend to one fixed place."""
    fixed = [head for head in heads if head.label == "position" and above(head.place_mass, ON_ONE, len(heads))]
    if not fixed:
        return
    lead = max(fixed, key=lambda head: head.place_mass.value if head.place_mass else 0.0)
    yield found(
        "fixed place", row.model,
        "{{ lead.name }} of **{{ model }}** attends to one fixed place: {{ effect }} of the patches' attention lies on "
        "the patch in row {{ lead.place[0] }}, column {{ lead.place[1] }}, whatever the image ({{ chance|percent(1) "
        "}} if it "
        "were uniform){% if others %}; so {{ verb }} {{ others|names }}, at places of their own{% endif %}.",
        lead.place_mass or Estimate(0.0),
        given={
            "lead": lead, "model": row.model, "chance": lead.place_chance or 0.0,
            "others": [head for head in fixed if head is not lead], "verb": "does" if len(fixed) == 2 else "do",
        },
        reference=max(lead.place_chance or 0.0, ON_ONE), kind="hidden fault", place="specialisation",
    )  # fmt: skip


def _difference(record: StatsRecord) -> Iterator[Claim]:
    """How many heads of two models differ, and the largest difference in units of the smallest worth reporting."""
    for pair in record.pair:
        between = f"{pair.first} and {pair.second}"
        if pair.identical:
            yield Claim(
                "difference", between,
                say("All {{ p.parameters }} parameters before the classifiers of **{{ p.first }}** and **{{ p.second "
                    "}}** are "
                    "equal, so their attention is identical.", p=pair),
                title=say("{{ p.first }} and {{ p.second }} have the same backbone", p=pair), kind="answer",
            )  # fmt: skip
            continue
        tests = [row for row in record.changes if row.p_all is not None]
        uniform = {row.layer: row.uniform_distance for row in record.layers}
        sized = [(_in_smallest(row, uniform.get(row.layer), len(tests)), row) for row in tests if _differs(row)]
        large = [(size, row) for size, row in sized if size > 1]
        if not large:
            continue
        _, lead = max(large, key=lambda each: each[0])
        more, less = (pair.first, pair.second) if lead.difference.value > 0 else (pair.second, pair.first)
        k, n = len({row.name for _, row in large}), len({row.name for row in tests})
        yield Claim(
            "difference", between,
            say(
                "{{ k }} of {{ n }} heads differ between **{{ p.first }}** and **{{ p.second }}**; most {{ lead.name "
                "}}, whose "
                "{{ what }} is higher in {{ more }} than in {{ less }} (by {{ size }}, p = {{ lead.p_all|number }}).",
                k=k, n=n, p=pair, lead=lead, what=_TITLES[lead.statistic], more=more, less=less,
                size=_positive(lead.difference),
            ),
            title=f"{k} of {n} heads differ between {between}",
            effect=_positive(lead.difference), p=lead.p_all, kind="answer", place="differences",
        )  # fmt: skip


def _differs(row: ChangeRow) -> bool:
    return row.p_all is not None and row.p_all <= LEVEL


def _positive(each: Estimate) -> Estimate:
    return each if each.value >= 0 or each.low is None or each.high is None else Estimate(
        -each.value, -each.high, -each.low, each.n, each.unit
    )  # fmt: skip


def _in_smallest(row: ChangeRow, uniform: float | None, tests: int) -> float:
    """The near end of a difference in units of the smallest that is worth reporting; 0 where it holds none."""
    wide = widened(row.difference, tests)
    smallest = SMALLEST * (1.0 if wide.unit == "fraction" else uniform or float("inf"))
    if wide.low is None or wide.high is None or wide.low <= 0 <= wide.high:
        return 0.0
    return min(abs(wide.low), abs(wide.high)) / smallest


def _unclear(record: StatsRecord) -> str:
    """What was found for the heads without a clear label."""
    heads = [head for head in _shown(record) if head.label is not None and not head.is_clear]
    if not heads:
        return ""
    nearest = counts({best: count for best in {h.best for h in heads if h.best} for count in [_with(heads, best)]})
    top = max(heads, key=lambda head: head.score.value if head.score else 0.0)
    return say(
        "The nearest patterns of the {{ heads|length }} other heads are {{ nearest }}; the best explained is {{ "
        "top.name }} "
        "({{ top.best }}, score {{ top.score|value }}). What they attend to may depend on content that no pattern "
        "describes.",
        heads=heads, nearest=nearest, top=top,
    )  # fmt: skip


def _with(heads: Sequence[HeadRow], best: str) -> int:
    return sum(head.best == best for head in heads)


def _rank(head: HeadRow) -> tuple[object, ...]:
    return (not head.is_clear, -(head.score.value if head.score else 0.0), head.model, head.layer, head.head)


def _offsets(rows: Sequence[HeadRow], title: str, record: StatsRecord) -> Figure:
    labelled = by(rows, "layer")
    ratios = record.offsets[rows[0].model].ratio
    return specialisation_matrix(
        ratios=[ratios.get(layer) for layer in labelled],
        labels=[[row.label if row.label in LABELS else UNLABELLED for row in own] for own in labelled.values()],
        scores=[[row.score.value if row.score else np.nan for row in own] for own in labelled.values()],
        layers=list(labelled),
        title=title,
    )


@dataclass(frozen=True)
class _Placed:
    """The heads of one model that have a place, with the record that holds their maps by offset."""

    model: str
    heads: tuple[HeadRow, ...]
    record: StatsRecord


def _placed(record: StatsRecord) -> Iterator[_Placed]:
    for model, heads in by(_shown(record), "model").items():
        known = tuple(head for head in heads if head.label is not None)
        if known and model in record.offsets:
            yield _Placed(model, known, record)


def _spread(record: StatsRecord) -> Iterator[SpreadRow]:
    means = {row.model: row.statistics for row in record.means}
    for model, heads in by(_shown(record), "model").items():
        for name in shown_in("overview"):
            known = [(head.statistics[name], head.name) for head in heads if name in head.statistics]
            if known:
                ends = [f"{value_of(each)} ({head})" for each, head in (_end(known, min), _end(known, max))]
                yield SpreadRow(model, _TITLES[name], means[model].get(name), *ends)


def _end(known: Sequence[tuple[Estimate, str]], choose: Any) -> tuple[Estimate, str]:
    end: tuple[Estimate, str] = choose(known, key=lambda pair: pair[0].value)
    return end


def _sharpest(record: StatsRecord) -> str:
    name = "normalised_entropy"
    parts = []
    for model, heads in by(_shown(record), "model").items():
        known = [head for head in heads if name in head.statistics]
        if known:
            sharp, even = (choose(known, key=lambda head: head.statistics[name].value) for choose in (min, max))
            parts.append(
                say(
                    "In **{{ model }}** the sharpest head is {{ sharp.name }}, with {{ least|value }} of the entropy "
                    "of uniform "
                    "attention, the most even {{ even.name }}, with {{ most|value }}",
                    model=model, sharp=sharp, even=even, least=sharp.statistics[name], most=even.statistics[name],
                )
            )  # fmt: skip
    return f"{'; '.join(parts)}." if parts else ""


def _norms(record: StatsRecord) -> Iterator[NormRow]:
    models = {row.model for row in _of_models(record)}
    for row in record.layers:
        if row.model in models:
            for name in _TOKENS:
                if name in row.statistics:
                    yield NormRow(row.model, row.layer, _TITLES[name], row.statistics[name])


def _outliers(record: StatsRecord) -> str:
    """How much longer than the others the longest token is, in each model."""
    parts = []
    for model, rows in by(record.layers, "model").items():
        known = [row for row in rows if set(_TOKENS) <= row.statistics.keys() and row.statistics["token_norm"].value]
        if known and any(each.model == model for each in _of_models(record)):
            longest = max(known, key=_ratio)
            many = max(known, key=lambda row: row.statistics["high_norm_patches"].value)
            parts.append(
                say(
                    "In **{{ model }}** the longest token of an image has at most {{ ratio|number }} times the "
                    "median norm "
                    "(after block {{ layer }}), and at most {{ many|value }} of its patches have a high norm",
                    model=model, ratio=_ratio(longest), layer=longest.layer, many=many.statistics["high_norm_patches"],
                )
            )  # fmt: skip
    return f"{'; '.join(parts)}." if parts else ""


def _ratio(row: LayerRow) -> float:
    return row.statistics["greatest_norm"].value / row.statistics["token_norm"].value


def _head_changes(record: StatsRecord) -> Iterator[HeadChange]:
    for rows in by(record.changes, "name").values():
        shown = {row.statistic: row.difference for row in rows if row.p_all is not None}
        yield HeadChange(rows[0].layer, rows[0].head, shown, any(map(_differs, rows)))


def _changed(record: StatsRecord) -> list[ChangeRow]:
    rows = [row for row in record.changes if _differs(row)]
    return sorted(rows, key=lambda row: -_half_widths(row.difference))


def _half_widths(each: Estimate) -> float:
    low = each.value if each.low is None else each.low
    return abs(each.value) / max(each.value - low, 1e-12)


def _means_over_pair(record: StatsRecord) -> str:
    pair = record.pair[0]
    if pair.identical:
        return "Their backbones are equal value by value: there is no difference to measure."
    if pair.changed is None:
        return "The models differ in shape, or there is one image only, so single heads are not compared."
    clear = {name: each for name, each in pair.statistics.items() if name in shown_in("differences") and _clear(each)}
    means = listed([say("{{ what }} {{ each|alone }}", what=_TITLES[name], each=each) for name, each in clear.items()])
    return say(
        "{{ k }} of {{ n }} heads differ significantly (paired t tests, Holm over heads and statistics); {{ first }} "
        "minus "
        "{{ second }}, mean of all heads: {{ means }}.",
        k=round(pair.changed.value * (pair.changed.n or 0)), n=pair.changed.n, first=pair.first, second=pair.second,
        means=means,
    )  # fmt: skip


def _gap(name: str, record: StatsRecord) -> Estimate | None:
    return record.pair[0].statistics.get(name) if record.pair else None


def _has(name: str, row: HeadEpochRow) -> bool:
    return name in row.statistics


def _clear(each: Estimate) -> bool:
    return above(each, 0.0) or below(each, 0.0)


def _learned(record: StatsRecord) -> str:
    first, last = record.learning[0], record.learning[-1]
    parts = [
        say("mean {{ what }} {{ a|alone }} to {{ b|alone }}", what=_TITLES[name], a=first.statistics[name], b=each)
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
    heads = [head for head in _shown(record) if head.label is not None]
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
    without = [head for head in _shown(record) if head.label is None]
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
    picture=Chart(
        "specialisation",
        lambda rows, title: _offsets(rows[0].heads, title, rows[0].record),
        "Mean weight of keys by their offset from the query, which is in the middle, for every head. Frame and code "
        "name "
        "its pattern, the number is the score.",
        title="What every head of {{ first.model }} attends to",
        rows=lambda record: list(_placed(record))[:1],
    ),
    glance=(
        *(Glance("means", "statistics", key=name, title=_TITLES[name],
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
                board(*(f"differences.{name}" for name in shown_in("differences")), signed=True,
                      titles={f"differences.{name}": title for name, title in _TITLES.items()},
                      marked=lambda row: row.differs),
                "Every head, first model minus second, on the same images; dots: heads that differ significantly in "
                "some "
                "statistic. Heads of one number need not correspond.",
                title="{{ record.aliases|join(' minus ') }}, head by head",
                rows=lambda record: list(_head_changes(record)),
            ),),
        ),
        Section("Which heads differ most?", _changed, columns=("layer", "head", "statistic", "difference", "p_all")),
        Section(
            "What does each head attend to?", _shown, opening=_unclear, about=("attention health",), order=_rank,
            columns=("model", "layer", "head", "label", "best", "score"),
            charts=(Chart(
                "specialisation_other",
                lambda rows, title: _offsets(rows[0].heads, title, rows[0].record),
                "Mean weight of keys by their offset from the query, which is in the middle, for every head.",
                title="What every head of {{ first.model }} attends to",
                rows=lambda record: list(_placed(record))[1:],
            ),),
        ),
        Section(
            "How far do heads look?", "local",
            says="In {{ layers|ranges }}, {{ local }} of {{ heads }} heads of **{{ model }}** look at most half as "
                 "far as uniform "
            "attention; the mean is {{ share|percent }} of that distance.",
            charts=(Chart(
                "distance", lines("layer", "statistics.distance", of="model"),
                "Mean distance between a patch and the patches that it attends to: a dot a head, the line their "
                "mean. Low: local.",
                title="Attention distance by layer", rows=_shown, only=lambda row: "distance" in row.statistics,
            ),),
        ),
        Section(
            "How sharp is their attention?", lambda record: list(_spread(record)), opening=_sharpest,
            columns=("model", "statistic", "mean", "least", "most"),
            charts=(Chart(
                "heads",
                board(*(f"statistics.{name}" for name in shown_in("maps")),
                      titles={f"statistics.{name}": title for name, title in _TITLES.items()},
                      ranges={f"statistics.{name}": ends for name, ends in _RANGES.items()}),
                "Statistics of every head, means over the rows of patches and over images; each panel has its own "
                "colours.",
                title="How sharp every head of {{ first.model }} is", rows=_shown, each="model",
            ),),
        ),
        Section(
            "Do a few tokens stand out?", lambda record: list(_norms(record)), opening=_outliers, about=("sinks",),
            charts=(Chart(
                "tokens", lines("layer", "norm", of="what", panel="model", log=True),
                "Norms of the residual stream after each block: the median of an image's tokens and the greatest, "
                "means over "
                "images.",
                title="Norms of tokens by layer",
            ),),
        ),
        Section(
            "How did the heads change over the training?", "learning", opening=_learned,
            columns=("epochs", "neighbours", "others"),
            charts=(
                *(Chart(
                    f"learning_{name}", lines("epochs", f"statistics.{name}", panel="layer", band=False),
                    f"{_TITLES[name].capitalize()} of every head by epoch: a dot a head, the line their mean.",
                    title=f"{_TITLES[name].capitalize()} over the training", rows="learning_heads",
                    only=partial(_has, name),
                ) for name in shown_in("training")),
                Chart(
                    "learning_positions", images(label="cosine similarity"),
                    "Cosine similarity of position embeddings by offset; the middle is a position with itself. "
                    "Pattern grows "
                    "where space is learned.",
                    title="Position embeddings over the training", rows=lambda record: list(_position_maps(record)),
                ),
            ),
        ),
    ),
)  # fmt: skip
