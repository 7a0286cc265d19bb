"""What `vitlens profile` tells, from its folder alone."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from vitlens.analysis.cost.flops import CONVENTION
from vitlens.analysis.cost.parts import PARTS, STAGE
from vitlens.figures.profile import in_thousands
from vitlens.files import RunRecord
from vitlens.runs.profile_words import (
    best_rate,
    exponent_words,
    limit_words,
    model_words,
    power_words,
    speed_words,
    untrained_words,
)
from vitlens.runs.sections import Cell, Section, Table, metrics, number

Row = Mapping[str, Any]


def tell(record: RunRecord) -> list[Section]:
    """The models side by side, then parts, speed, memory and growth."""
    models: Sequence[Row] = record.table("models")
    summary = Section(
        "What was found",
        (*untrained_words(models), *model_words(record, models), *speed_words(record, models)),
        (Table("Side by side, for one image unless said otherwise", _side_by_side(record, models)),),
        ("parts",),
    )
    return [
        summary,
        _parts(record, models),
        _speed(record, models),
        _memory(record, models),
        *_growth(record, models),
        Section("Limits", tuple(limit_words(record))),
    ]


def _side_by_side(record: RunRecord, models: Sequence[Row]) -> list[dict[str, Cell]]:
    found, speed = metrics(record), record.table("speed")
    size = min(int(str(row["images"])) for row in speed)
    rows: list[dict[str, Cell]] = []
    for row in models:
        end = f"/{row['model']}" if len(models) > 1 else ""
        latency = found.get(f"latency{end}/{size}")
        _, rate, batch = best_rate(speed, str(row["model"]))
        rows.append(
            {
                "model": str(row["model"]),
                "family": str(row["family"]),
                "input (px)": "x".join(map(str, row["size"])),
                "tokens": int(row["tokens"]),
                "parameters": int(row["parameters"]),
                "FLOPs": f"{in_thousands(row['flops'])}".strip(),
                f"latency, batch of {size} (ms)": None if latency is None else number(latency.value),
                "best images/s": f"{rate:,.0f} (batch of {batch})",
                "kept for training (MB)": number(row["training_bytes"] / 1e6),
                "inference peak (MB)": number(row["inference_bytes"] / 1e6),
            }
        )
    return rows


def _parts(record: RunRecord, models: Sequence[Row]) -> Section:
    rows: list[dict[str, Cell]] = []
    for part in record.table("parts"):
        (model,) = (row for row in models if row["model"] == part["model"])
        rows.append(
            {
                "model": str(part["model"]),
                "part": str(part["part"]),
                "parameters": _count(part["parameters"]),
                "of all": f"{100 * _count(part['parameters']) / model['parameters']:.1f} %",
                "FLOPs": _count(part["flops"]),
                "of all FLOPs": f"{100 * _count(part['flops']) / model['flops']:.1f} %",
            }
        )
    known = {str(part["part"]) for part in record.table("parts")}
    words = {STAGE if part.startswith(f"{STAGE} ") else part for part in known}
    meanings: list[dict[str, Cell]] = [
        {"part": part, "is": meaning} for part, meaning in PARTS.items() if part in words
    ]
    checked = [f"`{row['model']}`" for row in models if row["by_formula"]]
    said = (
        (f"The counter's FLOPs equal the formula's (8 N d² + 4 N² d + 4 N d h a block) for {', '.join(checked)}.",)
        if checked
        else ()
    )
    tables = (Table("Parameters and FLOPs of one image, by part", rows), Table("What the parts are", meanings))
    return Section("Where parameters and FLOPs are", (CONVENTION, *said), tables)


def _count(value: object) -> int:
    return int(str(value))


def _speed(record: RunRecord, models: Sequence[Row]) -> Section:
    rows: list[dict[str, Cell]] = []
    for row in record.table("speed"):
        low, median, high = (1000 * float(str(row[name])) for name in ("low", "median", "high"))
        cells: dict[str, Cell] = {
            "model": str(row["model"]),
            "batch": _count(row["images"]),
            "median (ms)": number(median),
            "quartiles (ms)": f"{number(low)} to {number(high)}",
            "images/s": f"{1000 * _count(row['images']) / median:,.0f}",
            "passes": _count(row["repeats"]),
        }
        if row["device_bytes"] is not None:
            cells["device peak (MB)"] = number(_count(row["device_bytes"]) / 1e6)
        rows.append(cells)
    options: Any = record.config["options"]
    said = []
    stopped = [row for row in models if _last(record, str(row["model"])) < max(options["batch_sizes"])]
    if options["bounded"] and stopped:
        names = ", ".join(f"`{row['model']}` at {_last(record, str(row['model']))}" for row in stopped)
        said.append(
            f"No larger batch was tried once a pass took more than {number(options['longest'])} s, or the device had "
            f"no room for it: {names}; --batch-sizes asks for others."
        )
    return Section("How fast", tuple(said), (Table("Latency and throughput by batch size", rows),), ("speed",))


def _last(record: RunRecord, alias: str) -> int:
    return max(_count(row["images"]) for row in record.table("speed") if row["model"] == alias)


def _memory(record: RunRecord, models: Sequence[Row]) -> Section:
    rows: list[dict[str, Cell]] = [
        {
            "model": str(row["model"]),
            "parameters, fp32 (MB)": number(4 * row["parameters"] / 1e6),
            "kept for the backward pass, an image (MB)": number(row["training_bytes"] / 1e6),
            "most at once in inference, one image (MB)": number(row["inference_bytes"] / 1e6),
        }
        for row in models
    ]
    said = [
        "What autograd keeps of a forward pass until the backward pass, each storage once, parameters not counted; it "
        "grows with the batch. A training step needs beside it the parameters, their gradients and the optimiser's "
        "state (AdamW: twice the parameters)."
    ]
    peak = metrics(record).get("process_peak")
    if peak is not None:
        said.append(
            f"The whole process had at most {number(peak.value / 1e6)} MB of memory, Python, its libraries and all "
            "models together."
        )
    machine: Any = record.config["machine"]
    if machine["arithmetic"] == "bf16":
        said.append("In bf16 autograd also keeps the weights' casts; they are counted.")
    return Section("Memory", tuple(said), (Table("Activations", rows),))


def _growth(record: RunRecord, models: Sequence[Row]) -> Iterator[Section]:
    fits: Sequence[Row] = record.table("exponents")
    figures = {"patch size": "growth_patches", "image size": "growth"}
    for sweep in (sweep for sweep in figures if any(row["sweep"] == sweep for row in fits)):
        mine = [row for row in fits if row["sweep"] == sweep]
        points: Sequence[Row] = [row for row in record.table("tokens") if row["sweep"] == sweep]
        how = "made larger" if sweep == "image size" else "cut into smaller patches"
        said = [
            f"The same models with images {how}, made anew for each {sweep}, positions and all; "
            f"{_batch(points)} at a time. The exponent is that of cost = c · tokens^k, by regression of the logarithms "
            "over the range in the table and no further.",
            *exponent_words(mine),
        ]
        if any(row["family"] == "windowed" for row in models):
            said.append(
                "A windowed model pads maps to whole windows, or takes smaller windows, as each size needs: its curve "
                "has steps."
            )
        left = [row for row in record.table("left_out") if row["sweep"] == sweep]
        said += [f"Left out, `{row['model']}` at {_px(row['size'])} px: {row['reason']}." for row in left]
        tables = (Table("Exponents, with Student's 95 % interval", [_fit(row) for row in mine]), _points(points))
        yield Section(f"How cost grows with tokens: {sweep}", tuple(said), tables, (figures[sweep],))


def _batch(points: Sequence[Row]) -> str:
    images = int(points[0]["images"])
    return "one image" if images == 1 else f"{images} images"


_COSTS = {"latency": "latency", "flops": "FLOPs", "products": "FLOPs of attention products"}


def _fit(row: Row) -> dict[str, Cell]:
    return {
        "model": str(row["model"]),
        "cost": _COSTS[str(row["cost"])],
        "exponent": power_words(row),
        "points": int(row["n"]),
        "from (tokens)": int(row["tokens_from"]),
        "to (tokens)": int(row["tokens_to"]),
    }


def _points(points: Sequence[Row]) -> Table:
    rows: list[dict[str, Cell]] = [
        {
            "model": str(row["model"]),
            "image (px)": _px(row["size"]),
            "tokens": int(row["tokens"]),
            "latency (ms)": number(1000 * row["median"]),
            "quartiles (ms)": f"{number(1000 * row['low'])} to {number(1000 * row['high'])}",
            "FLOPs": f"{in_thousands(row['flops'])}".strip(),
            "of attention products": f"{100 * row['products'] / row['flops']:.1f} %",
        }
        for row in points
    ]
    return Table("What was measured; latency: the median of a pass", rows)


def _px(size: Any) -> str:
    height, width = size
    return f"{height}x{width}"
