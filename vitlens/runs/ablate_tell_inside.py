"""What `vitlens ablate` writes of patching, the logit lens, contributions and pruning."""

from collections.abc import Iterator
from typing import Any

from vitlens.files import RunRecord
from vitlens.runs.ablate_rows import Ranking, all_rows, has_table, main_rows, ranking_of
from vitlens.runs.sections import Section, Table
from vitlens.uncertainty import Estimate


def tell_inside(record: RunRecord) -> Iterator[Section]:
    """Patching, lens and contributions, as far as they are defined for the model."""
    notes = [str(row["note"]) for row in record.table("inside_notes")] if has_table(record, "inside_notes") else []
    lines, figures, tables = [f"Not done: {note}." for note in notes], [], []
    if has_table(record, "patching"):
        (row,) = record.table("patching")
        lines.append(
            f"Patching: the clean image ({row['clean']}) has a logit difference ({row['target']} minus {row['other']}) "
            f"of {float(str(row['difference_clean'])):.2f}, the other one ({row['corrupted']}) of "
            f"{float(str(row['difference_corrupted'])):.2f}."
        )
        figures.append("patching")
    if has_table(record, "lens"):
        listed: list[dict[str, Any]] = [
            {
                "after": "embedding" if row["depth"] == 0 else f"block {row['depth']}",
                "accuracy": Estimate(float(str(row["accuracy"])), row["low"], row["high"], row["n"]),
            }
            for row in all_rows(record, "lens")
        ]
        tables.append(Table("What could be read of the answer after each block", listed))
        figures.append("lens")
    if has_table(record, "contributions"):
        (row,) = record.table("contributions")
        lines.append(
            f"Direct contributions of heads, MLPs and the rest sum to the logit to within "
            f"{float(str(row['largest_gap'])):.1e} on {row['images']} image{'' if row['images'] == 1 else 's'}."
        )
        figures.append("contributions")
    if lines or figures:
        yield Section("Inside a run", tuple(lines), tuple(tables), tuple(figures))


def tell_pruned(record: RunRecord) -> Section:
    """The model without its least important heads: parameters, time, accuracy."""
    listed: list[dict[str, Any]] = [
        {
            "model": row["model"],
            "heads": row["heads"],
            "parameters": row["parameters"],
            "accuracy": Estimate(float(str(row["accuracy"])), row["accuracy_low"], row["accuracy_high"], row["n"]),
            f"ms a batch of {row['images']}": row["milliseconds"],
            "quartiles (ms)": f"{row['low']} to {row['high']}",
        }
        for row in all_rows(record, "pruned")
    ]
    cut = "; ".join(
        f"layer {int(str(row['layer'])) + 1}: {', '.join(str(int(head) + 1) for head in row['heads'])}"  # type: ignore[attr-defined]
        for row in record.table("pruned_heads")
    )
    lines = [f"Heads really removed, counted from 1: {cut}. The model was not trained after the cut."]
    if ranking_of([row for row in main_rows(record) if row["kind"] == "head"]) is not Ranking.SHOWN:
        lines.append("No head was shown to matter more than others: the images do not tell these heads from the rest.")
    return Section("The pruned model", tuple(lines), (Table("Whole and pruned, timed in turns", listed),))
