"""What `vitlens features` tells, from its folder alone."""

from collections.abc import Iterator
from typing import Any

from vitlens.files import RunRecord
from vitlens.report import Cell, Section, Table, metrics
from vitlens.runs import features_words as words
from vitlens.runs.describe import data_words
from vitlens.runs.features_record import aliases_of, has_matches, has_table, name_of_classifier
from vitlens.uncertainty import Estimate

_ROWS = 60  # of the table over depth; results.json has them all


def tell(record: RunRecord) -> list[Section]:
    """Summary, accuracy over depth, similarity, the space, patches, neighbours, language, limits."""
    sections = [
        Section("What was found", tuple(_summary(record))),
        *_depth(record),
        *_similarity(record),
        *_space(record),
        *_patches(record),
        *_neighbours(record),
        *_language(record),
    ]
    return [*sections, Section("Limits", tuple(_limits(record)))]


def _summary(record: RunRecord) -> Iterator[str]:
    found, bank = metrics(record), record.config.get("bank")
    yield " ".join(data_words(record))
    yield from (words.reading(row) for row in record.table("features"))
    if bank is None:
        yield f"There are no k-NN and no probe: {record.config.get('reason')}."
    for alias in aliases_of(record):
        yield from words.knowledge(found, alias, _end(record, alias), _ks(record), int(str(bank or 0)))
    yield from _rows_said(record, "pairs", lambda rows: words.compared(rows, _names(record)))
    yield from _rows_said(
        record, "similarity", lambda rows: words.alike([row for row in rows if row["first"] != row["second"]])
    )
    for alias in aliases_of(record):
        yield from _rows_said(record, "templates", lambda rows, alias=alias: words.worded(rows, alias))
    yield from (f"{row['note'][0].upper()}{row['note'][1:]}." for row in _table(record, "notes"))
    yield "Brackets hold 95 % intervals and the number of images."


def _depth(record: RunRecord) -> Iterator[Section]:
    rows = _table(record, "depth")
    if not rows:
        return
    said: list[str] = []
    for classifier in ("probe", f"knn-{max(_ks(record))}"):
        for alias in aliases_of(record):
            said += words.over_depth(rows, alias, classifier, name_of_classifier(classifier))
    table = [
        {
            "model": str(row["model"]),
            "layer": str(row["title"]),
            "dim": row["dim"],
            "classifier": name_of_classifier(str(row["classifier"])),
            "votes": {"dino": "weighted", "majority": "majority"}.get(str(row.get("weighting")), "–"),
            "accuracy": Estimate(float(row["accuracy"]), float(row["low"]), float(row["high"]), int(row["n"])),
        }
        for row in rows
    ]
    more = (f"The table's first {_ROWS} of {len(table)} rows; all are in results.json.",) if len(table) > _ROWS else ()
    yield Section(
        "What each layer knows", (*said, *more), (Table("Accuracy on the test images", table[:_ROWS]),), ("depth",)
    )


def _similarity(record: RunRecord) -> Iterator[Section]:
    rows = _table(record, "similarity")
    if rows:
        yield Section("How alike the layers are", tuple(words.alike(rows)), (), ("cka", "distances"))


def _space(record: RunRecord) -> Iterator[Section]:
    rows = _table(record, "space")
    said: list[str] = []
    figures: list[str] = []
    for alias in aliases_of(record):
        said += words.space(rows, alias)
        figures += [f"space_{of}_{alias}" for of in ("images", "patches") if any(_is(row, alias, of) for row in rows)]
    if figures:
        yield Section("The space of the last layer", tuple(said), (), tuple(figures))


def _is(row: dict[str, Any], alias: str, of: str) -> bool:
    return bool(row["model"] == alias and row["of"] == of)


def _patches(record: RunRecord) -> Iterator[Section]:
    rows = _table(record, "patches")
    figures = [*(["patches"] if rows else [])]
    figures += [f"matches_{alias}" for alias in aliases_of(record) if has_matches(record, alias)]
    if figures:
        table: list[dict[str, Cell]] = [
            {
                "model": str(row["model"]),
                "patches": f"{row['grid'][0]}×{row['grid'][1]}",
                "variance in the three colours": Estimate(sum(float(share) for share in row["explained"])),
            }
            for row in rows
        ]
        yield Section(
            "What single patches know", (), (Table("Principal components of the patches shown", table),), tuple(figures)
        )


def _neighbours(record: RunRecord) -> Iterator[Section]:
    aliases = [alias for alias in aliases_of(record) if record.has_arrays(f"retrieval-{alias}")]
    if aliases:
        said: list[str] = []
        for alias in aliases:
            said += words.retrieved(metrics(record), alias, _end(record, alias), _ks(record))
        yield Section("Nearest images", tuple(said), (), tuple(f"retrieval_{alias}" for alias in aliases))


def _language(record: RunRecord) -> Iterator[Section]:
    rows = _table(record, "templates")
    figures: list[str] = []
    said: list[str] = []
    for alias in aliases_of(record):
        if any(row["model"] == alias for row in rows):
            figures.append(f"templates_{alias}")
            said += words.worded(rows, alias)
        if record.has_arrays(f"prompts-{alias}"):
            figures.append(f"prompts_{alias}")
    said += [
        f"`{row['model']}` was not asked by the names of the classes: {row['reason']}."
        for row in _table(record, "silent")
    ]
    if not figures and not said:
        return
    table: list[dict[str, Cell]] = [
        {
            "model": str(row["model"]),
            "template": str(row["template"]),
            "accuracy": Estimate(float(row["accuracy"]), float(row["low"]), float(row["high"]), int(row["n"])),
            "minus the ensemble": _gain(row),
            "p (Holm)": None if row["p_holm"] is None else float(row["p_holm"]),
        }
        for row in rows
    ]
    tables = (Table("Zero-shot accuracy by template", table[:_ROWS]),) if table else ()
    yield Section("Images and words", tuple(said), tables, tuple(figures))


def _gain(row: dict[str, Any]) -> Estimate | None:
    if row.get("gain") is None:
        return None
    return Estimate(float(row["gain"]), float(row["gain_low"]), float(row["gain_high"]), unit="points")


def _limits(record: RunRecord) -> Iterator[str]:
    yield (
        "What a probe or neighbours can read is there; whether the model uses it is another question (vitlens ablate). "
        "A probe is linear: what it cannot read may still be there."
    )
    if record.config.get("bank") is not None:
        yield (
            "The bank is the data's training part. A model that was trained on these very images knows them better "
            "than others: its neighbours are not those of unseen images, and its numbers do not compare with those of "
            "a model that never saw them."
        )
    yield "Intervals are over test images; they do not say how much another training run or another bank would change."
    yield "Principal components, t-SNE and CKA describe these images, and are dominated by what varies most among them."


def _rows_said(record: RunRecord, name: str, say: Any) -> Iterator[str]:
    rows = _table(record, name)
    if rows:
        yield from say(rows)


def _table(record: RunRecord, name: str) -> list[dict[str, Any]]:
    return [dict(row) for row in record.table(name)] if has_table(record, name) else []


def _end(record: RunRecord, alias: str) -> str:
    return f"/{alias}" if len(aliases_of(record)) > 1 else ""


def _ks(record: RunRecord) -> list[int]:
    options: Any = record.config["options"]
    return [int(k) for k in options["ks"]]


def _names(record: RunRecord) -> dict[str, str]:
    return {f"knn-{k}": f"the {name_of_classifier(f'knn-{k}')}" for k in _ks(record)} | {"probe": "the linear probe"}
