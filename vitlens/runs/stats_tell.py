"""What `vitlens stats` tells, from its folder alone."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from vitlens.analysis.heads.labels import LABELS, MIXED, THRESHOLD
from vitlens.analysis.heads.registry import STATISTICS, shown_in
from vitlens.commands.scaffold.describe import data_words
from vitlens.files import RunRecord
from vitlens.runs.sections import Section, Table, metrics
from vitlens.runs.stats_differences import difference_section
from vitlens.runs.stats_draw import (
    aliases_of,
    are_identical,
    backbones,
    is_measured,
    measured_in,
    pages,
    panels_of,
    title_of,
)
from vitlens.runs.stats_learning_report import tell_learning
from vitlens.runs.stats_words import depth_words, token_words

NO_LABELS = "Statistics of heads need no labels, so --predicted changes nothing here."
_SHOWN = 400  # heads in the report's table: more than a ViT-L has


def tell(record: RunRecord) -> list[Section]:
    """What the numbers say, figure by figure, and the table of all heads."""
    aliases, found = aliases_of(record), metrics(record)
    sections = [
        Section(
            "What was found",
            (" ".join(data_words(record)), *_asked(record), *_summary(record, aliases)),
            (),
            ("distance",),
        )
    ]
    if not any(name.startswith("distance") for name in found):
        sections[0] = Section(sections[0].title, sections[0].paragraphs)
    if len(aliases) > 1:
        sections.append(difference_section(record, aliases))
    for alias in aliases[:1] if are_identical(record) else aliases:
        end, of = (f"_{alias}", f" of {alias}") if len(aliases) > 1 else ("", "")
        heads = [row for row in record.table("heads") if row["model"] == alias]
        sections.append(_sharpness(record, alias, heads, end, of))
        sections.append(_specialisation(record, alias, heads, end, of))
    return [*sections, *tell_learning(record), _definitions(record), Section("Limits", _LIMITS)]


_LIMITS = (
    "Attention weights say where a head looks, not what it takes from there, nor whether the prediction rests on it.",
    "Intervals are Student's 95 % over images; they say how sure the mean is, not how much images differ.",
    "Labels follow fixed thresholds: a head near one may have another label on other images. Scores are in arrays/.",
)


def _asked(record: RunRecord) -> Iterator[str]:
    options: Any = record.config["options"]
    if options.get("predicted"):
        yield NO_LABELS


def _summary(record: RunRecord, aliases: Sequence[str]) -> Iterator[str]:
    for alias in aliases[:1] if are_identical(record) else aliases:
        heads = [row for row in record.table("heads") if row["model"] == alias]
        layers = [row for row in record.table("layers") if row["model"] == alias]
        found = metrics(record)
        name = f"distance/{alias}" if len(aliases) > 1 else "distance"
        yield from depth_words(alias, found.get(name), heads, layers)
        yield from token_words(alias, layers)
        labels = Counter(str(row["label"]) for row in heads if row["label"] is not None)
        if labels:
            listed = ", ".join(f"{count} {label}" for label, count in labels.most_common())
            yield f"What the {sum(labels.values())} heads of `{alias}` specialise in, by the rules below: {listed}."


def _sharpness(record: RunRecord, alias: str, heads: Sequence[Mapping[str, object]], end: str, of: str) -> Section:
    """Entropy and sparsity over heads, in a table of extremes."""
    rows: list[dict[str, Any]] = []
    for name in shown_in("overview"):
        values = [(float(str(row[name])), row) for row in heads if row.get(name) is not None]
        if not values:
            continue
        low, high = min(values, key=lambda pair: pair[0]), max(values, key=lambda pair: pair[0])
        mean = metrics(record).get(f"{name}/{alias}" if end else name)
        rows.append({"statistic": title_of(name), "mean of heads": mean, "least": _at(*low), "most": _at(*high)})
    found = record.arrays(f"stats-{alias}")
    maps, curves = pages(f"heads{end}", measured_in("maps", found)), panels_of(measured_in("depth", found))
    tokens = (f"tokens{end}",) if _has_tokens(record, alias) else ()
    figures = (*maps, *pages(f"evolution{end}", curves), *tokens)
    return Section(f"How sharp the heads are{of}", (), (Table("Over all heads, rows of patches", rows),), figures)


def _has_tokens(record: RunRecord, alias: str) -> bool:
    found = record.arrays(f"stats-{alias}")
    return is_measured(found, "token_norm") and not bool(np.isnan(found["token_norm"]).any())


def _at(value: float, row: Mapping[str, object]) -> str:
    return f"{value:.3g} (layer {int(str(row['layer'])) + 1}, head {int(str(row['head'])) + 1})"


def _specialisation(record: RunRecord, alias: str, heads: Sequence[Mapping[str, object]], end: str, of: str) -> Section:
    rows: list[dict[str, Any]] = [
        {
            "layer": int(str(row["layer"])) + 1,
            "head": int(str(row["head"])) + 1,
            "label": row["label"],
            "score": row["score"],
            **{title_of(name): row[name] for name in shown_in("table") if row.get(name) is not None},
        }
        for row in heads[:_SHOWN]
    ]
    more = (f"The first {_SHOWN} of {len(heads)} heads; all are in results.json.",) if len(heads) > _SHOWN else ()
    rules: list[dict[str, Any]] = [
        {"label": row["label"], "a head is this where": row["rule"]} for row in record.table("rules")
    ]
    rules.append({"label": MIXED, "a head is this where": LABELS[MIXED].sentence})
    tables = [Table(f"Rules in their order; the first with a score of at least {THRESHOLD} names the head", rules)]
    if not backbones(record).get("comparable"):  # else the two are set side by side, head by head
        tables.append(Table("Every head, layers and heads counted from 1", rows))
    figures = (f"specialisation{end}",) if record.has_arrays(f"offsets-{alias}") else ()
    return Section(f"What every head specialises in{of}", more, tuple(tables), figures)


def _definitions(record: RunRecord) -> Section:
    measured = set(record.table("heads")[0])
    rows: list[dict[str, Any]] = [
        {"statistic": known.title, "unit": known.unit or "–", "is": known.meaning, "reading": known.reading}
        for name, known in STATISTICS.items()
        if (name in measured or known.rows == "tokens") and not known.internal
    ]
    return Section("What the statistics are", (), (Table("Each a mean over queries, then over images", rows),))
