"""What a study of points tells, from its folder alone."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from vitlens.commands.scaffold.describe import data_words
from vitlens.files import RunRecord
from vitlens.runs.sections import Cell, Section, Table, in_words, metrics, number
from vitlens.runs.study_points_draw import how_long, kind_of
from vitlens.uncertainty import LEVEL, Estimate, Side, apart, beyond

Row = Mapping[str, Any]

_MUCH = 1.2  # times the operations, from which on a difference of cost is worth a sentence


def tell_points(record: RunRecord) -> list[Section]:
    """What came out, how the points differ, how they were trained, and what that does not show."""
    return [
        Section("What came out", tuple(_summary(record)), (_points(record),), ("points",)),
        Section("Differences", tuple(_differences(record)), tuple(_comparisons(record))),
        Section("How they were trained", tuple(_how(record)), tuple(_recipes(record))),
        Section("Limits", tuple(_limits(record))),
    ]


def _summary(record: RunRecord) -> Iterator[str]:
    found, words = metrics(record), _words(record)
    ranked = sorted(words, key=lambda label: found[f"accuracy/{label}"].value)
    worst, best = ranked[0], ranked[-1]
    yield (
        f"{len(words)} points, each trained with {how_long(record)}. Highest: `{words[best]}`, right on "
        f"{in_words(found[f'accuracy/{best}'])} of the test images; lowest: `{words[worst]}`, "
        f"{in_words(found[f'accuracy/{worst}'])}"
        + (
            "."
            if apart(found[f"accuracy/{best}"], found[f"accuracy/{worst}"]) is Side.ABOVE
            else "; their intervals overlap."
        )
    )
    rows: dict[str, Row] = {str(row["label"]): row for row in record.table("points")}
    cheap, dear = (choose(rows, key=lambda label: rows[label]["flops"]) for choose in (min, max))
    if rows[dear]["flops"] > _MUCH * rows[cheap]["flops"]:
        ratio = rows[dear]["flops"] / rows[cheap]["flops"]
        pace = rows[cheap]["images_per_second"] / rows[dear]["images_per_second"]
        yield (
            f"`{words[dear]}` takes {number(ratio)} times the operations of `{words[cheap]}`, whose training was "
            f"{number(pace)} times as fast (images a second)."
        )


def _points(record: RunRecord) -> Table:
    found = metrics(record)
    shares = len({row["train_images"] for row in record.table("points")}) > 1
    rows: list[dict[str, Cell]] = []
    for row in record.table("points"):
        cells: dict[str, Cell] = {"point": str(row["words"]), "accuracy": _bare(found[f"accuracy/{row['label']}"])}
        if shares:
            cells["training images"] = int(str(row["train_images"]))
        cells |= {
            "parameters": int(str(row["parameters"])),
            "MFLOPs an image": float(str(row["flops"])) / 1e6,
            "training, images/s": round(float(str(row["images_per_second"]))),
            "seconds a training": round(float(str(row["seconds"])), 1),
        }
        rows.append(cells)
    return Table("Every point: accuracy with its 95 % interval, size, cost and pace", rows)


def _differences(record: RunRecord) -> Iterator[str]:
    words = _words(record)
    for name, which in (("differences", "of points"), ("steps", "of a rung with the one before it")):
        if not _has(record, name):
            continue
        rows = record.table(name)
        sure = significant(rows)
        count = f"{len(sure) or 'None'} of {len(rows)} comparison{'' if len(rows) == 1 else 's'} {which}"
        if sure:
            listed = "; ".join(_said(record, name, row, words) for row in sure)
            yield f"{count} {'is' if len(sure) == 1 else 'are'} significant after Holm's correction: {listed}."
        else:
            yield f"{count} is significant after Holm's correction; that does not show that there is no difference."


def significant(rows: Sequence[Row]) -> list[Row]:
    """The comparisons whose difference is significant after Holm's correction."""
    return [row for row in rows if float(str(row["p_holm"])) <= LEVEL]


def _said(record: RunRecord, name: str, row: Row, words: Mapping[str, str]) -> str:
    estimate = metrics(record)[f"{name.removesuffix('s')}/{row['label']}"]
    side = "above" if estimate.value > 0 else "below"
    return (
        f"`{words[str(row['label'])]}` is {abs(estimate.value):.1f} points{_size(estimate)} {side} "
        f"`{words[str(row['against'])]}`"
    )


def _size(estimate: Estimate) -> str:
    """The interval of a difference's size: from 0 where the interval of the difference holds 0; "" without one."""
    if estimate.low is None or estimate.high is None:
        return ""
    low, high = sorted((abs(estimate.low), abs(estimate.high)))
    return f" ({0.0 if beyond(estimate, 0.0) is Side.UNDECIDED else low:.1f} to {high:.1f})"


def _comparisons(record: RunRecord) -> Iterator[Table]:
    found, words = metrics(record), _words(record)
    for name, caption in (("differences", "Paired differences of accuracy"), ("steps", "Each rung and the one before")):
        if _has(record, name):
            rows: list[dict[str, Cell]] = [
                {
                    "point": words[str(row["label"])],
                    "against": words[str(row["against"])],
                    "difference": _bare(found[f"{name.removesuffix('s')}/{row['label']}"]),
                    "p": float(str(row["p"])),
                    "p_holm": float(str(row["p_holm"])),
                }
                for row in record.table(name)
            ]
            yield Table(f"{caption}, in points, on the same test images", rows)


def _how(record: RunRecord) -> Iterator[str]:
    kind = kind_of(record)
    assert kind is not None
    options: Any = record.config["options"]
    yield f"Trained on {int(str(record.config['train_images'])):,} images, tested on {' '.join(data_words(record))}"
    steps = sorted({int(str(row["steps"])) for row in record.table("points")})
    yield (
        f"Every point had {options['epochs']} epochs ({' or '.join(f'{count:,}' for count in steps)} steps) with the "
        "recipe below, the same for all points of a preset; the last weights are tested, once. The weights of each "
        "training are in `points/`, in a folder that every command takes as a MODEL."
    )
    yield from kind.notes
    yield _HOW_SURE if options["seeds"] > 1 else _HOW_SURE_OF_ONE


_HOW_SURE = (
    "Intervals take the seeds of training and the test images both as drawn at random (two-way random effects over the "
    "table of answers, Student's t with Satterthwaite's degrees of freedom), so they hold for another seed and other "
    "images of this kind. A difference is between answers to the same images with the same seeds; p_holm is its p "
    "corrected for the number of differences in its table."
)
_HOW_SURE_OF_ONE = (
    "There was one seed: intervals (Wilson's, and the paired bootstrap for differences) and p (McNemar's exact test) "
    "cover the choice of test images alone. Another seed gives other accuracies; add --seeds 3. p_holm is p corrected "
    "for the number of differences in its table."
)


def _recipes(record: RunRecord) -> Iterator[Table]:
    recipes: Any = record.config["recipes"]
    for preset, recipe in recipes.items():
        rows: list[dict[str, Cell]] = [{"setting": name, "value": str(value)} for name, value in recipe.items()]
        yield Table(f"Recipe of {preset}", rows)


def _limits(record: RunRecord) -> Iterator[str]:
    options: Any = record.config["options"]
    yield (
        f"These are short trainings: {options['epochs']} epochs rank the points for that budget alone. A larger model "
        "often learns more slowly and may win with more; see --epochs."
    )
    yield (
        "One recipe serves all points of a preset. Its learning rate was chosen for a whole model, so a point that "
        "lacks parts may do better with a rate of its own."
    )
    yield (
        "Operations are counted by torch (matrix products and convolutions); the pace is this machine's while it "
        "trained, and other work on the machine slows it."
    )


def _words(record: RunRecord) -> dict[str, str]:
    return {str(row["label"]): str(row["words"]) for row in record.table("points")}


def _bare(estimate: Estimate) -> str:
    return in_words(estimate, with_n=False)


def _has(record: RunRecord, name: str) -> bool:
    tables: Any = record.results["tables"]
    return name in tables
