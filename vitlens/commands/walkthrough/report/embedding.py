"""The first steps: patches, their embedding, positions."""

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vitlens.analysis.walkthrough.registry import STEPS as KNOWN
from vitlens.analysis.walkthrough.registry import StepName
from vitlens.commands.walkthrough.record import EMBEDDING, HEAD, STEPS, EmbeddingArrays, HeadArrays, StepRow, WalkRow
from vitlens.records import Record
from vitlens.report.document import FigureSpec, Section, Sentence
from vitlens.report.numbers import number

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def embedding_steps(record: Record, row: WalkRow) -> Iterator[Section]:
    """Patches, embedding, positions."""
    yield _patches(record, row)
    if record.has(EMBEDDING):
        yield _embedding(record, row)
    yield _positions(record, row)


def step_row(record: Record, step: StepName) -> StepRow:
    """The check of one step."""
    return next(each for each in record.rows(STEPS) if each.step == step)


def by_hand(check: StepRow) -> Sentence:
    """How closely a step equals the model's own, in words."""
    known = KNOWN[check.step]
    if check.difference is None:
        return Sentence(f"Not computed again by hand ({known.title}): {check.note}.", (check,))
    note = f"; {check.note}" if check.note else ""
    return Sentence(
        f"Computed again by hand ({known.title}), the largest difference from {known.compared} is "
        f"{tiny(check.difference)}, where the largest value is {number(check.largest)}{note}.",
        (check,),
    )


def tiny(difference: float) -> str:
    """A small difference: "4.8e-07", or "0" where there is none."""
    return f"{difference:.1e}" if difference else "0"


def pixels_of(arrays: HeadArrays) -> NDArray[np.floating[Any]]:
    """The image (3, height, width) in [0, 1]."""
    return np.asarray(arrays.pixels[0] / np.float32(255))


def key_patch(row: WalkRow) -> int:
    """The number of the patch that the followed query attends to most."""
    return row.key - len(row.prefix)


def _patches(record: Record, row: WalkRow) -> Section:
    (height, width), (rows, columns), (tall, wide) = row.image_size, row.grid, row.patch_size
    text = (
        f"The image of {height}×{width} px is cut into {rows}×{columns} = {row.patches} patches of {tall}×{wide} px, "
        f"row by row. Each is {row.patch_values} numbers: three colours of {row.patch_pixels} pixels, normalised by "
        "the mean and the deviation that the model was trained with."
    )
    whole = rows * tall == height and columns * wide == width
    figures = (
        FigureSpec("patches", "The image and its patches, numbered row by row.", partial(_draw_patches, record, row)),
    )
    return Section("1. Patches", (Sentence(text, (row,)),), (), figures if whole else (), leading=True, step=True)


def _draw_patches(record: Record, row: WalkRow) -> "Figure":
    from vitlens.figures.patches import patch_grid

    return patch_grid(image=pixels_of(record.arrays(HEAD)), patch_size=row.patch_size)


def _embedding(record: Record, row: WalkRow) -> Section:
    tall, wide = row.patch_size
    check = step_row(record, "embedding")
    text = (
        f"Each patch is multiplied by {row.dim} filters of {row.patch_values} weights, which makes it a vector of "
        f"{row.dim} numbers. The model computes this as a convolution with kernel and stride {tall}×{wide}; cut out "
        "(unfold) and multiplied as a linear layer, the patches give the same numbers."
    )
    figure = FigureSpec(
        "embedding",
        f"{row.key_name.capitalize()}, the filters that respond to it most, with their responses (the "
        "convolution's numbers), and all numbers of all patches both ways. A filter's weights are divided by its "
        "largest; grey is 0.",
        partial(_draw_embedding, record, row, record.arrays(EMBEDDING)),
    )
    title = "2. Embedding: a convolution is a linear map of each patch"
    return Section(title, (Sentence(text, (row,)), by_hand(check)), (), (figure,), leading=True, step=True)


def _draw_embedding(record: Record, row: WalkRow, arrays: EmbeddingArrays) -> "Figure":
    from vitlens.figures.walkthrough.embedding import patch_embedding

    (tall, wide), (down, across) = row.patch_size, divmod(key_patch(row), row.grid[1])
    pixels = pixels_of(record.arrays(HEAD))
    return patch_embedding(
        patch=pixels[:, down * tall : (down + 1) * tall, across * wide : (across + 1) * wide],
        filters=arrays.filters,
        responses=arrays.responses.tolist(),
        numbers=arrays.numbers.tolist(),
        embedded=arrays.embedded,
        convolved=arrays.convolved,
        title=f"Patch embedding: {row.dim} filters of {tall}×{wide} px and three colours",
    )


def _positions(record: Record, row: WalkRow) -> Section:
    check = step_row(record, "positions")
    if check.difference is None or check.note:
        first = f"No fixed vector of its place is added to a patch before the first block: {check.note}."
    else:
        first = (
            "To the vector of each patch a vector of its place is added, which is the same for every image: between "
            f"this image and a black one it differs by at most {tiny(check.difference)}."
        )
    names = ", ".join(dict.fromkeys("CLS" if name == "cls" else f"a {name} token" for name in row.prefix))
    second = f"With {names} in front of the patches, {row.tokens}" if names else f"These {row.tokens}"
    second += (
        f" tokens of {row.dim} numbers each are the residual stream that enters the first block; what enters layer "
        f"{row.layer} has the same shape."
    )
    arrays = record.arrays(EMBEDDING) if record.has(EMBEDDING) else None
    figures = []
    if arrays is not None and arrays.position is not None:
        figures.append(
            FigureSpec(
                "positions",
                f"{row.key_name.capitalize()}: its embedding, the vector of its place, and their sum, which "
                "enters the first block.",
                partial(_draw_positions, row, arrays),
            )
        )
    figures.append(
        FigureSpec(
            "stream",
            f"The residual stream that enters layer {row.layer}: one row a token.",
            partial(_draw_stream, record, row),
        )
    )
    return Section("3. Positions and tokens", (Sentence(f"{first} {second}", (row, check)),), (), tuple(figures),
                   leading=True, step=True)  # fmt: skip


def _draw_positions(row: WalkRow, arrays: EmbeddingArrays) -> "Figure":
    from vitlens.figures.walkthrough.embedding import sum_of_vectors

    assert arrays.position is not None  # else there is no such figure
    embedded = arrays.convolved[key_patch(row)]
    parts = (("embedding", embedded), ("position", arrays.position), ("sum", embedded + arrays.position))
    return sum_of_vectors(parts=parts, title=f"What enters the first block: {row.key_name}")


def _draw_stream(record: Record, row: WalkRow) -> "Figure":
    from vitlens.figures.walkthrough.matrices import token_vectors

    return token_vectors(
        panels=[("residual stream", record.arrays(HEAD).input)],
        marked=[row.query],
        prefix=row.prefix,
        title=f"{row.tokens} tokens of {row.dim} numbers enter layer {row.layer}",
    )
