"""What `vitlens stats` says of two models: the same backbone, or how they differ, head by head where that can be."""

from collections.abc import Iterator, Sequence
from typing import Any, Final

from vitlens.analysis.heads.registry import STATISTICS
from vitlens.files import RunRecord
from vitlens.runs.sections import Section, Table, metrics
from vitlens.runs.stats_draw import are_identical, backbones, measured_in, pages, title_of
from vitlens.uncertainty import Estimate

_CHANGED: Final = 20  # heads of the report's table


def difference_section(record: RunRecord, aliases: Sequence[str]) -> Section:
    """The section on two models."""
    title = "How the two models differ"
    if are_identical(record):
        parameters = int(str(backbones(record)["parameters"]))
        words = (
            f"All {parameters:,} parameters and buffers before the classifiers of `{aliases[0]}` and `{aliases[1]}` "
            "are equal (compared value by value), so their attention is identical by construction: there is no "
            f"difference to measure, and what follows of `{aliases[0]}` holds for both."
        )
        return Section(title, (words,))
    found, start = metrics(record), "difference/"
    overall: list[dict[str, Any]] = [
        {"statistic": title_of(name.split("/")[1]), f"{aliases[0]} minus {aliases[1]}": estimate}
        for name, estimate in found.items()
        if name.startswith(start) and not STATISTICS[name.split("/")[1]].internal
    ]
    tables = [Table("Mean of all heads, paired over images", overall)]
    if not record.has_arrays("differences"):
        words = "The models are not of one shape (or there is one image), so heads are not compared one by one."
        return Section(title, (words,), tuple(tables))
    tables += [*_head_tables(record, aliases)]
    return Section(title, (_changed_words(record, aliases),), tuple(tables), difference_figures(record))


def difference_figures(record: RunRecord) -> tuple[str, ...]:
    """The names of the figures of differences."""
    return tuple(pages("differences", measured_in("differences", record.arrays("differences"))))


def _changed_words(record: RunRecord, aliases: Sequence[str]) -> str:
    share = metrics(record)[f"heads_changed/{aliases[0]}/{aliases[1]}"]
    heads = share.n or 0
    names = dict.fromkeys(title_of(str(row["statistic"])) for row in record.table("changes"))
    return (
        f"{round(share.value * heads)} of {heads} heads differ significantly between `{aliases[0]}` and "
        f"`{aliases[1]}` in at least one of {len(names)} statistics ({', '.join(names)}): paired t tests over images, "
        "Holm's correction over all heads and statistics together."
    )


def _head_tables(record: RunRecord, aliases: Sequence[str]) -> Iterator[Table]:
    counts: list[dict[str, Any]] = [
        {
            "statistic": title_of(str(row["statistic"])),
            "heads": row["heads"],
            "significantly different": row["significant"],
        }
        for row in record.table("differences")
        if not STATISTICS[str(row["statistic"])].internal
    ]
    yield Table("Head by head: paired t tests, Holm's correction over the heads of a statistic", counts)
    rows = [row for row in record.table("changes") if float(str(row["p_holm"])) <= 0.05]
    rows.sort(key=_clearness, reverse=True)
    shown: list[dict[str, Any]] = [
        {
            "layer": int(str(row["layer"])) + 1,
            "head": int(str(row["head"])) + 1,
            "statistic": title_of(str(row["statistic"])),
            f"{aliases[0]} minus {aliases[1]}": _estimate(row),
        }
        for row in rows[:_CHANGED]
    ]
    if shown:
        which = f"the {_CHANGED} clearest of {len(rows)}" if len(rows) > _CHANGED else f"all {len(rows)}"
        yield Table(f"Significant differences of single heads ({which}), layers and heads counted from 1", shown)


def _clearness(row: dict[str, object]) -> float:
    """The size of a difference in half-widths of its interval."""
    value, low = float(str(row["difference"])), float(str(row["low"]))
    return abs(value) / max(value - low, 1e-12)


def _estimate(row: dict[str, object]) -> Estimate:
    value, low, high = (float(str(row[name])) for name in ("difference", "low", "high"))
    return Estimate(value, low, high, int(str(row["n"])), STATISTICS[str(row["statistic"])].unit)
