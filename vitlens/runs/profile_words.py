"""Sentences about cost, made from the numbers."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from vitlens.analysis.cost.flops import crossover
from vitlens.analysis.cost.parts import PRODUCTS
from vitlens.figures.profile import in_thousands
from vitlens.files import RunRecord
from vitlens.runs.sections import in_words, metrics, number
from vitlens.uncertainty import Side, apart

Row = Mapping[str, Any]

RESTLESS: Final = 1.5  # upper over lower quartile: passes of one batch size differ little on a quiet machine


def untrained_words(models: Sequence[Row]) -> Iterator[str]:
    """Which models have random weights, and why that does not matter."""
    found = [f"`{row['model']}`" for row in models if row["untrained"]]
    if found:
        yield f"Untrained: {', '.join(found)}; cost does not depend on the weights."


def model_words(record: RunRecord, models: Sequence[Row]) -> Iterator[str]:
    """For each model its size, its FLOPs, and what attention has of them."""
    parts: Sequence[Row] = record.table("parts")
    for row in models:
        mine = {str(part["part"]): int(part["flops"]) for part in parts if part["model"] == row["model"]}
        height, width = row["size"]
        words = (
            f"`{row['model']}` has {row['parameters']:,} parameters and takes {in_thousands(row['flops'])}FLOPs for an "
            f"image of {height}x{width} px"
        )
        if not mine.get(PRODUCTS):
            yield f"{words}; it has no attention." if row["family"] == "cnn" else f"{words}."
            continue
        share = 100 * mine[PRODUCTS] / row["flops"]
        words += f", {number(share)} % of them for the products of attention"
        if row["one_sequence"]:
            where = crossover(mine, int(row["tokens"]))
            words += (
                f"; with its {row['tokens']:,} tokens it is "
                f"{'below' if row['tokens'] < where else 'above'} the {where:,.0f} from which these products take more "
                "than the projections and MLPs"
            )
        yield f"{words}."


def speed_words(record: RunRecord, models: Sequence[Row]) -> Iterator[str]:
    """Who is faster at one image, and at the best batch size of each."""
    found = metrics(record)
    if len(models) < 2:
        return
    rows: Sequence[Row] = record.table("speed")
    aliases = [str(row["model"]) for row in models]
    size = min(int(row["images"]) for row in rows)
    times = {alias: found[f"latency/{alias}/{size}"] for alias in aliases if f"latency/{alias}/{size}" in found}
    if len(times) > 1:
        first, last = min(times, key=lambda alias: times[alias].value), max(times, key=lambda alias: times[alias].value)
        ratio = times[last].value / times[first].value
        images = "one image" if size == 1 else f"a batch of {size}"
        words = (
            f"For {images} `{first}` has the lowest median, {in_words(times[first])}; that of `{last}` is "
            f"{number(ratio)} times as high, {in_words(times[last])}"
        )
        yield (
            f"{words}."
            if apart(times[first], times[last]) is Side.BELOW
            else f"{words}, but their intervals do not stand apart."
        )
    best = [best_rate(rows, alias) for alias in aliases]
    listed = "; ".join(f"`{alias}` {rate:,.0f} images/s in batches of {batch}" for alias, rate, batch in best)
    yield f"The greatest throughput that was seen: {listed}."


def best_rate(rows: Sequence[Row], alias: str) -> tuple[str, float, int]:
    """The model, its greatest throughput in images per second, and the batch size of that."""
    rate, batch = max((row["images"] / row["median"], int(row["images"])) for row in rows if row["model"] == alias)
    return alias, float(rate), batch


def exponent_words(fits: Sequence[Row]) -> Iterator[str]:
    """For each model how latency, FLOPs and attention products grow, and over which range."""
    for model in dict.fromkeys(str(row["model"]) for row in fits):
        of = {str(row["cost"]): row for row in fits if row["model"] == model}
        span = of["flops"]
        words = (
            f"From {span['tokens_from']:,} to {span['tokens_to']:,} tokens the latency of `{model}` grows with the "
            f"power {power_words(of['latency'])}, its FLOPs with {power_words(of['flops'])}"
        )
        if "products" in of:
            words += f", the products of attention with {power_words(of['products'])}"
        yield f"{words}."


def power_words(row: Row) -> str:
    """ "1.10 (1.04 to 1.15)"."""
    return f"{row['value']:.2f}" + ("" if row["low"] is None else f" ({row['low']:.2f} to {row['high']:.2f})")


def limit_words(record: RunRecord) -> Iterator[str]:
    """What the numbers do not say."""
    machine: Any = record.config["machine"]
    threads = machine["threads"]
    yield (
        f"Times hold for this machine ({machine['name']}, {threads} thread{'s' if threads != 1 else ''}, "
        f"{machine['arithmetic']}) and whatever else it did meanwhile; the order of models may be another elsewhere."
    )
    rows: Sequence[Row] = record.table("speed")
    restless = sum(row["high"] > RESTLESS * row["low"] for row in rows)
    if restless:
        yield (
            f"At {restless} of {len(rows)} batch sizes the upper quartile is more than {RESTLESS} times the lower: "
            "something else ran on this machine. Measure again when it is quiet before comparing times."
        )
    yield (
        "Intervals of medians are those of order statistics and take passes as independent, which passes after one "
        "another are not quite. Reading, decoding and resizing of images are not in the times, normalisation is."
    )
    yield (
        "FLOPs do not tell time: small products keep a processor waiting for memory, and what is not counted (norms, "
        "softmax, activations) takes time too. For FLOPs, which are exact, the interval of an exponent says how far "
        "the curve is from a power law."
    )
    yield "Tokens of a windowed model or a CNN are the positions that its first block works on."
