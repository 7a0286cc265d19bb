"""What `vitlens ablate` draws of the inside: patching, the logit lens, contributions."""

from typing import Any

from vitlens.figures.contributions import contribution_bars, logit_lens
from vitlens.figures.patching import patching_maps
from vitlens.files import RunRecord
from vitlens.runs.report import Drawn


def draw_patching(record: RunRecord) -> Drawn:
    """What one image's parts bring back in another's run."""
    found: Any = record.arrays("patching")
    (row,) = record.table("patching")
    grid, prefix = row["grid"], list(row["prefix"] or ())  # type: ignore[call-overload]
    positions, before = None, None
    if grid is not None and found["positions"].shape[1] == len(prefix) + grid[0] * grid[1]:  # type: ignore[index]
        positions = found["positions"][:, len(prefix) :].reshape(-1, *grid)  # type: ignore[misc]
        numbered = [f"{name} {index}" if prefix.count(name) > 1 else name for index, name in enumerate(prefix, 1)]
        before = {
            name.replace("cls", "CLS"): found["positions"][:, index] for index, name in enumerate(numbered)
        } or None
    figure = patching_maps(
        clean=found["clean"],
        corrupted=found["corrupted"],
        heads=found["heads"],
        positions=positions,
        prefix=before,
        names=(f"clean: {row['clean']}", f"corrupted: {row['corrupted']}"),
        title="What the clean run brings back when a part of it is put into the other",
    )
    caption = (
        f"Share of the logit difference {row['target']} minus {row['other']} that comes back when one head's output, "
        "or the residual stream at one token before a block, is taken from the clean run; one pair of images alone. "
        "Beyond 1 or below 0 is possible: parts can overshoot or work against the rest."
    )
    return Drawn("patching", figure, caption)


def draw_lens(record: RunRecord) -> Drawn:
    """The answer after each block."""
    found: Any = record.arrays("lens")
    names = [str(row["class"]) for row in record.table("lens_classes")]
    figure = logit_lens(
        values=found["probability"][1:],
        names=names,
        title="The answer after each block, first image",
        unit="probability",
    )
    caption = (
        "The final norm and classifier applied to the residual stream after each block (logit lens); early blocks were "
        "not trained to be read this way."
    )
    return Drawn("lens", figure, caption)


def draw_contributions(record: RunRecord) -> Drawn:
    """What each part writes straight into the logit."""
    found: Any = record.arrays("contributions")
    (row,) = record.table("contributions")
    options: Any = record.config["options"]
    whose = "predicted" if options.get("predicted") else "true"
    figure = contribution_bars(
        heads=found["heads"],
        mlps=found["mlps"],
        rest=float(found["rest"]),
        title=f"What heads and MLPs write straight into the {whose} class's logit, mean (n = {row['images']} images)",
    )
    caption = (
        "Direct contributions with the final norm's scale fixed at each image's own; with the rest they sum to the "
        "logit. What a head does through later layers is not in them."
    )
    return Drawn("contributions", figure, caption)
