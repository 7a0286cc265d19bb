"""How cost grows with tokens: every model at several image sizes or patch sizes, and the exponents."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Final

from vitlens.analysis.cost.flops import exponent, flops_by_part
from vitlens.analysis.cost.latency import latencies
from vitlens.analysis.cost.parts import PRODUCTS
from vitlens.analysis.cost.profile import tokens_of
from vitlens.models.model import Model
from vitlens.runs.folder import RunFolder
from vitlens.runs.profile_models import Size, sized

_SWEPT: Final = {"cpu": 1, "other": 32}  # images at a time: a GPU is not busy with one


def growth(
    models: Sequence[Model], variants: Mapping[str, Sequence[str]], sizes: Sequence[Size], *, precision: str
) -> Iterator[dict[str, object]]:
    """Cost at each number of tokens: a row a point, of "patch size" or "image size"; or a size that did not run."""
    by_alias = {model.alias: model for model in models}
    several = {base: names for base, names in variants.items() if len(names) > 1}
    for base, names in several.items():
        for name in names:
            yield {"model": base, "sweep": "patch size", **_point(by_alias[name], precision)}
    swept = {name for names in several.values() for name in names}
    for model in models:
        if model.alias in swept and not sizes:
            continue
        for size, made in sized(model, sizes):
            row: dict[str, object] = {"model": model.alias, "sweep": "image size"}
            if isinstance(made, str):
                yield {**row, "size": list(size), "reason": made}
            else:
                yield {**row, **_point(made, precision)}


def _point(model: Model, precision: str) -> dict[str, object]:
    flops = flops_by_part(model)
    images = _SWEPT["cpu" if model.device.type == "cpu" else "other"]
    ((timed,),) = latencies([model], [images], precision=precision)
    return {
        "size": list(model.input_size),
        "tokens": tokens_of(model),
        "flops": sum(flops.values()),
        "products": flops.get(PRODUCTS, 0),
        **asdict(timed.latency),
    }


def keep_growth(folder: RunFolder, rows: Iterator[dict[str, object]], *, several: bool) -> None:
    """Write the tables tokens and exponents, the sizes that did not run, and the exponents as metrics."""
    found = list(rows)
    points = [row for row in found if "reason" not in row]
    folder.table("tokens", points)
    folder.table("left_out", [row for row in found if "reason" in row])
    fits: list[dict[str, object]] = []
    for model, sweep in dict.fromkeys((str(row["model"]), str(row["sweep"])) for row in points):
        mine = [row for row in points if (row["model"], row["sweep"]) == (model, sweep)]
        tokens = [float(str(row["tokens"])) for row in mine]
        if len(set(tokens)) < 2:
            continue
        for word, column in (("latency", "median"), ("flops", "flops"), ("products", "products")):
            costs = [float(str(row[column])) for row in mine]
            if min(costs) <= 0:  # no attention
                continue
            fit = exponent(tokens, costs)
            ends = {"tokens_from": int(min(tokens)), "tokens_to": int(max(tokens))}
            fits.append({"model": model, "sweep": sweep, "cost": word, **asdict(fit), **ends})
            middle = f"/{model}" if several else ""
            folder.metric(f"exponent{middle}/{sweep.replace(' ', '-')}/{word}", fit)
    folder.table("exponents", fits)
