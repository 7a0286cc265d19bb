"""What `vitlens compare` tells, from its folder alone."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from vitlens.attribution.registry import ATTRIBUTIONS
from vitlens.commands.scaffold.budgets import budget_words
from vitlens.commands.scaffold.describe import data_words
from vitlens.files import RunRecord
from vitlens.runs import compare_words as words
from vitlens.runs.compare_harder import level_words
from vitlens.runs.compare_keep import word_of
from vitlens.runs.compare_panels import FOLDER
from vitlens.runs.compare_sheets import A_SHEET, aliases_of, cell_counts, cell_names, sheet_images
from vitlens.runs.sections import Cell, Section, Table, in_words, metrics, number
from vitlens.uncertainty import Side, apart

_ROWS = 12  # of a table in the report; results.json has them all


def tell(record: RunRecord) -> list[Section]:
    """Summary, maps side by side, errors taken apart, failures, harder images, shape or texture, limits."""
    aliases, found = aliases_of(record), metrics(record)
    options: Any = record.config["options"]
    titles = [ATTRIBUTIONS[method].title for method in options["method"]]
    summary = [
        " ".join(data_words(record)),
        *budget_words(record),
        *_family_words(record),
        *words.verdict(found, aliases),
        *words.cells(cell_counts(record), cell_names(aliases)),
        *words.looking(found, aliases, titles),
        "Brackets hold 95 % intervals and the number of images.",
    ]
    sections = [
        Section("Summary", tuple(summary)),
        _side_by_side(record, found, aliases),
        _errors(record, found, aliases),
        _failures(record),
        *_harder(record, found, aliases),
        *_bias(record, found, aliases),
    ]
    return [*sections, Section("Limits", tuple(_limits(record)))]


def _family_words(record: RunRecord) -> Iterator[str]:
    models: Any = record.config["models"]
    families = [str(model["family"]) for model in models]
    if families[0] == families[1]:
        kind = {"vit": "vision transformers", "cnn": "CNNs", "windowed": "windowed transformers"}.get(families[0])
        yield f"Both models are {kind or 'of one family'}: what differs here is not ViT against CNN."


def _side_by_side(record: RunRecord, found: Mapping[str, Any], aliases: tuple[str, str]) -> Section:
    panels = next((len(rows) for sheet, rows in sheet_images(record) if sheet == "panels"), 0)
    figures = [f"panels_{index + 1}" for index in range(-(-panels // A_SHEET))]
    if len(record.arrays("looks")["agreement"]):
        figures.insert(0, "looks")
    lines = [f"The {panels} panels lie one by one in `{FOLDER}/`, in this order."] if panels else []
    for alias in aliases:
        usable = found[f"maps/usable/{alias}"]
        if usable.value < 1:
            lines.append(
                f"**{round((1 - usable.value) * (usable.n or 0))} of {usable.n} maps of {alias} are constant, without "
                "anything positive or not finite** and are left out of all numbers of maps."
            )
    return Section("Side by side", tuple(lines), (), tuple(figures))


def _errors(record: RunRecord, found: Mapping[str, Any], aliases: tuple[str, str]) -> Section:
    names = cell_names(aliases)
    counts = cell_counts(record)
    rows: list[dict[str, Cell]] = [
        {"images": names[cell], "n": count, "share": in_words(found[f"cell/{word_of(cell)}"], with_n=False)}
        for cell, count in counts.items()
    ]
    pairs: Any = record.table("confusions")
    confused: list[dict[str, Cell]] = [
        {
            "truth": str(row["truth"]),
            "taken for": str(row["prediction"]),
            aliases[0]: row["first"],
            aliases[1]: row["second"],
        }
        for row in pairs[:_ROWS]
    ]
    more = f" (the {_ROWS} most frequent of {len(pairs)})" if len(pairs) > _ROWS else ""
    numbered = {str(row["number"]) for row in record.table("by_number")}
    sheets = [f"examples_{word_of(sheet)}" for sheet, _ in sheet_images(record) if sheet != "panels"]
    figures = ["errors", *(["errors_by_number"] if _has_courses(record, numbered) else []), "calibration", *sheets]
    calibrated = "; ".join(
        f"{alias} by {number(100 * found[f'calibration_error/{alias}'].value, 1)} points" for alias in aliases
    )
    return Section(
        "Errors taken apart",
        (f"Confidence is off on average (ECE, 15 equal bins; no interval, as binning biases it): {calibrated}.",),
        (Table("Who is wrong", rows), Table(f"Classes confused, images of each model{more}", confused)),
        tuple(figures),
    )


def _has_courses(record: RunRecord, names: set[str]) -> bool:
    rows = record.table("by_number")
    return any(sum(row["number"] == name for row in rows) > 1 for name in names)


_KINDS = {"image": "What the images are like", "attention": "Attention (means over all heads)", "map": "The maps"}


def _failures(record: RunRecord) -> Section:
    rows = record.table("separations")
    lines = []
    for kind, title in _KINDS.items():
        said = list(words.failures(rows, kind))
        if said:
            lines.append(f"**{title}.** {' '.join(said)}")
    if not rows:
        return Section("Failures against successes", ("There are no failures, or no successes, to compare.",))
    tested = sum(row["p"] is not None for row in rows)
    if tested:
        lines.append(
            f"All {tested} tests together are corrected by Holm; area: the chance that a failure has the greater value "
            "(DeLong 1988), 0.5 where the number says nothing."
        )
    return Section("Failures against successes", tuple(lines), (), ("failures",))


def _harder(record: RunRecord, found: Mapping[str, Any], aliases: tuple[str, str]) -> Iterator[Section]:
    tables: Any = record.results["tables"]
    rows: Sequence[Mapping[str, Any]] = tables.get("robustness", [])
    if not rows:
        return
    kinds = list(dict.fromkeys(str(row["kind"]) for row in rows))
    lines = []
    for kind in kinds:
        levels = list(dict.fromkeys(float(row["level"]) for row in rows if row["kind"] == kind))
        apart = [level for level in levels if _better(found, aliases, kind, level)]
        if apart:
            better = "; ".join(
                f"{_better(found, aliases, kind, level)} at {level_words(kind, level)}" for level in apart
            )
            lines.append(f"{kind}: the intervals are apart for {better}.")
        else:
            lines.append(f"{kind}: at no level are the two models' intervals apart.")
    table: list[dict[str, Cell]] = [
        {"made harder by": kind, "level (as in the figure)": level_words(kind, level),
         **{alias: in_words(found[f"hardened_accuracy/{alias}/{kind}/{level:g}"], with_n=False) for alias in aliases}}
        for kind in kinds
        for level in dict.fromkeys(float(row["level"]) for row in rows if row["kind"] == kind)
    ]  # fmt: skip
    yield Section("Images made harder", tuple(lines), (Table("Accuracy by level", table),), ("robustness",))


def _better(found: Mapping[str, Any], aliases: tuple[str, str], kind: str, level: float) -> str | None:
    """Which model is ahead at a level, where the intervals are apart."""
    one, two = (found[f"hardened_accuracy/{alias}/{kind}/{level:g}"] for alias in aliases)
    return {Side.ABOVE: aliases[0], Side.BELOW: aliases[1]}.get(apart(one, two))


def _bias(record: RunRecord, found: Mapping[str, Any], aliases: tuple[str, str]) -> Iterator[Section]:
    rows: Any = record.table("shape_bias")
    if not rows:
        return
    table: list[dict[str, Cell]] = [
        {
            "model": alias,
            "shape bias": in_words(found[f"shape_bias/{alias}"]) if f"shape_bias/{alias}" in found else None,
            "answers by shape": in_words(found[f"shape_answers/{alias}"]),
            "by texture": in_words(found[f"texture_answers/{alias}"]),
        }
        for alias in aliases
    ]
    notes = dict.fromkeys(str(row["note"]) for row in rows if row["note"])
    drawn = any(f"shape_bias/{alias}" in found for alias in aliases)
    lines = (
        "Shape bias is the share of answers by shape among those by shape or by texture (Geirhos 2019): 100 % goes by "
        "shape alone, 0 % by texture alone.",
        *notes,
    )
    yield Section(
        "Shape or texture", lines, (Table("Answers to cue conflicts", table),), ("shape_bias",) if drawn else ()
    )


def _limits(record: RunRecord) -> Iterator[str]:
    options: Any = record.config["options"]
    target = {"predicted": "each model's own prediction", "true": "the true class"}.get(
        str(options["target"]), f"the class {options['target']}"
    )
    yield (
        f"Maps ask about {target}. Negative values (what speaks against it) are left out of shares, of sheets and of "
        "where a model looks; ranks are of the raw maps. Two methods differ for reasons of their own: a difference "
        "between maps is one of models only as far as the methods can be trusted (vitlens explain --verify)."
    )
    yield (
        "The intervals say how much the numbers would move with other images of the same kind; not how much with "
        "another training run, and nothing about images of another kind."
    )
    yield "What tells failures from successes need not cause them."
