"""What `vitlens attack` tells, from its folder alone."""

from collections.abc import Iterator, Mapping
from typing import Any

from vitlens.analysis.heads.registry import STATISTICS
from vitlens.analysis.robustness.checks import State, state_of
from vitlens.commands.scaffold.describe import data_words, label_words
from vitlens.files import RunRecord
from vitlens.runs import attack_words as words
from vitlens.runs.attack_draw_inside import aliases_of, rows_of
from vitlens.runs.attack_words_inside import inside_words, path_words, shift_words
from vitlens.runs.sections import Cell, Section, Table, in_words, metrics, number
from vitlens.uncertainty import Estimate, Side, apart

_LIMITS = (
    "A robust accuracy is an upper bound: a stronger attack may bring it lower. None of this is a proof of robustness.",
    "Images are attacked one by one at the size that is stated, in floats between 0 and 1; pixels are not rounded to "
    "256 steps afterwards.",
    "Intervals are over images of this kind: not over other images, and not over other trainings of the models.",
)


def tell(record: RunRecord) -> list[Section]:
    """Summary and verdict, curves, distances, classes, transfer, what changes inside, everyday damage, self-checks."""
    sections = [_summary(record), _curves(record), *_classes(record), *_transfer(record), *_inside(record)]
    return [*sections, *_corruptions(record), _checks(record), Section("Limits", tuple(_limits(record)))]


def _summary(record: RunRecord) -> Section:
    rows, aliases, found = rows_of(record, "curves"), aliases_of(record), metrics(record)
    data: Any = record.config["data"]
    size = "x".join(map(str, data["size"]))
    lines = [
        f"{' '.join(data_words(record))} Attacked at {size} px.",
        *label_words(record),
        *words.clean_words(rows),
        *words.fall_words(rows),
        *words.pair_words(rows_of(record, "pairs")),
        *words.verdict_words(rows_of(record, "checks"), aliases),
        *words.corruption_words(found, rows_of(record, "corruptions"), aliases),
    ]  # fmt: skip
    return Section("What was found", tuple(lines), (), ("curves",))


def _curves(record: RunRecord) -> Section:
    rows, attacks = rows_of(record, "curves"), rows_of(record, "attacks")
    lines = tuple(words.distance_words(attacks, metrics(record)))
    clean = [row for row in rows if row["epsilon"] == 0 and row["attack"] == rows[0]["attack"]]
    accuracies: list[dict[str, Cell]] = [
        {"attack": "none", "epsilon": "0", **{str(row["model"]): _left(row) for row in clean}}
    ]
    for attack in dict.fromkeys(str(row["attack"]) for row in rows):
        for epsilon in dict.fromkeys(
            float(row["epsilon"]) for row in rows if row["attack"] == attack and row["epsilon"] > 0
        ):
            mine = [row for row in rows if row["attack"] == attack and row["epsilon"] == epsilon]
            line: dict[str, Cell] = {"attack": mine[0]["title"], "epsilon": words.epsilon_words(mine[0])}
            line |= {str(row["model"]): _left(row) for row in mine}
            accuracies.append(line)
    costs: list[dict[str, Cell]] = [
        {
            "model": row["model"], "attack": row["title"], "from": row["source"], "steps": row["steps"],
            "restarts": row["restarts"], "images forward": row["forwards"], "backward": row["backwards"],
            "seconds": float(row["seconds"]),
        }
        for row in attacks
    ]  # fmt: skip
    shown = tuple(name for name in ("distances",) if _has_distances(record))
    tables = (
        Table("Accuracy left, with 95 % intervals", accuracies),
        *_pairs(record),
        Table("What was run, and what it cost", costs),
    )
    return Section("How soon images give way", lines, tables, shown)


def _pairs(record: RunRecord) -> Iterator[Table]:
    """Every paired test of two models; none of one model."""
    table: list[dict[str, Cell]] = [
        {
            "attack": row["title"], "epsilon": "0" if row["attack"] == "clean" else words.epsilon_words(row),
            "models": f"{row['first']} − {row['second']}", "only the first right": row["only_first"],
            "only the second right": row["only_second"],
            "difference": in_words(words.estimate(row, "difference", unit="points"), with_n=False),
            "p": number(float(row["p"])), "p (Holm)": number(float(row["p_holm"])),
        }
        for row in rows_of(record, "pairs")
    ]  # fmt: skip
    if table:
        yield Table("The models against each other, image by image: McNemar's exact test", table)


def _left(row: Mapping[str, Any]) -> str:
    return in_words(words.estimate(row), with_n=False)


def _has_distances(record: RunRecord) -> bool:
    chosen = [row for row in rows_of(record, "attacks") if row["kind"] == "minimum"]
    chosen = chosen or [row for row in rows_of(record, "attacks") if row["norm"] != "patch"]
    return any(row["broken"] for row in chosen)


def _classes(record: RunRecord) -> Iterator[Section]:
    rows = rows_of(record, "by_class")
    if not rows:
        return
    lines = []
    for alias in dict.fromkeys(str(row["model"]) for row in rows):
        mine = [row for row in rows if row["model"] == alias]
        ordered = sorted(mine, key=lambda row: float(row["robust_accuracy"]))
        least, most = ordered[0], ordered[-1]
        if apart(_kept(least), _kept(most)) is Side.BELOW:
            lines.append(
                f"{alias} keeps least of {least['class']} ({in_words(_kept(least))}) and most of {most['class']} "
                f"({in_words(_kept(most))})."
            )
        else:
            lines.append(f"The classes are not shown to differ in what {alias} keeps of them: all intervals overlap.")
    yield Section("Class by class", tuple(lines), (), ("classes",))


def _kept(row: Any) -> Estimate:
    keys = {"value": "robust_accuracy", "low": "robust_low", "high": "robust_high"}
    return words.estimate({**{name: row[key] for name, key in keys.items()}, "n": row["n"]}, "value")


def _transfer(record: RunRecord) -> Iterator[Section]:
    rows = rows_of(record, "transfer")
    if not rows:
        return
    table: list[dict[str, Cell]] = [
        {
            "made for": row["made_for"], "shown to": row["shown_to"],
            "fooled too": None if row["rate"] is None else in_words(words.estimate(row, "rate")),
            "accuracy": f"{100 * row['accuracy']:.1f} %", "clean accuracy": f"{100 * row['clean']:.1f} %",
        }
        for row in rows
    ]  # fmt: skip
    lines = tuple(words.transfer_words(rows))
    yield Section("Shown to the other model", lines, (Table("Who fools whom", table),), ("transfer",))


def _inside(record: RunRecord) -> Iterator[Section]:
    options: Any = record.config["options"]
    if not options.get("inside", True):
        return
    sample, aliases = rows_of(record, "sample"), aliases_of(record)
    lines = [
        f"{row['title']} at {words.epsilon_words(row)} fools {row['model']} on {row['fooled']} of {row['n']} images "
        "of a sample."
        for row in sample
    ]
    lines += inside_words(metrics(record), aliases, sample)
    lines += path_words(rows_of(record, "blocks"))
    lines += shift_words(rows_of(record, "shifts"), {name: one.title for name, one in STATISTICS.items()})
    figures = [f"examples_{alias}" for alias in aliases if record.has_arrays(f"examples-{alias}")]
    figures += ["paths"] if rows_of(record, "blocks") else []
    figures += ["shifts"] if rows_of(record, "shifts") else []
    yield Section("What changes inside", tuple(lines), (), tuple(figures))


def _corruptions(record: RunRecord) -> Iterator[Section]:
    rows, aliases = rows_of(record, "corruptions"), aliases_of(record)
    if not rows:
        return
    table: list[dict[str, Cell]] = [
        {"kind": row["kind"], "severity": row["severity"],
         **{alias: next(in_words(words.estimate(one), with_n=False) for one in rows
                        if (one["model"], one["kind"], one["severity"]) == (alias, row["kind"], row["severity"]))
            for alias in aliases}}
        for row in rows if row["model"] == aliases[0]
    ]  # fmt: skip
    kinds: list[dict[str, Cell]] = [dict(row) for row in rows_of(record, "corruption_kinds")]
    tables = (Table("What the severities are", kinds), Table("Accuracy by kind and severity", table))
    lines = (
        "Kinds and severities are in the manner of Hendrycks & Dietterich (2019), set for images of any size; their "
        "numbers do not compare with those of ImageNet-C or CIFAR-10-C.",
    )
    yield Section("Everyday damage", lines, tables, ("corruptions",))


_VERDICTS = {State.PASSED: "as expected", State.INCONCLUSIVE: "inconclusive", State.FAILED: "**no**"}


def _checks(record: RunRecord) -> Section:
    rows = rows_of(record, "checks")
    several = len(aliases_of(record)) > 1
    table: list[dict[str, Cell]] = [
        {
            **({"model": row["model"]} if several else {}), "check": row["name"], "attack": row["attack"],
            "expected": row["expected"], "found": row["found"],
            "verdict": _VERDICTS[state_of(bool(row["passed"]), bool(row.get("conclusive", True)))],
        }
        for row in rows
    ]  # fmt: skip
    lines = (
        "A broken attack makes a model look robust. These checks look for what a sound attack always shows, and for "
        "signs of gradients that hide (Athalye 2018, Carlini 2019), on a few images that each model has right.",
    )
    return Section("Can these numbers be believed?", lines, (Table("Self-checks", table),))


def _limits(record: RunRecord) -> Iterator[str]:
    yield from _LIMITS
    options: Any = record.config["options"]
    if options.get("downwards"):
        yield (
            "Attacks within an epsilon were tried at the largest first, then at smaller ones down to the first at "
            'which an image stood: below, it is taken to stand, not tried. The self-check "from below" tries some.'
        )
    if rows_of(record, "transfer"):
        yield "Transfer is from attacks that stop at the first success: it says little of attacks made to transfer."
