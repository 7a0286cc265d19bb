"""Sentences about statistics, made from the numbers."""

from collections.abc import Iterator, Mapping, Sequence

from vitlens.runs.sections import in_words
from vitlens.uncertainty import Estimate

Row = Mapping[str, object]

LOCAL = 0.5  # of uniform attention's distance: a head below it looks nearby


def depth_words(alias: str, mean: Estimate | None, heads: Sequence[Row], layers: Sequence[Row]) -> Iterator[str]:
    """How far heads look, and how that changes from the first quarter of the layers to the last."""
    uniform = {row["layer"]: row["uniform_distance"] for row in layers}
    shares = [
        (int(str(row["layer"])), float(str(row["distance"])) / float(str(uniform[row["layer"]])))
        for row in heads
        if row.get("distance") is not None and uniform[row["layer"]]
    ]
    if mean is None or not shares:
        yield f"`{alias}` has no layer in which patches look at patches, so there is no attention distance."
        return
    placed = sorted({layer for layer, _ in shares})  # MaxViT's windows and SigLIP's pooling have no distance
    quarter = max(1, len(placed) // 4)
    yield f"The mean attention distance over all heads of `{alias}` is {in_words(mean)}."
    of = "" if len(placed) == len(layers) else f" of the {len(placed)} layers that have a distance"
    ends = (("first", placed[:quarter]), ("last", placed[-quarter:]))
    for word, chosen in ends:
        found = [share for layer, share in shares if layer in chosen]
        which = f"the {word} {quarter}{of or ' layers'}" if quarter > 1 else f"the {word}{of or ' layer'}"
        mean_share = 100 * sum(found) / len(found)
        yield f"In {which}, {_local(found)}; their mean is {mean_share:.0f} % of what uniform attention gives."


def _local(shares: Sequence[float]) -> str:
    count = sum(share <= LOCAL for share in shares)
    return f"{count} of {len(shares)} heads look{'s' if count == 1 else ''} less far than half of uniform attention"


def token_words(alias: str, layers: Sequence[Row]) -> Iterator[str]:
    """Whether some tokens outgrow the others."""
    found = [row for row in layers if row.get("greatest_norm") is not None and row.get("token_norm")]
    if not found:
        return
    ratios = [float(str(row["greatest_norm"])) / float(str(row["token_norm"])) for row in found]
    ratio, block = max(zip(ratios, (int(str(row["layer"])) + 1 for row in found)))
    most, where = max((float(str(row["high_norm_patches"])), int(str(row["layer"])) + 1) for row in found)
    yield (
        f"The longest token of an image of `{alias}` is at most {ratio:.1f} times the median one (means over images, "
        f"after block {block}); at most {most:.1f} patches an image are of high norm (after block {where})."
    )


def in_ranges(numbers: Sequence[int]) -> str:
    """Layers in rising order as words: "layer 3", "layers 1 to 18 and 20"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    parts = [f"{run[0]} to {run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs]
    listed = " and ".join(filter(None, (", ".join(parts[:-1]), parts[-1])))
    return f"layer{'' if len(numbers) == 1 else 's'} {listed}"
