"""What the numbers of what changes inside say, in words."""

from collections.abc import Iterator, Mapping, Sequence

from vitlens.runs.attack_words import Found, Row, epsilon_words, estimate
from vitlens.runs.sections import in_words, number
from vitlens.uncertainty import Side, beyond


def inside_words(record_metrics: Found, aliases: Sequence[str], sample: Sequence[Row]) -> Iterator[str]:
    """How much maps, attention and paths change, model by model."""
    for row in sample:
        alias = str(row["model"])
        middle = f"/{alias}" if len(aliases) > 1 else ""
        start = f"map_agreement{middle}/spearman/"
        maps = {name.removeprefix(start): one for name, one in record_metrics.items() if name.startswith(start)}
        if not row["fooled"]:
            yield f"No image of the sample fooled {alias} at {epsilon_words(row)}: there is nothing to look into."
            continue
        listed = "; ".join(f"{name.replace('-', ' ')} {in_words(one)}" for name, one in maps.items())
        if listed:
            yield f"{alias}, rank correlation of maps before and after (1: unchanged): {listed}."
        block = record_metrics.get(f"parting_block{middle}")
        if block is not None:
            yield (
                f"The outputs of {alias} for clean and adversarial images are halfway to those of two different images "
                f"from block {int(block.value) + 1} on."
            )
        else:
            yield f"The outputs of {alias}'s blocks nowhere come halfway to those of two different images."


def path_words(rows: Sequence[Row]) -> Iterator[str]:
    """How far the attack moves each model's last block, beside noise as strong."""
    for alias in dict.fromkeys(str(row["model"]) for row in rows):
        mine = [row for row in rows if row["model"] == alias]
        last = max(int(row["block"]) for row in mine)
        ends = {row["kind"]: row for row in mine if row["block"] == last}
        if {"adversarial", "noise"} <= ends.keys():
            yield (
                f"{alias}, 1 − cosine of its last block's outputs with those for the clean images: "
                f"{_away(ends['adversarial'])} after the attack, {_away(ends['noise'])} after noise as strong "
                f"(n = {ends['noise']['n']})."
            )


def _away(row: Row) -> str:
    if row["low"] is None or row["high"] is None:
        return number(max(0.0, 1 - float(row["value"])))
    value, low, high = (number(max(0.0, 1 - float(row[end]))) for end in ("value", "high", "low"))
    return f"{value} ({low} to {high})"


def shift_words(rows: Sequence[Row], titles: Mapping[str, str]) -> Iterator[str]:
    """In which layers attention changes by more than chance."""
    for alias in dict.fromkeys(str(row["model"]) for row in rows):
        for name in dict.fromkeys(str(row["statistic"]) for row in rows if row["model"] == alias):
            mine = [row for row in rows if row["model"] == alias and row["statistic"] == name]
            sides = {int(row["layer"]) + 1: beyond(estimate(row, "value"), 0.0) for row in mine}
            risen = [layer for layer, side in sides.items() if side is Side.ABOVE]
            fallen = [layer for layer, side in sides.items() if side is Side.BELOW]
            said = [
                f"{word} in layer{'s' if len(layers) > 1 else ''} {', '.join(map(str, layers))}"
                for word, layers in (("rises", risen), ("falls", fallen))
                if layers
            ]
            change = " and ".join(said) or "is not shown to change in any layer"
            short = titles[name].partition(",")[0]
            yield f"{alias}: {short} {change} (95 % intervals, uncorrected; {mine[0]['n']} images)."
