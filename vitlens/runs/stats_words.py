"""Sentences about statistics, made from the numbers."""

from collections.abc import Iterator, Mapping, Sequence

from vitlens.report import in_words
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
    quarter = max(1, len(layers) // 4)
    depth = 1 + max(layer for layer, _ in shares)
    early = [share for layer, share in shares if layer < quarter]
    late = [share for layer, share in shares if layer >= depth - quarter]
    yield f"The mean attention distance over all heads of `{alias}` is {in_words(mean)}."
    which = ("the first layer", "the last layer")
    if quarter > 1:
        which = (f"the first {quarter} layers", f"the last {quarter}")
    for words, found in zip(which, (early, late)):
        mean_share = 100 * sum(found) / len(found)
        yield f"In {words}, {_local(found)}; their mean is {mean_share:.0f} % of what uniform attention gives."


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
