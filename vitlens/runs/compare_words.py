"""What the numbers of a comparison say, in words: each sentence is chosen by the intervals it reports."""

from collections.abc import Iterator, Mapping, Sequence

from vitlens.runs.sections import in_words, number
from vitlens.uncertainty import LEVEL, Estimate, Side, apart, beyond

Found = Mapping[str, Estimate]

_NOT_APART = "not shown to differ"


def verdict(found: Found, aliases: tuple[str, str]) -> Iterator[str]:
    """How often each is right, and whether one is better."""
    first, second = aliases
    rights = " and ".join(f"**{alias}** on {in_words(found[f'accuracy/{alias}'])}" for alias in aliases)
    yield f"Right are {rights}."
    gap, p = found[f"accuracy_difference/{first}/{second}"], found[f"mcnemar_p/{first}/{second}"].value
    if p > LEVEL:
        said = "these images do not show which is better"
    else:
        said = f"{first if gap.value > 0 else second} is better by more than chance explains"
    yield f"{first} minus {second}: {in_words(gap, with_n=False)}; {said} (McNemar's exact test, p = {number(p)})."


def cells(counts: Mapping[str, int], names: Mapping[str, str]) -> Iterator[str]:
    """How errors are shared."""
    n = sum(counts.values())
    parts = "; ".join(f"{names[cell]}: {count:,}" for cell, count in counts.items())
    yield f"Of {n:,} images, {parts}."
    alike, differently = counts["both wrong, alike"], counts["both wrong, differently"]
    both = alike + differently
    alone = counts["only first wrong"] + counts["only second wrong"]
    if both + alone:
        share = 100 * alone / (both + alone)
        shared = f"; where both are wrong, they give the same class on {alike} of {both}" if both else ""
        yield (
            f"{share:.0f} % of the images that some model gets wrong are wrong in one model alone ({alone} of "
            f"{both + alone}){shared}."
        )


def looking(found: Found, aliases: tuple[str, str], methods: Sequence[str]) -> Iterator[str]:
    """Where each looks, how concentrated, how much they share."""
    for alias, method in zip(aliases, methods):
        if f"look/half/{alias}" not in found:
            yield f"**No map of {method} of {alias} says anything**: all are constant, empty or not finite."
            continue
        half, central = found[f"look/half/{alias}"], found[f"look/central/{alias}"]
        yield (
            f"{alias} (by {method}): half of a map lies on {in_words(half)} of the image, an even map's on 50 %; "
            f"{in_words(central, with_n=False)} lies on the middle quarter, {_against(central, 0.25)}; its centre of "
            f"mass is on average {_place(found, alias)}."
        )
        yield from _on_object(found, alias)
    pair = "/".join(aliases)
    if f"half_difference/{pair}" in found:
        gap = found[f"half_difference/{pair}"]
        if beyond(gap, 0.0) is Side.UNDECIDED:
            yield f"Which of the two is the more concentrated is {_NOT_APART} ({in_words(gap)} of the image apart)."
        else:
            tighter, wider = aliases if gap.value < 0 else aliases[::-1]
            gap = gap if gap.value > 0 else Estimate(-gap.value, -(gap.high or 0), -(gap.low or 0), gap.n, gap.unit)
            more = in_words(gap)
            yield f"{tighter}'s maps are the more concentrated: half of {wider}'s needs {more} of the image more."
    yield from _shared(found, pair)


def _on_object(found: Found, alias: str) -> Iterator[str]:
    if f"look/inside/{alias}" not in found:
        return
    inside, area = found[f"look/inside/{alias}"], found["look/object-area"]
    relation = ("less than", "not shown to be more or less than", "more than")[1 + apart(inside, area).value]
    hits = found[f"localisation/pointing/{alias}"]
    yield (
        f"Of {alias}'s maps {in_words(inside, with_n=False)} lies on the object, {relation} the object's share of the "
        f"image ({in_words(area, with_n=False)}); the highest point is on it in {in_words(hits)}."
    )


def _shared(found: Found, pair: str) -> Iterator[str]:
    if f"agreement/spearman/{pair}" not in found:
        yield "No image has a map of both models that says anything, so there is no agreement to report."
        return
    rank, top, shared = (found[f"agreement/{name}/{pair}"] for name in ("spearman", "top", "shared"))
    side = {1: "the same places tend to be high in both", -1: "what is high in one tends to be low in the other"}
    said = side.get(beyond(rank, 0.0).value, "no relation between them is shown")
    chance = {1: "more than chance", -1: "less than chance", 0: "not shown to differ from what chance"}[
        beyond(top, 0.1).value
    ]
    yield (
        f"Their maps agree with a rank correlation of {in_words(rank)}: {said}. Of the top tenth of one map "
        f"{in_words(top, with_n=False)} is in the other's, {chance} (10 %) gives; {in_words(shared, with_n=False)} of "
        "the two maps' mass lies in the same places."
    )


def failures(rows: Sequence[Mapping[str, object]], kind: str) -> Iterator[str]:
    """Which numbers of one kind differ between failures and successes, model by model, after Holm's correction."""
    for alias in dict.fromkeys(str(row["model"]) for row in rows):
        mine = [row for row in rows if row["model"] == alias and row["kind"] == kind]
        tested = [row for row in mine if row["p_holm"] is not None]
        clear = [row for row in tested if float(str(row["p_holm"])) <= LEVEL]
        if not mine:
            continue
        if not tested:
            yield (f"{alias}: {mine[0]['failures']} failures and {mine[0]['successes']} successes are too few to test.")
        elif not clear:
            yield f"{alias}: none of {len(tested)} numbers is shown to differ between failures and successes."
        else:
            listed = "; ".join(_difference(row) for row in clear)
            yield f"{alias}, in failures against successes: {listed} ({len(clear)} of {len(tested)} numbers)."


def _difference(row: Mapping[str, object]) -> str:
    area = float(str(row["area"]))
    ends = (row["low"], row["high"])
    interval = "" if None in ends else f", {number(float(str(ends[0])))} to {number(float(str(ends[1])))}"
    return (
        f"{row['number']} {'greater' if area > 0.5 else 'smaller'} (median {number(float(str(row['median_failure'])))} "
        f"against {number(float(str(row['median_success'])))}; area {number(area)}{interval})"
    )


def _place(found: Found, alias: str) -> str:
    """Where the mean centre of mass lies, against the middle."""
    row, column = found[f"look/row/{alias}"], found[f"look/column/{alias}"]
    words = []
    for estimate, names in ((row, ("above", "below")), (column, ("left of", "right of"))):
        side = beyond(estimate, 0.5).value
        if side:
            words.append(f"{100 * abs(estimate.value - 0.5):.1f} % of the side {names[side > 0]}")
    return f"{' and '.join(words)} the middle" if words else "not shown to be off the middle"


def _against(estimate: Estimate, even: float) -> str:
    side = beyond(estimate, even).value
    return (f"less than an even map's {100 * even:.0f} %", f"not shown to differ from an even map's {100 * even:.0f} %",
            f"more than an even map's {100 * even:.0f} %")[1 + side]  # fmt: skip
