"""What `vitlens profile` draws, from its folder alone."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from vitlens.analysis.cost.flops import CONVENTION
from vitlens.figures.growth import Growth, growth_by_tokens
from vitlens.figures.profile import Speed, cost_by_part, speed_by_batch
from vitlens.files import RunRecord
from vitlens.runs.report import Drawn

Row = Mapping[str, Any]
MOST = 6  # curves that one figure tells apart


def draw(record: RunRecord) -> Iterator[Drawn]:
    """Where the cost is, how fast by batch size, and how it grows with tokens."""
    aliases = [str(row["model"]) for row in record.table("models")]
    parts: Sequence[Row] = record.table("parts")
    counted = {
        column: {
            alias: {str(row["part"]): int(row[column]) for row in parts if row["model"] == alias} for alias in aliases
        }
        for column in ("parameters", "flops")
    }
    yield Drawn(
        "parts",
        cost_by_part(parameters=counted["parameters"], flops=counted["flops"]),
        f"Each bar is one model, of 100 % in its own unit: bars do not compare totals, the numbers beside them do. "
        f"{CONVENTION}",
    )
    yield Drawn("speed", speed_by_batch(speeds=_speeds(record, aliases[:MOST])), _speed_caption(record, aliases))
    for sweep, name in (("patch size", "growth_patches"), ("image size", "growth")):
        growths = list(_growths(record, sweep))
        if growths:
            yield Drawn(name, growth_by_tokens(growths=growths[:MOST], title=_TITLES[sweep]), _growth_caption(growths))


_TITLES = {
    "image size": "How cost grows with the number of tokens, images made larger",
    "patch size": "How cost grows with the number of tokens, patches made smaller",
}


def _speeds(record: RunRecord, aliases: Sequence[str]) -> list[Speed]:
    rows: Sequence[Row] = record.table("speed")
    speeds = []
    for alias in aliases:
        mine = sorted((row for row in rows if row["model"] == alias), key=lambda row: row["images"])
        columns = {name: [float(row[name]) for row in mine] for name in ("low", "median", "high")}
        if mine:
            speeds.append(Speed(alias, [int(row["images"]) for row in mine], **columns))
    return speeds


def _speed_caption(record: RunRecord, aliases: Sequence[str]) -> str:
    rows: Sequence[Row] = record.table("speed")
    fewest = min(int(row["repeats"]) for row in rows)
    more = f" The first {MOST} of {len(aliases)} models." if len(aliases) > MOST else ""
    return (
        f"At least {fewest} passes at each batch size after warming up, the models in turns. Where the right curves "
        f"are flat, larger batches gain nothing.{more}"
    )


def _growths(record: RunRecord, sweep: str) -> Iterator[Growth]:
    points: Sequence[Row] = [row for row in record.table("tokens") if row["sweep"] == sweep]
    fits: Sequence[Row] = [row for row in record.table("exponents") if row["sweep"] == sweep]
    for model in dict.fromkeys(str(row["model"]) for row in fits):
        mine = sorted((row for row in points if row["model"] == model), key=lambda row: row["tokens"])
        columns = {
            name: [float(row[name]) for row in mine]
            for name in ("tokens", "low", "median", "high", "flops", "products")
        }
        powers = {str(row["cost"]): float(row["value"]) for row in fits if row["model"] == model}
        yield Growth(model, **columns, exponents=powers)


def _growth_caption(growths: Sequence[Growth]) -> str:
    more = f" The first {MOST} of {len(growths)} models." if len(growths) > MOST else ""
    return (
        "Each mark is the model made for that number of tokens. On these axes a power law is a straight line and its "
        "exponent the slope; marks that bend away from their line have no one exponent, and the one given holds on "
        f"the whole range only as a mean.{more}"
    )
