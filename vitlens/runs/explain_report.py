"""What `vitlens explain` draws and tells, from its folder alone."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vitlens.commands.scaffold.describe import data_words
from vitlens.commands.scaffold.sheets import left_out_words, sheets
from vitlens.commands.scaffold.targets import PREDICTED, TRUE
from vitlens.figures.explain import attribution_overlays, lines_of
from vitlens.files import RunRecord
from vitlens.runs.explain_verify_draw import draw_league
from vitlens.runs.explain_verify_tell import tell_league
from vitlens.runs.report import Drawn
from vitlens.runs.sections import Section, Table, metrics

_LINES = 6  # of panels in a figure, at most
_ROWS = 24  # of the report's table of images
SHOWN = 6  # images on a sheet, and of a data set in all, at most


def images_shown(methods: int) -> int:
    """Images in a figure of so many methods."""
    return max(1, min(SHOWN, _LINES // lines_of(1 + methods)))


def draw(record: RunRecord) -> Iterator[Drawn]:
    """For each model, its first images with every method's map; none where no map can be drawn."""
    for alias, methods in _methods(record).items():
        if not _drawable(record, alias):
            continue
        found, masks = record.arrays(f"explain-{alias}"), record.arrays(f"explain-{alias}").get("masks")
        for name, part in _sheets(record, alias):
            figure = attribution_overlays(
                images=found["images"][part] / np.float32(255),
                maps=[found[f"maps/{row['method']}"][part] for row in methods],
                signed=[bool(row["signed"]) for row in methods],
                titles=[str(row["title"]) for row in methods],
                names=[_caption(row) for row in _images(record, alias)[part]],
                masks=None if masks is None else masks[part],
                title=_title(record, alias),
            )
            yield Drawn(name, figure, _figure_caption(record, alias, outlined=masks is not None))
    if _verified(record):
        yield from draw_league(record)


def _figure(record: RunRecord, alias: str) -> str:
    return "explain" if len(_methods(record)) == 1 else f"explain_{alias}"


def _title(record: RunRecord, alias: str) -> str:
    if _classless(record, alias):
        return f"{alias}: maps that ask about no class"
    return f"{alias}: what speaks for the target (red) and against it (blue)"


def _classless(record: RunRecord, alias: str) -> bool:
    """Whether a model has no classifier."""
    return all(row["target"] is None for row in _images(record, alias))


def _shown(record: RunRecord, alias: str) -> int:
    """Images that are drawn."""
    return len(record.arrays(f"explain-{alias}")["images"])


def _sheets(record: RunRecord, alias: str) -> list[tuple[str, slice]]:
    """The figures of a model, and the images on each."""
    return sheets(_figure(record, alias), _shown(record, alias), images_shown(len(_methods(record)[alias])))


def _sound(values: Any) -> bool:
    return bool(np.isfinite(values).all() and np.ptp(values) > 1e-6 * np.abs(values).max())


def _caption(row: Mapping[str, object]) -> str:
    if row["target"] is None:
        return Path(str(row["image"])).name
    asked = f"{row['target']} ({100 * float(str(row['target_probability'])):.0f} %)"
    return asked if row["target"] == row["prediction"] else f"target: {asked}; predicted: {row['prediction']}"


def _figure_caption(record: RunRecord, alias: str, *, outlined: bool) -> str:
    unsigned = [str(row["title"]) for row in _methods(record)[alias] if not row["signed"]]
    known = f" Without signs, and drawn from the least value: {', '.join(unsigned)}." if unsigned else ""
    outline = " Outlined: the object." if outlined else ""
    checked = "; see the league below" if _verified(record) else "; vitlens explain --verify tells which can be trusted"
    below = "its file" if _classless(record, alias) else f"{_asked(record)} and its probability"
    return (
        f"Below each image: {below}. Each map is drawn as a share of its own largest "
        f"values (99.5th percentile of their size), smoothly enlarged: places can be compared between methods, amounts "
        f"cannot.{known}{outline} A map alone is no evidence{'' if _classless(record, alias) else checked}."
    )


def _asked(record: RunRecord) -> str:
    words = {PREDICTED: "the predicted class", TRUE: "the true class"}
    return words.get(_options(record)["target"], "the class asked for")


def tell(record: RunRecord) -> list[Section]:
    """Which methods were run, whether their maps can be read, and what they cost."""
    drawn = [name for alias in _methods(record) if _drawable(record, alias) for name, _ in _sheets(record, alias)]
    data: Any = record.config["data"]
    lines = (
        " ".join(data_words(record)),
        *(f"{said}." for said in left_out_words(_shown(record, next(iter(_methods(record)))), int(data["images"]))),
        *_asked_words(record),
        *_engine_words(record),
        *_left_out(record),
        *_fault_words(record),
        *_completeness_words(record),
    )
    checked = tell_league(record) if _verified(record) else []
    limits = [line for section in checked if section.title == "Limits" for line in section.paragraphs]
    return [
        Section("What was found", lines, (), tuple(drawn)),
        *(section for section in checked if section.title != "Limits"),
        Section("Methods", (), tuple(_tables(record))),
        Section("Images", (), (Table(_images_title(record), _image_rows(record)),)),
        Section("Limits", (*_limits(), *limits)),
    ]


def _asked_words(record: RunRecord) -> Iterator[str]:
    """Which class the maps are about, and which models have none."""
    classless = [alias for alias in _methods(record) if _classless(record, alias)]
    for alias in classless:
        yield f"{alias} has no classifier: nothing is predicted, and methods that explain a class are left out."
    if len(classless) < len(_methods(record)):
        yield f"Each map is of the logit of {_asked(record)}."


def _engine_words(record: RunRecord) -> Iterator[str]:
    if _options(record).get("engine") == "grad-cam":
        yield (
            "The maps are the grad-cam package's own, unaltered: negative values set to 0 (ReLU), each scaled to "
            "[0, 1] by its smallest and largest value, in the size of the model's input. Without --engine the same "
            "methods give raw, signed maps."
        )


def _verified(record: RunRecord) -> bool:
    return bool(_options(record)["verify"])


def _drawable(record: RunRecord, alias: str) -> bool:
    count = _shown(record, alias)
    found = record.arrays(f"explain-{alias}")
    return any(_sound(one) for row in _methods(record)[alias] for one in found[f"maps/{row['method']}"][:count])


def _left_out(record: RunRecord) -> Iterator[str]:
    wanted: list[str] = _options(record)["method"]
    for alias, methods in _methods(record).items():
        own = {row["method"] for row in methods}
        lacking = [name for name in wanted if name not in own and name != "all"]
        if lacking:
            why = "it has no classifier" if _classless(record, alias) else "not defined for its family"
            yield f"{alias} has no {', '.join(lacking)}: {why}."


def _fault_words(record: RunRecord) -> Iterator[str]:
    for alias, methods in _methods(record).items():
        for row in methods:
            for key, word in (("constant", "the same everywhere"), ("not_finite", "not finite")):
                if row[key]:
                    yield (
                        f"**{row[key]} of {row['maps']} maps of {row['title']} of {alias} are {word}** and say "
                        "nothing; they are not drawn."
                    )


def _completeness_words(record: RunRecord) -> Iterator[str]:
    found = metrics(record)
    for alias, methods in _methods(record).items():
        for row in methods:
            names = [f"completeness/{row['method']}", f"completeness/{alias}/{row['method']}"]
            error = next((found[name] for name in names if name in found), None)
            if error is not None:
                yield (
                    f"{alias}: the sum of a map of {row['title']} differs from F(image) - F(black) by "
                    f"{error.value:.2g} logits on average; that difference itself is {row['gain']:.3g} on average."
                )


def _tables(record: RunRecord) -> Iterator[Table]:
    for alias, methods in _methods(record).items():
        yield Table(
            f"{alias}: methods",
            [
                {
                    "method": str(row["method"]),
                    "source": str(row["source"]),
                    "map": str(row["map"]),
                    "signed": "yes" if row["signed"] else "no",
                    "constant": int(str(row["constant"])),
                    "not finite": int(str(row["not_finite"])),
                    "ms an image": round(1000 * float(str(row["seconds"])), 1),
                }
                for row in methods
            ],
        )


def _image_rows(record: RunRecord) -> Sequence[dict[str, Any]]:
    rows = record.table("images")[:_ROWS]
    known = [key for key in rows[0] if key == "label" or any(row[key] is not None for row in rows)]
    return [
        {key.replace("_", " "): Path(str(row[key])).name if key == "image" else row[key] for key in known}
        for row in rows
    ]


def _images_title(record: RunRecord) -> str:
    total = len(record.table("images"))
    some = f" (the first {_ROWS} of {total:,}; all are in results.json)" if total > _ROWS else ""
    asked = "" if all(_classless(record, alias) for alias in _methods(record)) else ", predictions and targets"
    return f"Images{asked}{some}"


def _limits() -> Iterator[str]:
    yield (
        "Methods answer different questions: gradients say what a small change would do, occlusion, RISE and "
        "KernelSHAP what is lost when parts are taken away, attention what was passed on. They need not agree."
    )
    yield "A map shows what the model used under one method's assumptions, not why the object is what it is."


def _methods(record: RunRecord) -> dict[str, list[dict[str, object]]]:
    """The rows of the methods, by model."""
    found: dict[str, list[dict[str, object]]] = {}
    for row in record.table("methods"):
        found.setdefault(str(row["model"]), []).append(row)
    return found


def _images(record: RunRecord, alias: str) -> list[dict[str, object]]:
    return [row for row in record.table("images") if row["model"] == alias]


def _options(record: RunRecord) -> Any:
    return record.config["options"]
