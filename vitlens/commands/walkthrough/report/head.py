"""The steps of the head: queries and keys, scores, scaling, softmax, values, output projection, residual stream."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from vitlens.commands.walkthrough.record import HEAD, HeadArrays, NumbersRow, StepRow, WalkRow
from vitlens.commands.walkthrough.report.embedding import by_hand, pixels_of, step_row
from vitlens.records import Record
from vitlens.report.document import FigureSpec, Section, Sentence
from vitlens.report.numbers import number, percent

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def head_steps(record: Record, row: WalkRow, numbers: NumbersRow) -> Iterator[Section]:
    """The sections of all steps inside the block."""
    arrays = record.arrays(HEAD)
    for step in (_queries, _scores, _scaling, _softmax, _values, _projection, _residual):
        yield step(record, row, numbers, arrays)


def _section(
    title: str,
    text: str,
    rows: Sequence[object],
    checks: Sequence[StepRow],
    name: str,
    caption: str,
    draw: "Callable[[], Figure]",
) -> Section:
    sentences = (Sentence(text, tuple(rows)), *map(by_hand, checks))
    return Section(title, sentences, (), (FigureSpec(name, caption, draw),), leading=True, step=True)


def _queries(record: Record, row: WalkRow, _numbers: NumbersRow, arrays: HeadArrays) -> Section:
    text = (
        "Every token is normalised (layer norm) and multiplied by three matrices of this head. That gives it a query "
        f"(what it looks for), a key (what it is found by) and a value (what it hands on), {row.head_dim} numbers each."
    )
    caption = (
        f"Queries, keys and values of all tokens in {row.name}; outlined: the query of {row.query_name}, and the key "
        f"of {row.key_name}, the patch to which it attends most."
    )
    checks = (step_row(record, "norm"), step_row(record, "queries"))
    draw = partial(_draw_queries, row, arrays)
    return _section("4. Queries, keys and values", text, (row,), checks, "queries_keys", caption, draw)


def _draw_queries(row: WalkRow, arrays: HeadArrays) -> "Figure":
    from vitlens.figures.walkthrough.matrices import token_vectors

    return token_vectors(
        panels=[("queries", arrays.queries), ("keys", arrays.keys), ("values", arrays.values)],
        marked=[row.query, row.key, None],
        prefix=row.prefix,
        title=f"{row.name}: queries, keys and values, {row.head_dim} numbers a token",
    )


def _scores(_record: Record, row: WalkRow, numbers: NumbersRow, arrays: HeadArrays) -> Section:
    text = (
        f"A query and a key are multiplied number by number and added up: {row.head_dim} products make one score, "
        f"large where both point the same way. For {row.query_name} and {row.key_name} it is "
        f"{number(numbers.product)}; over all {row.tokens}×{row.tokens} pairs the standard deviation is "
        f"{number(numbers.products_deviation)}."
    )
    caption = (
        f"The products q·k of all pairs of tokens, not yet scaled; outlined: the row of {row.query_name}, which is "
        "shown over the image at the right (patches only)."
    )
    draw = partial(_draw_scores, row, arrays)
    return _section("5. Scores: query times key", text, (row, numbers), (), "scores", caption, draw)


def _draw_scores(row: WalkRow, arrays: HeadArrays) -> "Figure":
    from vitlens.figures.walkthrough.matrices import matrix_with_row

    return matrix_with_row(
        matrix=arrays.products, query=row.query, image=pixels_of(arrays), grid=row.grid, prefix=row.prefix,
        label="q·k", signed=True, title=f"{row.name}: the products of all queries and keys",
        row_title=f"q·k of {row.query_name}",
    )  # fmt: skip


def _scaling(record: Record, row: WalkRow, numbers: NumbersRow, _arrays: HeadArrays) -> Section:
    text = (
        f"A sum of {row.head_dim} products grows with their number, so it is multiplied by {_root(row, numbers)}: "
        f"{number(numbers.product)} becomes {number(numbers.score)}, and the standard deviation "
        f"{number(numbers.scores_deviation)}. Without this the largest weight in the row of {row.query_name} would be "
        f"{percent(numbers.unscaled_largest, 1)} instead of {percent(numbers.largest, 1)}, and the entropy of the row "
        f"{number(numbers.unscaled_entropy, 2)} instead of {number(numbers.entropy, 2)} nats (uniform attention: "
        f"{number(numbers.uniform_entropy, 2)})."
    )
    caption = (
        f"Left: all scores before and after scaling. Right: the weights of {row.query_name} with and without scaling, "
        "each sorted by itself."
    )
    checks, draw = (step_row(record, "scores"),), partial(_draw_scaling, record, row)
    return _section("6. Scaling by the square root of d", text, (row, numbers), checks, "scaling", caption, draw)


def _root(row: WalkRow, numbers: NumbersRow) -> str:
    if abs(numbers.scale - numbers.expected_scale) <= 1e-6 * numbers.expected_scale:
        return f"1/√{row.head_dim} = {number(numbers.scale)}"
    return f"{number(numbers.scale)}, this model's own (1/√{row.head_dim} is {number(numbers.expected_scale)})"


def _draw_scaling(record: Record, row: WalkRow) -> "Figure":
    from vitlens.figures.walkthrough.head import scaling

    arrays = record.arrays(HEAD)
    return scaling(
        products=arrays.products, scores=arrays.scores, weights=arrays.weights[row.query],
        unscaled=arrays.unscaled[row.query], title=f"{row.name}: scores and weights with and without scaling",
    )  # fmt: skip


def _softmax(record: Record, row: WalkRow, numbers: NumbersRow, arrays: HeadArrays) -> Section:
    before = f"; {percent(numbers.prefix_mass, 1)} of the row is on the tokens before the patches" if row.prefix else ""
    text = (
        "The scores of a query are exponentiated and divided by their sum, so that each row of weights is positive and "
        f"sums to 1. The score {number(numbers.score)} becomes a weight of {percent(numbers.weight, 2)}, "
        f"{number(numbers.times_uniform)} times that of uniform attention{before}."
    )
    matrices = FigureSpec(
        "weights",
        f"All {row.tokens}×{row.tokens} scores and weights of the head. A bright column is a token to which all "
        "attend; a bright diagonal, tokens that attend to themselves; stripes beside it, neighbours.",
        partial(_draw_matrices, row, arrays),
    )
    over = FigureSpec(
        "row",
        f"The weights of {row.query_name}: its row of the matrix, and over the image (patches only).",
        partial(_draw_row, row, arrays),
    )
    sentences = (Sentence(text, (row, numbers)), by_hand(step_row(record, "softmax")))
    return Section("7. Softmax: from scores to weights", sentences, (), (matrices, over), leading=True, step=True)


def _draw_matrices(row: WalkRow, arrays: HeadArrays) -> "Figure":
    from vitlens.figures.walkthrough.matrices import head_matrices

    title = f"{row.name}: scores and weights of all {row.tokens}×{row.tokens} pairs of tokens"
    return head_matrices(scores=arrays.scores, weights=arrays.weights, prefix=row.prefix, title=title)


def _draw_row(row: WalkRow, arrays: HeadArrays) -> "Figure":
    from vitlens.figures.walkthrough.matrices import matrix_with_row

    return matrix_with_row(
        matrix=100 * arrays.weights, query=row.query, image=pixels_of(arrays), grid=row.grid, prefix=row.prefix,
        label="weight (%)", signed=False, title=f"{row.name}: the weights of {row.query_name}",
        row_title="its row, over the image",
    )  # fmt: skip


def _values(record: Record, row: WalkRow, numbers: NumbersRow, arrays: HeadArrays) -> Section:
    text = (
        f"The output of the head for a token is the sum of the values of all {row.tokens} tokens, each times its "
        f"weight. For {row.query_name} it is a vector of {row.head_dim} numbers with norm "
        f"{number(numbers.output_norm)}."
    )
    caption = f"Left: the weights of {row.query_name}. Right: the values of all tokens, and below their weighted sum."
    checks, draw = (step_row(record, "values"),), partial(_draw_values, row, arrays)
    return _section("8. Values: what is moved", text, (row, numbers), checks, "values", caption, draw)


def _draw_values(row: WalkRow, arrays: HeadArrays) -> "Figure":
    from vitlens.figures.walkthrough.head import weighted_values

    return weighted_values(
        weights=arrays.weights[row.query], values=arrays.values, output=arrays.outputs[row.query],
        title=f"{row.name}: the output for {row.query_name} is a weighted sum of values",
    )  # fmt: skip


def _projection(record: Record, row: WalkRow, numbers: NumbersRow, arrays: HeadArrays) -> Section:
    most = f"that of head {numbers.widest}, {number(numbers.widest_norm)}, is the largest of {row.heads}"
    beside = f"the largest of {row.heads}" if numbers.widest == row.head else most
    text = (
        f"The outputs of all {row.heads} heads are multiplied by one matrix, the output projection, back to the "
        f"{row.dim} numbers of the residual stream, which is a sum of one part a head. For {row.query_name} the part "
        f"of {row.name} has norm {number(numbers.part_norm)} ({beside})."
    )
    caption = f"Left: the norm of each head's part for {row.query_name}. Right: the part of {row.name}."
    checks, draw = (step_row(record, "projection"),), partial(_draw_parts, row, arrays)
    return _section("9. Output projection", text, (row, numbers), checks, "projection", caption, draw)


def _draw_parts(row: WalkRow, arrays: HeadArrays) -> "Figure":
    from vitlens.figures.walkthrough.head import head_parts

    return head_parts(
        norms=arrays.head_norms[:, row.query].tolist(), head=row.head, part=arrays.projected[row.query],
        title=f"Layer {row.layer}: what the heads add to {row.query_name}",
    )  # fmt: skip


def _residual(record: Record, row: WalkRow, numbers: NumbersRow, _arrays: HeadArrays) -> Section:
    text = (
        "What attention and then the MLP compute is added to what entered the block, the residual stream. At "
        f"{row.query_name} a vector of norm {number(numbers.input_norm)} enters, attention adds one of "
        f"{number(numbers.attention_norm)}, the MLP one of {number(numbers.mlp_norm)}, and one of "
        f"{number(numbers.after_norm)} leaves."
    )
    caption = f"Norms at {row.query_name}. Norms do not add up, as vectors point in different directions."
    checks, draw = (step_row(record, "residual"),), partial(_draw_norms, row, numbers)
    return _section("10. Residual stream", text, (row, numbers), checks, "residual", caption, draw)


def _draw_norms(row: WalkRow, numbers: NumbersRow) -> "Figure":
    from vitlens.figures.walkthrough.head import norms

    parts = (
        (f"enters block {row.layer}", numbers.input_norm),
        (f"part of head {row.head}", numbers.part_norm),
        ("all heads (attention)", numbers.attention_norm),
        ("MLP", numbers.mlp_norm),
        (f"leaves block {row.layer}", numbers.after_norm),
    )
    return norms(parts=parts, title=f"Layer {row.layer}: the residual stream of {row.query_name}")
