"""What the numbers of an attack say, in words: each sentence is chosen by the numbers it reports."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from vitlens.analysis.robustness.checks import Check
from vitlens.analysis.robustness.masking_signs import verdict
from vitlens.runs.sections import in_words, number
from vitlens.uncertainty import Estimate, Side, beyond

Row = Mapping[str, Any]
Found = Mapping[str, Estimate]


def estimate(row: Row, key: str = "accuracy", *, unit: str = "fraction") -> Estimate:
    """A row of a table as an estimate."""
    return Estimate(float(row[key]), row.get("low"), row.get("high"), row.get("n"), unit)


def epsilon_words(row: Row) -> str:
    """An epsilon as a person says it: "4/255", "an L2 distance of 0.5", "5 % of the pixels covered"."""
    epsilon = float(row["epsilon"])
    return {"linf": f"{epsilon:g}/255", "l2": f"an L2 distance of {epsilon:g}"}.get(
        str(row["norm"]), f"{100 * epsilon:.3g} % of the pixels covered"
    )


def clean_words(rows: Sequence[Row]) -> Iterator[str]:
    """How often each model is right before any attack; and where there is nothing to attack."""
    for alias, row in {str(row["model"]): row for row in rows if row["epsilon"] == 0}.items():
        right = estimate(row)
        if right.value == 0:
            yield (
                f"**{alias} is wrong on every one of the {right.n:,} images: there is nothing to attack**, and its "
                "curves are flat at 0."
            )
        else:
            yield f"{alias} is right on {in_words(right)} of the clean images."


def fall_words(rows: Sequence[Row]) -> Iterator[str]:
    """How far each attack brings each model's accuracy down, at the smallest and the largest epsilon."""
    for alias in dict.fromkeys(str(row["model"]) for row in rows):
        parts = []
        for attack in dict.fromkeys(str(row["attack"]) for row in rows):
            mine = [row for row in rows if row["model"] == alias and row["attack"] == attack and row["epsilon"] > 0]
            first, last = mine[0], mine[-1]
            end = f"{in_words(estimate(last), with_n=False)} at {epsilon_words(last)}"
            start = "" if first is last else f"{in_words(estimate(first), with_n=False)} at {epsilon_words(first)}, "
            parts.append(f"{first['title']} leaves {start}{end}")
        if any(row["accuracy"] > 0 for row in rows if row["model"] == alias and row["epsilon"] == 0):
            yield f"{alias}: {'; '.join(parts)}."


def distance_words(rows: Sequence[Row], found: Found) -> Iterator[str]:
    """The median smallest perturbation of each model under each attack."""
    several = len({row["model"] for row in rows}) > 1
    for row in rows:
        if not row["right"] or row["norm"] == "patch":
            continue
        name = f"median_distance/{row['model']}/{row['attack']}" if several else f"median_distance/{row['attack']}"
        unit = "/255" if row["norm"] == "linf" else " (L2)"
        if name not in found:
            yield (
                f"Of the images that {row['model']} has right, at least half ({row['survived']} of {row['right']}) "
                f"survive {row['title']} at all that was tried: their median distance lies beyond."
            )
            continue
        median = found[name]
        within = f"{number(median.value)}{unit}{_ends(median)}"
        yield f"Half of what {row['model']} has right falls to {row['title']} within {within}."


def _ends(median: Estimate) -> str:
    if median.low is None:
        return ""
    high = "beyond what was tried" if median.high is None else number(median.high)
    return f" (95 % interval {number(median.low)} to {high}, n = {median.n:,})"


def pair_words(rows: Sequence[Row]) -> Iterator[str]:
    """Which of two models is the more robust, and where that is no chance."""
    if not rows:
        return
    attacked = [row for row in rows if row["attack"] != "clean"]
    clean = [row for row in rows if row["attack"] == "clean"]
    for row in clean:
        if row["p_holm"] <= 0.05:
            better = row["first"] if row["difference"] > 0 else row["second"]
            yield (
                f"On clean images {better} is better ({_points(row)}, {row['first']} minus {row['second']}): robust "
                "accuracies include that difference."
            )
    for first, second in dict.fromkeys((str(row["first"]), str(row["second"])) for row in attacked):
        mine = [row for row in attacked if (row["first"], row["second"]) == (first, second)]
        ahead = {
            first: [row for row in mine if row["p_holm"] <= 0.05 and row["difference"] > 0],
            second: [row for row in mine if row["p_holm"] <= 0.05 and row["difference"] < 0],
        }
        if not any(ahead.values()):
            yield f"{first} and {second}: in none of {len(mine)} paired tests is one shown to be the more robust."
            continue
        said = [f"{alias} is the more robust in {len(some)} ({_most(some)})" for alias, some in ahead.items() if some]
        rest = len(mine) - sum(map(len, ahead.values()))
        left = f"; in {rest} none is shown to be" if rest else ""
        yield f"{first} against {second}, of {len(mine)} paired tests after Holm's correction: {'; '.join(said)}{left}."


def _most(rows: Sequence[Row]) -> str:
    row = max(rows, key=lambda row: abs(float(row["difference"])))
    return f"most under {row['title']} at {epsilon_words(row)}: {_points(row)}"


def _points(row: Row) -> str:
    if row["low"] is None or row["high"] is None:
        return f"{number(abs(float(row['difference'])), 1)} points"
    size, low, high = (abs(float(row[key])) for key in ("difference", "low", "high"))
    low, high = sorted((low, high)) if float(row["low"]) * float(row["high"]) > 0 else (0.0, max(low, high))
    return f"{number(size, 1)} points ({number(low, 1)} to {number(high, 1)})"


def verdict_words(rows: Sequence[Row], aliases: Sequence[str]) -> Iterator[str]:
    """The plain verdict of the self-checks, model by model."""
    for alias in aliases:
        checks = [
            Check(
                row["name"],
                row["attack"],
                row["expected"],
                row["found"],
                passed=bool(row["passed"]),
                conclusive=bool(row.get("conclusive", True)),
            )
            for row in rows
            if row["model"] == alias
        ]
        yield verdict(checks, of=f"The attacks on {alias}")


def transfer_words(rows: Sequence[Row]) -> Iterator[str]:
    """How many images that fool one model fool another."""
    for row in rows:
        if row["made_for"] != row["shown_to"]:
            if row["rate"] is None:
                yield f"No image that fools {row['made_for']} is one that {row['shown_to']} has right when clean."
                continue
            rate = estimate(row, "rate")
            yield f"Of the images that fool {row['made_for']}, {in_words(rate)} also fool {row['shown_to']}."


def corruption_words(found: Found, rows: Sequence[Row], aliases: Sequence[str]) -> Iterator[str]:
    """Mean errors, the worst kind, and how models compare."""
    for alias in aliases:
        name = f"mean_error_on_corruptions/{alias}" if len(aliases) > 1 else "mean_error_on_corruptions"
        mine = [row for row in rows if row["model"] == alias]
        if name not in found or not mine:
            continue
        hardest = min(mine, key=lambda row: float(row["accuracy"]))
        yield (
            f"{alias} is wrong on {in_words(found[name])} over all kinds and severities; most is lost to "
            f"{hardest['kind']} of severity {hardest['severity']}, which leaves {in_words(estimate(hardest))}."
        )
    if len(aliases) > 1 and rows and not any(name.startswith("mean_corruption_error/") for name in found):
        yield "Mean corruption errors are left out: the model they are relative to makes no error of some kind."
    relative = {name: one for name, one in found.items() if name.startswith("mean_corruption_error/")}
    for name, one in relative.items():
        _, alias, baseline = name.split("/")
        if alias != baseline:
            side = _against_one(one)
            yield f"Mean corruption error of {alias} relative to {baseline} (100 %): {in_words(one)}, {side}."


def _against_one(one: Estimate) -> str:
    return {Side.BELOW: "fewer errors", Side.ABOVE: "more errors"}.get(beyond(one, 1.0), "not shown to differ")
