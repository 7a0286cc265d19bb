"""What `vitlens ablate` tells, from its folder alone."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from vitlens.commands.scaffold.describe import data_words, label_words
from vitlens.files import RunRecord
from vitlens.runs.ablate_draw import ORDERS, REPLACED
from vitlens.runs.ablate_rows import (
    Ranking,
    agreeing,
    fewest_images,
    has_table,
    label,
    main_replacement,
    main_rows,
    missed,
    ranked_rows,
    ranking_of,
    unit_label,
)
from vitlens.runs.ablate_tell_inside import tell_inside, tell_pruned
from vitlens.runs.sections import Section, Table, in_words, metrics
from vitlens.uncertainty import Estimate

Row = Mapping[str, Any]

_NAMED = 5  # heads that the summary names
_LIMITS = (
    "An importance is the effect of removing one unit alone: two heads that stand in for each other can both look "
    "unimportant. Pairs and curves show some of that, not all.",
    "What matters on these images need not matter on others; intervals are over images of this kind.",
)


def tell(record: RunRecord) -> list[Section]:
    """What matters, how surely, what can go, what works together, and what a run carries."""
    if has_table(record, "adaptive"):
        return [_adaptive(record), Section("Limits", _LIMITS)]
    rows = main_rows(record)
    sections = [_summary(record, rows), _table_section(record, rows)]
    if has_table(record, "curves"):
        sections.append(_curves(record))
    if record.has_arrays("redundancy"):
        sections.append(_teamwork(record))
    sections += tell_inside(record)
    if has_table(record, "pruned"):
        sections.append(tell_pruned(record))
    return [*sections, Section("Limits", _LIMITS)]


def _summary(record: RunRecord, rows: Sequence[Row]) -> Section:
    found = metrics(record)
    heads = [row for row in rows if row["kind"] == "head"]
    by = REPLACED[main_replacement(record)]
    lines = [" ".join(data_words(record)), *label_words(record), *_chosen_words(record)]
    lines.append(
        f"The model is right on {in_words(found['accuracy'])}, with a mean cross-entropy of "
        f"{in_words(found['cross_entropy'], with_n=False)}. Each unit's output was replaced by {by}; the change of "
        "loss is exact, image by image."
    )
    lines += _head_words(record, heads)
    lines += _other_words(rows)
    rho, ranked = found.get("rank_correlation/first-order"), ranking_of(heads) is Ranking.SHOWN
    if rho is not None and ranked:
        lines.append(
            f"The first-order estimate ranks the heads with a Spearman correlation of {rho.value:.2f} to the exact "
            "ranking."
        )
    lines += _spent_words(record, found)
    lines += [f"Note: {row['note']}." for row in record.table("notes") if row["note"] != _because(record)]
    tables, pairs = [], agreeing(record)
    if pairs:
        listed: list[dict[str, Any]] = [
            {"ranking": row["first"], "and": row["second"], "Spearman": row["rank_correlation"]} for row in pairs
        ]
        tables.append(Table("Do the rankings of heads agree?", listed))
    figures: tuple[str, ...] = ("importance", "importance_accuracy") if heads else ()
    figures += ("ranking",) if ranked_rows(rows) else ()
    figures += ("agreement",) if pairs else ()
    return Section("What was found", tuple(lines), tuple(tables), figures)


def _because(record: RunRecord) -> str:
    """Why another replacement than the mean was taken, or ""."""
    options: Any = record.config["options"]
    return str(options.get("because", ""))


def _chosen_words(record: RunRecord) -> Iterator[str]:
    if _because(record):
        yield f"{_because(record)}."


def _head_words(record: RunRecord, heads: Sequence[Row]) -> Iterator[str]:
    """How many heads have an effect; those that do, in order; without one, that there is no order."""
    if not heads:
        return
    state = ranking_of(heads)
    if state is Ranking.UNTESTED:
        yield (
            "There are fewer than two images, so that no interval and no test is defined: the table below has what was "
            "measured, and heads are not ranked."
        )
        return
    matter = [row for row in heads if row["matters"]]
    helps = sum(row["delta_loss"] > 0 for row in matter)
    yield (
        f"{len(matter)} of {len(heads)} heads have an effect on the loss after Holm's correction"
        + (f"; {helps} of them help, {len(matter) - helps} hurt." if matter else _UNRANKED)
    )
    if state is Ranking.NO_EFFECT:
        yield from _power_words(record, len(heads))
    most = missed(heads, "head")[:_NAMED]
    if most:
        listed = "; ".join(f"{label(row)} ({in_words(_estimate(row), with_n=False)})" for row in most)
        yield f"Of these, the heads that are missed most (layer.head from 1): {listed}."


_UNRANKED = (
    ". Heads are therefore not ranked, nor removed in order or two by two; it does not show that none of them matters."
)


def _power_words(record: RunRecord, heads: int) -> Iterator[str]:
    """Where the images are too few for any effect to pass the test."""
    n, needed = metrics(record)["accuracy"].n or 0, fewest_images(heads)
    if n < needed:
        yield (
            f"With {n} images no effect on one of {heads} heads can pass this test, however large: it takes at least "
            f"{needed}."
        )


def _other_words(rows: Sequence[Row]) -> Iterator[str]:
    for kind, word in (("mlp", "MLP"), ("block", "block")):
        own = missed(rows, kind)
        if own:
            yield (
                f"The {word} that is missed most is that of layer {own[0]['layer'] + 1}: {in_words(_estimate(own[0]))}."
            )


def _spent_words(record: RunRecord, found: Mapping[str, Estimate]) -> Iterator[str]:
    """What exactness cost, beside a full forward pass for each unit."""
    units = len(main_rows(record))
    name = f"forward_equivalents/{main_replacement(record)}"
    if name in found:
        spent = found[name].value
        yield (
            f"Measuring {units} units took {spent:.1f} forward passes an image (counted by linear layers), "
            f"{spent / units:.2f} of one pass a unit."
        )


def _estimate(row: Row, column: str = "delta_loss", unit: str = "nats") -> Estimate:
    return Estimate(float(row[column]), row[f"{column}_low"], row[f"{column}_high"], None, unit)


def _table_section(record: RunRecord, rows: Sequence[Row]) -> Section:
    listed: list[dict[str, Any]] = [
        {
            "unit": label(row),
            "rise of loss (nats)": _estimate(row),
            "p (Holm)": row["p_holm"],
            "accuracy lost (points)": _estimate(row, "delta_accuracy", "points"),
            "first-order (nats)": row["first_order"],
        }
        for row in sorted(rows, key=lambda row: (row["kind"] != "head", row["layer"], row["head"] or 0))
    ]
    tables = [Table("Every unit; heads as layer.head, all counted from 1", listed)]
    if has_table(record, "classes"):
        classes: list[dict[str, Any]] = [
            {
                "class": row["class"],
                "images": row["images"],
                "head missed most": unit_label(str(row["head"])),
                "rise of loss (nats)": row["delta_loss"],
                "accuracy lost (points)": row["delta_accuracy"],
            }
            for row in record.table("classes")
        ]
        if len(classes) <= 40:
            tables.append(Table("The head that each class misses most (few images a class: a hint, no test)", classes))
    return Section("Every head", (), tuple(tables))


def _curves(record: RunRecord) -> Section:
    rows = record.table("curves")
    removable = metrics(record).get("removable_share")
    n = rows[0]["n"]
    lines = [f"Measured on {n} images that the orders were not chosen on (where there are enough)."]
    if removable is not None:
        lines.append(
            f"{in_words(removable)} of the heads can go, least important first, before accuracy has fallen by more "
            "than 1 point (of the shares that were measured)."
        )
    else:
        lines.append(
            "Without any head the accuracy is not shown to be lower by more than 1 point (its interval), so these "
            "images do not tell which share of the heads can go."
        )
    shares = dict.fromkeys(float(str(row["share"])) for row in rows)
    listed: list[dict[str, Any]] = []
    for share in shares:
        line: dict[str, Any] = {"heads removed (%)": round(100 * share, 1)}
        for row in rows:
            if row["share"] == share:
                name = ORDERS.get(str(row["order"]), str(row["order"]))
                line[name] = f"{100 * float(str(row['accuracy'])):.1f} %"
        listed.append(line)
    return Section("Removing heads one after another", tuple(lines), (Table("Accuracy", listed),), ("curves",))


def _teamwork(record: RunRecord) -> Section:
    if not has_table(record, "pairs"):
        return Section("Heads that do the same", (), (), ("redundancy",))
    rows: list[dict[str, Any]] = record.table("pairs")
    listed: list[dict[str, Any]] = [
        {
            "pair": f"{unit_label(str(row['first']))} and {unit_label(str(row['second']))}",
            "without both (nats)": row["both"],
            "beyond the sum (nats)": Estimate(float(str(row["synergy"])), row["low"], row["high"], None, "nats"),
            "p (Holm)": row["p_holm"],
        }
        for row in rows
    ]
    table = Table("The most important heads, two by two", listed)
    return Section("Heads that do the same, and heads that work together", (), (table,), ("redundancy", "pairs"))


def _adaptive(record: RunRecord) -> Section:
    rows: list[dict[str, Any]] = record.table("adaptive")
    found = metrics(record)
    top = [row for row in rows if row["top"]]
    sure = [unit_label(str(row["unit"])) for row in top if row["settled"]]
    loose = [unit_label(str(row["unit"])) for row in rows if not row["settled"]]
    spent, exact = (found[f"forward_equivalents/{name}"].value for name in ("adaptive", "exact"))
    options: Any = record.config["options"]
    lines = [
        " ".join(data_words(record)),
        *label_words(record),
        *_chosen_words(record),
        f"Surely among the {len(top)} most important heads (layer.head from 1; replaced by "
        f"{REPLACED[options['replace'][0]]}): {', '.join(sure) if sure else 'none; heads are not ranked'}.",
        f"It took {spent:.1f} forward passes an image, {100 * spent / exact:.0f} % of the {exact:.1f} that measuring "
        "every "
        "head on every image would have taken.",
    ]
    if loose:
        lines.append(f"Not told apart at the boundary, with overlapping intervals: {', '.join(loose)}.")
    lines += [f"Note: {row['note']}." for row in record.table("notes") if row["note"] != _because(record)]
    if not sure:
        rows = sorted(rows, key=lambda row: (row["layer"], row["head"]))
    listed: list[dict[str, Any]] = [
        {
            **({"rank": row["rank"]} if sure else {}),
            "head": unit_label(str(row["unit"])),
            "rise of loss (nats)": Estimate(
                float(str(row["delta_loss"])), row["low"], row["high"], row["images"], "nats"
            ),
            "settled": "yes" if row["settled"] else "no",
        }
        for row in rows
    ]
    return Section(
        "What was found",
        tuple(lines),
        (Table("Every head, as far as it was measured", listed),),
        ("ranking",) if sure else (),
    )
