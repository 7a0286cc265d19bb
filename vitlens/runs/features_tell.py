"""What `vitlens features` tells, from its folder alone."""

from collections.abc import Iterator
from typing import Any

from vitlens.commands.scaffold.describe import data_words
from vitlens.files import RunRecord
from vitlens.runs import features_words as words
from vitlens.runs.features_record import (
    ROWS,
    aliases_of,
    has_matches,
    heads_figures,
    name_of_classifier,
    neighbours_asked,
    rows_of,
)
from vitlens.runs.features_tell_depth import depth_sections
from vitlens.runs.sections import Cell, Section, Table, metrics
from vitlens.uncertainty import Estimate


def tell(record: RunRecord) -> list[Section]:
    """Summary, accuracy over depth, similarity, the space, patches, neighbours, language, limits."""
    sections = [
        Section("What was found", tuple(_summary(record))),
        *depth_sections(record),
        *_similarity(record),
        *_space(record),
        *_patches(record),
        *_heads(record),
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
        yield from words.knowledge(found, alias, _end(record, alias), neighbours_asked(record), int(str(bank or 0)))
    pairs = rows_of(record, "pairs")
    first = [row for row in pairs if row["classifier"] in ("probe", f"knn-{max(neighbours_asked(record))}")]
    yield from words.compared(first, _names(record), tested=len(pairs))
    yield from _rows_said(
        record, "similarity", lambda rows: words.alike([row for row in rows if row["first"] != row["second"]])
    )
    for alias in aliases_of(record):
        yield from _rows_said(record, "templates", lambda rows, alias=alias: words.worded(rows, alias))
    yield from (f"{row['note'][0].upper()}{row['note'][1:]}." for row in rows_of(record, "notes"))
    options: Any = record.config["options"]
    if options.get("show"):
        yield "Every picture below is one of those named with `--show`, or given with `--query`."
    yield "Brackets hold 95 % intervals and the number of images."


def _similarity(record: RunRecord) -> Iterator[Section]:
    rows = rows_of(record, "similarity")
    if rows:  # of two models the summary speaks
        within = [row for row in rows if row["first"] == row["second"]]
        yield Section("How alike the layers are", tuple(words.alike(within)), (), ("cka", "distances"))


def _space(record: RunRecord) -> Iterator[Section]:
    rows = rows_of(record, "space")
    said: list[str] = []
    figures: list[str] = []
    for alias in aliases_of(record):
        said += words.space(rows, alias)
        said += _without_tsne(record, rows, alias)
        figures += [f"space_{of}_{alias}" for of in ("images", "patches") if any(_is(row, alias, of) for row in rows)]
    if figures:
        yield Section("The space of the last layer", tuple(said), (), tuple(figures))


def _without_tsne(record: RunRecord, rows: list[dict[str, Any]], alias: str) -> Iterator[str]:
    """Why a map that would have been made by default is not there."""
    options: Any = record.config["options"]
    mine = [row for row in rows if _is(row, alias, "images")]
    if options.get("tsne") is False or not mine or any(row["method"] == "tsne" for row in mine):
        return
    perplexity = float(options["perplexity"])
    yield (
        f"There is no t-SNE of the images of `{alias}`: {mine[0]['n']} are too few for a perplexity of {perplexity:g}, "
        f"which takes more than {3 * perplexity:g} (`--perplexity`)."
    )


def _is(row: dict[str, Any], alias: str, of: str) -> bool:
    return bool(row["model"] == alias and row["of"] == of)


def _patches(record: RunRecord) -> Iterator[Section]:
    rows = rows_of(record, "patches")
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


def _heads(record: RunRecord) -> Iterator[Section]:
    figures = [name for alias in aliases_of(record) for name in heads_figures(record, alias)]
    if figures:
        yield Section("Where the last layer's heads look", (), (), tuple(figures))


def _neighbours(record: RunRecord) -> Iterator[Section]:
    aliases = [alias for alias in aliases_of(record) if record.has_arrays(f"retrieval-{alias}")]
    if aliases:
        said: list[str] = []
        for alias in aliases:
            said += words.retrieved(metrics(record), alias, _end(record, alias), neighbours_asked(record))
        yield Section("Nearest images", tuple(said), (), tuple(f"retrieval_{alias}" for alias in aliases))


def _language(record: RunRecord) -> Iterator[Section]:
    rows = rows_of(record, "templates")
    figures: list[str] = []
    said: list[str] = []
    for alias in aliases_of(record):
        if any(row["model"] == alias for row in rows):
            figures.append(f"templates_{alias}")
        if record.has_arrays(f"prompts-{alias}"):
            figures.append(f"prompts_{alias}")
    said += [
        f"`{row['model']}` was not asked by the names of the classes: {row['reason']}."
        for row in rows_of(record, "silent")
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
    tables = [Table("Zero-shot accuracy by template", table[:ROWS])] if table else []
    tables += [_similar(record, alias) for alias in aliases_of(record) if record.has_arrays(f"prompts-{alias}")]
    yield Section("Images and words", tuple(said), tuple(tables), tuple(figures))


def _similar(record: RunRecord, alias: str) -> Table:
    """How similar each image drawn is to each prompt."""
    found: Any = record.arrays(f"prompts-{alias}")
    prompts = [f"“{prompt}”" for prompt in found["prompts"]]
    rows: list[dict[str, Cell]] = [
        {"image": f"{place}: {name}", **{prompt: f"{value:.3f}" for prompt, value in zip(prompts, values)}}
        for place, (name, values) in enumerate(zip(found["names"], found["cosine"]), 1)
    ]
    return Table(f"Cosine of image and prompt in `{alias}`, from the top of the figure", rows)


def _gain(row: dict[str, Any]) -> Estimate | None:
    if row.get("gain") is None:
        return None
    return Estimate(float(row["gain"]), row["gain_low"], row["gain_high"], unit="points")


def _limits(record: RunRecord) -> Iterator[str]:
    if record.config.get("bank") is not None:
        yield (
            "What a probe or neighbours can read is there; whether the model uses it is another question (vitlens "
            "ablate). A probe is linear: what it cannot read may still be there."
        )
        yield (
            "The bank is the data's training part. A model that was trained on these very images knows them better "
            "than others: its neighbours are not those of unseen images, and its numbers do not compare with those of "
            "a model that never saw them."
        )
    yield "Intervals are over test images; they do not say how much another training run or another bank would change."
    yield "Principal components, t-SNE and CKA describe these images, and are dominated by what varies most among them."


def _rows_said(record: RunRecord, name: str, say: Any) -> Iterator[str]:
    rows = rows_of(record, name)
    if rows:
        yield from say(rows)


def _end(record: RunRecord, alias: str) -> str:
    return f"/{alias}" if len(aliases_of(record)) > 1 else ""


def _names(record: RunRecord) -> dict[str, str]:
    asked = [*(f"knn-{k}" for k in neighbours_asked(record)), "probe"]
    return {name: f"the {name_of_classifier(name)}" for name in asked}
