"""What `vitlens attack` draws, from its folder alone."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from vitlens.analysis.failures.corruptions import CORRUPTIONS, SEVERITIES
from vitlens.figures.attack import (
    Distances,
    Panel,
    distance_histograms,
    robust_curves,
)
from vitlens.figures.attack_classes import ByClass, class_robustness
from vitlens.figures.robustness import Hardening, robustness_curves
from vitlens.figures.transfer import transfer_matrix
from vitlens.files import RunRecord
from vitlens.runs.attack_draw_inside import Rows, aliases_of, draw_examples, draw_inside, rows_of
from vitlens.runs.attack_keep import AXES, scale_of
from vitlens.runs.attack_words import epsilon_words
from vitlens.runs.report import Drawn
from vitlens.runs.sections import metrics


def draw(record: RunRecord) -> Iterator[Drawn]:
    """Curves, distances, classes, examples, transfer, what changes inside, everyday damage."""
    yield _curves(record)
    yield from _distances(record)
    yield from _classes(record)
    yield from draw_examples(record)
    yield from _transfer(record)
    yield from draw_inside(record)
    yield from _corruptions(record)


def _curves(record: RunRecord) -> Drawn:
    rows, aliases = rows_of(record, "curves"), aliases_of(record)
    n = int(rows[0]["n"])
    if len(aliases) == 1:
        panels = [
            Panel(_NORMS[norm], AXES[norm], _epsilons(some), _by(some, "title"))
            for norm in dict.fromkeys(str(row["norm"]) for row in rows)
            for some in _alike([row for row in rows if row["norm"] == norm])
        ]
        figure = robust_curves(panels=panels, title=f"Accuracy of {aliases[0]} under attack, {n:,} images")
    else:
        titles = dict.fromkeys(str(row["title"]) for row in rows)
        panels = [
            Panel(title, AXES[str(some[0]["norm"])], _epsilons(some), _by(some, "model"))
            for title in titles
            for some in [[row for row in rows if row["title"] == title]]
        ]
        figure = robust_curves(panels=panels, title=f"Accuracy under attack, {n:,} images")
    return Drawn(
        "curves",
        figure,
        "The share of all images that a model has right and that the attack did not turn wrong within epsilon; at 0 "
        "the clean accuracy. An attack shows how low accuracy can be brought, not how low it could be: a stronger one "
        "may bring it lower. Epsilons of different norms do not compare.",
    )


_NORMS = {"linf": "L∞ attacks", "l2": "L2 attacks", "patch": "a patch"}


def _alike(rows: Rows) -> Iterator[Rows]:
    """The rows of attacks that tried the same epsilons, together."""
    sets: dict[tuple[float, ...], list[Mapping[str, Any]]] = {}
    for title in dict.fromkeys(str(row["title"]) for row in rows):
        some = [row for row in rows if row["title"] == title]
        sets.setdefault(tuple(_epsilons(some)), []).extend(some)
    yield from sets.values()


def _epsilons(rows: Rows) -> list[float]:
    return sorted({float(row["epsilon"]) for row in rows})


def _by(rows: Rows, key: str) -> dict[str, list[list[float]]]:
    """Values, lows and highs in the order of the epsilons, by what a column says."""
    return {
        str(name): [
            [float(row[end]) for row in sorted(rows, key=lambda row: float(row["epsilon"])) if row[key] == name]
            for end in ("accuracy", "low", "high")
        ]
        for name in dict.fromkeys(row[key] for row in rows)
    }


def _distances(record: RunRecord) -> Iterator[Drawn]:
    rows = rows_of(record, "attacks")
    chosen = [row for row in rows if row["kind"] == "minimum"] or [row for row in rows if row["norm"] != "patch"]
    panels: dict[str, list[Distances]] = {}
    axis: dict[str, str] = {}
    for row in chosen:
        found: Any = record.arrays(f"attack-{row['model']}")
        values = found[f"distance_{row['attack']}"] * scale_of(str(row["norm"]))
        values = values[found["clean"].astype(bool) & np.isfinite(values) & (values > 0)]
        panels.setdefault(str(row["title"]), []).append(
            Distances(str(row["model"]), values, int(row["right"]) - len(values), row["median"])
        )
        axis[str(row["title"])] = AXES[str(row["norm"])]
    if not any(len(one.values) for some in panels.values() for one in some):  # type: ignore[arg-type]
        return
    minimum = chosen[0]["kind"] == "minimum"
    how = (
        "The attack looks for the smallest perturbation itself."
        if minimum
        else "Only the epsilons tried can appear, so the steps are those of the sweep."
    )
    yield Drawn(
        "distances",
        distance_histograms(panels=panels, axis=axis, title="The smallest perturbation found for each image"),
        f"How far each image that was right had to be changed to be taken wrong. {how} Dashed: the median of the "
        "images that were right. Each is an upper bound: a nearer example may have been missed.",
    )


def _classes(record: RunRecord) -> Iterator[Drawn]:
    rows = rows_of(record, "by_class")
    if not rows:
        return
    classes = list(dict.fromkeys(str(row["class"]) for row in rows))
    models = []
    for alias in dict.fromkeys(str(row["model"]) for row in rows):
        mine = [row for row in rows if row["model"] == alias]
        ends = {
            kind: [[float(row[f"{kind}_{end}"]) for row in mine] for end in ("accuracy", "low", "high")]
            for kind in ("clean", "robust")
        }
        models.append(ByClass(alias, ends["clean"], ends["robust"]))
    (sample,) = rows_of(record, "sample")[:1]
    figure = class_robustness(
        models=models,
        classes=classes,
        title=f"Accuracy by class, clean and under {sample['title']} at {epsilon_words(sample)}",
    )
    yield Drawn(
        "classes", figure,
        "Classes that are hard to begin with have less to lose. Classes with few images have wide intervals, and the "
        "first and the last of many stand out by chance too.",
    )  # fmt: skip


def _transfer(record: RunRecord) -> Iterator[Drawn]:
    rows = rows_of(record, "transfer")
    if not rows:
        return
    aliases = list(dict.fromkeys(str(row["made_for"]) for row in rows))
    rates = np.full((len(aliases), len(aliases)), np.nan)
    clean = np.zeros(len(aliases))
    counts = np.zeros((len(aliases), len(aliases)), dtype=int)
    for row in rows:
        place = aliases.index(str(row["made_for"])), aliases.index(str(row["shown_to"]))
        rates[place] = np.nan if row["rate"] is None else float(row["rate"])
        clean[place[1]] = float(row["clean"])
        counts[place] = int(row.get("n", 0))
    (sample,) = rows_of(record, "sample")[:1]
    figure = transfer_matrix(
        rates=rates,
        clean=clean,
        counts=counts,
        names=aliases,
        title=f"Images made by {sample['title']} at {epsilon_words(sample)}: who is fooled",
    )
    yield Drawn(
        "transfer",
        figure,
        "Of the images that fooled the model they were made for, and that the other has right when clean, the share "
        "that fools the other too. The attack stops once its own model is fooled; one made to be passed on would not.",
    )


def _corruptions(record: RunRecord) -> Iterator[Drawn]:
    rows = rows_of(record, "corruptions")
    if not rows:
        return
    aliases, found, ways = aliases_of(record), metrics(record), []
    for kind, known in CORRUPTIONS.items():
        curves = {}
        for alias in aliases:
            clean = found[f"accuracy/{alias}" if len(aliases) > 1 else "accuracy"]
            mine = [row for row in rows if row["kind"] == kind and row["model"] == alias]
            curves[alias] = [
                [start, *(float(row[end]) for row in mine)]
                for start, end in ((clean.value, "accuracy"), (clean.low, "low"), (clean.high, "high"))
            ]
        ways.append(Hardening(known.title, "severity", ["0", *map(str, SEVERITIES)], curves))  # type: ignore[arg-type]
    data: Any = record.config["data"]
    classes = int(data["classes"]) or 1
    yield Drawn(
        "corruptions",
        robustness_curves(hardenings=ways, chance=1 / classes, n=int(rows[0]["n"])),
        "Everyday damage; severity 0 is the clean image. What the severities are stands in the table. Models see the "
        "same pixels. Severities of different kinds are not equally severe.",
    )
