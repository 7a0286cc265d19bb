"""Sentences about features, made from their numbers."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from vitlens.runs.sections import in_words, number
from vitlens.uncertainty import Estimate

Found = Mapping[str, Estimate]
Row = Mapping[str, object]

_POOLS: Final = {
    "cls": "the CLS token",
    "mean": "the mean of the patches",
    "cls+mean": "the CLS token and the mean of the patches, one behind the other",
}
_MOSTLY: Final = 0.9  # of the last layer's accuracy


def reading(row: Row) -> str:
    """How one model's features were read."""
    kind = "block" if row["kind"] == "block" else "stage"
    pool = _POOLS[str(row["pool"])] if kind == "block" or row["pool"] != "mean" else "the mean of the map's cells"
    norm = f", behind the model's final norm (`{row['norm']}`)" if row["norm"] else ""
    count = int(str(row["layers"]))
    return (
        f"`{row['model']}`: an image's vector is {pool}{norm}, at each of {count} {kind}s; {row['dim']} numbers in the "
        "last."
    )


def knowledge(found: Found, alias: str, end: str, ks: Sequence[int], bank: int) -> Iterator[str]:
    """How often the last layer's neighbours and probe are right, beside the model itself."""
    named = {f"probe_accuracy{end}": "the linear probe"}
    for k in sorted(ks, reverse=True):
        named[f"knn_accuracy{end}/{k}"] = "the nearest alone" if k == 1 else f"the {k} nearest"
    parts = [f"{who} {in_words(found[name], with_n=False)}" for name, who in named.items() if name in found]
    own = found.get(f"accuracy{end}")
    if not parts:
        if own is not None:
            yield f"`{alias}` itself classifies {in_words(own)} of them rightly."
        return
    count = found[next(name for name in named if name in found)].n
    itself = "" if own is None else f"; by the model itself {in_words(own, with_n=False)}"
    yield (
        f"Classified rightly by the features of `{alias}`'s last layer, on {count:,} test images with {bank:,} "
        f"training images: by {', '.join(parts)}{itself}."
    )


def over_depth(rows: Sequence[Row], alias: str, classifier: str, name: str) -> Iterator[str]:
    """Where on the way what a classifier can read comes about."""
    mine = [row for row in rows if row["model"] == alias and row["classifier"] == classifier]
    mine = [row for row in mine if row.get("weighting", "dino") == "dino"]
    if len(mine) < 2:
        return
    first, last = mine[0], mine[-1]
    best = max(mine, key=lambda row: float(str(row["accuracy"])))
    enough = next(row for row in mine if _value(row) >= _MOSTLY * _value(last))
    where = "highest there" if best is last else f"highest in {best['title']} with {_share(best)}"
    yield (
        f"`{alias}`, {name}: from {_share(first)} in {first['title']} to {_share(last)} in {last['title']}, {where}; "
        f"nine tenths of the last layer's accuracy are reached in {enough['title']}."
    )


def compared(rows: Sequence[Row], name_of: Mapping[str, str], *, tested: int) -> Iterator[str]:
    """Which model's features know more, by each classifier; tested: comparisons that p is corrected for."""
    for row in rows:
        gap = Estimate(_number(row, "difference"), _end(row, "low"), _end(row, "high"), int(str(row["n"])), "points")
        p = _number(row, "p_holm")
        better = row["first"] if gap.value > 0 else row["second"]
        said = f"`{better}`'s features know more" if p <= 0.05 else "these images do not show whose features know more"
        tests = f", corrected for {tested} tests" if tested > 1 else ""
        yield (
            f"By {name_of[str(row['classifier'])]}, `{row['first']}` minus `{row['second']}`: {in_words(gap)}; {said} "
            f"(McNemar's exact test{tests}, p = {number(p)})."
        )


def space(rows: Sequence[Row], alias: str) -> Iterator[str]:
    """How far the maps of one model can be trusted."""
    mine = [row for row in rows if row["model"] == alias]
    names = {"tsne": "t-SNE", "pca": "PCA"}
    listed = "; ".join(
        f"{names[str(row['method'])]} of {int(str(row['n'])):,} {row['of']}: {_number(row, 'trustworthiness'):.3f}"
        for row in mine
    )
    if listed:
        yield f"Trustworthiness of the maps of `{alias}` (of {mine[0]['neighbours']} nearest): {listed}."


def alike(rows: Sequence[Row]) -> Iterator[str]:
    """How alike layers are, within and between models."""
    for row in rows:
        if row["first"] == row["second"]:
            if row["first_last"] is None or row["rank_first_last"] is None:
                yield f"Some layer of `{row['first']}` makes the same of all images: there is nothing to compare."
                continue
            yield (
                f"Within `{row['first']}` the first and the last layer have a CKA of {_with_ends(row, 'first_last')}; "
                f"the rank correlation of their distances between images is {_number(row, 'rank_first_last'):.2f}."
            )
        elif row.get("mean") is not None and row["last_last"] is not None:
            down, across = (int(str(place)) + 1 for place in _pair(row["most_layers"]))
            yield (
                f"Between `{row['first']}` and `{row['second']}` the last layers have a CKA of "
                f"{_with_ends(row, 'last_last')}. The mean of all pairs of layers is {_number(row, 'mean'):.2f}; the "
                f"most alike, chosen afterwards, are layer {down} of the first and layer {across} of the second with "
                f"{_number(row, 'most'):.2f}."
            )


def retrieved(found: Found, alias: str, end: str, ks: Sequence[int]) -> Iterator[str]:
    """How many of the nearest images are of the same class."""
    parts = [
        f"of the {k} nearest {in_words(found[name], with_n=False)}"
        if k > 1
        else f"of the nearest {in_words(found[name])}"
        for k in ks
        if (name := f"retrieval_precision{end}/{k}") in found
    ]
    if parts:
        yield f"In the last layer of `{alias}`, on average {', '.join(parts)} are of the test image's class."


def worded(rows: Sequence[Row], alias: str) -> Iterator[str]:
    """What the wording of the prompt does to a model's accuracy."""
    mine = [row for row in rows if row["model"] == alias]
    if not mine:
        return
    whole, single = mine[0], mine[1:]
    n = int(str(whole["n"]))
    yield (
        f"Told nothing but the names of the classes, `{alias}` is right on {_share(whole)} of {n:,} test images with "
        f"the ensemble of {len(single)} template{'s' if len(single) > 1 else ''}."
    )
    if len(single) > 1:
        best, worst = max(single, key=_value), min(single, key=_value)
        apart = sum(_number(row, "p_holm") <= 0.05 for row in single)
        differ = "None" if not apart else str(apart)
        yield (
            f"One template alone gives from {_share(worst)} (“{worst['template']}”) to {_share(best)} "
            f"(“{best['template']}”): {number(100 * (_value(best) - _value(worst)), 1)} points by the wording alone, "
            f"best and worst being chosen afterwards. {differ} of the {len(single)} differ from the ensemble by "
            "more than chance explains (McNemar, Holm)."
        )


def _share(row: Row) -> str:
    return in_words(Estimate(_value(row), _number(row, "low"), _number(row, "high")), with_n=False)


def _with_ends(row: Row, name: str) -> str:
    """A similarity with its interval and its images: "0.76 (0.74 to 0.79, n = 450)"."""
    low, high = row.get(f"{name}_low"), row.get(f"{name}_high")
    ends = "" if low is None or high is None else f"{float(str(low)):.2f} to {float(str(high)):.2f}, "
    return f"{_number(row, name):.2f} ({ends}n = {int(str(row['images'])):,})"


def _value(row: Row) -> float:
    return _number(row, "accuracy")


def _number(row: Row, key: str) -> float:
    return float(str(row[key]))


def _end(row: Row, key: str) -> float | None:
    return None if row[key] is None else _number(row, key)


def _pair(value: object) -> tuple[object, object]:
    assert isinstance(value, Sequence)  # as it was written
    first, second = value
    return first, second
