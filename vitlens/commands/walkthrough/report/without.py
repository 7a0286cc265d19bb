"""What happens without scaling, positions and CLS, and the sequence-reversal check."""

from collections.abc import Iterator
from functools import partial
from math import log
from typing import TYPE_CHECKING, Final

from vitlens.commands.walkthrough.record import (
    ANSWERS,
    ENTROPIES,
    ENTROPY,
    HEAD,
    PERMUTATIONS,
    REVERSAL,
    REVERSED,
    AnswerRow,
    EntropyRow,
    HeadEntropyRow,
    PermutationRow,
    ReversalRow,
    WalkRow,
)
from vitlens.commands.walkthrough.report.embedding import pixels_of, tiny
from vitlens.records import Record
from vitlens.report.document import FigureSpec, Section, Sentence, Table
from vitlens.report.numbers import number, percent

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WORDS: Final = {  # the changes, as a figure and a table name them
    "none": "as it is",
    "no-positions": "patches without positions",
    "unscaled": "scores of all layers not scaled",
    "patches-zero": "last block: patches zero",
    "prefix-zero": "last block: tokens before the patches zero",
    "prefix-unread": "patches do not attend to CLS",
    "mean-read": "mean of patches read as CLS",
}


def without_steps(record: Record, row: WalkRow) -> Iterator[Section]:
    """The sections of what the parts are for."""
    answers = {each.change: each for each in record.rows(ANSWERS)}
    if record.rows(ENTROPIES):
        yield _scaling(row, record.rows(ENTROPIES), record.rows(ENTROPY)[0], answers)
    if record.rows(PERMUTATIONS):
        yield _positions(record, row, record.rows(PERMUTATIONS), answers)
    yield _readout(row, answers)
    yield _reversal(record, record.rows(REVERSAL))


def _said(answer: AnswerRow) -> str:
    """The prediction of an answer with its probability."""
    return f"{answer.prediction} ({percent(answer.probability or 0.0, 1)})"


def _scaling(
    row: WalkRow, rows: tuple[HeadEntropyRow, ...], mean: EntropyRow, answers: dict[str, AnswerRow]
) -> Section:
    own = next(index for index, each in enumerate(rows) if (each.layer, each.head) == (row.layer, row.head))
    text = (
        f"Without the division by √d the rows of {mean.lower} of {mean.heads} heads have less entropy: the mean falls "
        f"from {number(mean.scaled, 2)} to {number(mean.unscaled, 2)} nats, which uniform attention to "
        f"{number(mean.scaled_tokens)} and to {number(mean.unscaled_tokens)} tokens has. A softmax near 0 and 1 hardly "
        "has a gradient, which is why scaling was introduced (Vaswani et al. 2017)."
        f"{_unscaled_answer(answers)}"
    )
    figure = FigureSpec(
        "without_scaling",
        "The entropy of every head on this image, mean over its queries, as it is and with the softmax of the products "
        "themselves.",
        partial(_draw_entropies, row, rows, own),
    )
    known = [answers[name] for name in ("none", "unscaled") if name in answers]
    return Section("11. Without scaling", (Sentence(text, (mean, *known)),), (), (figure,), leading=True, step=True)


def _unscaled_answer(answers: dict[str, AnswerRow]) -> str:
    own, changed = answers.get("none"), answers.get("unscaled")
    if own is None or changed is None or own.prediction is None:
        return ""
    return f" With unscaled scores in every layer this model predicts {_said(changed)} instead of {_said(own)}."


def _draw_entropies(row: WalkRow, rows: tuple[HeadEntropyRow, ...], own: int) -> "Figure":
    from vitlens.figures.walkthrough.without import entropies

    return entropies(
        layers=[each.layer for each in rows], scaled=[each.scaled for each in rows],
        unscaled=[each.unscaled for each in rows], marked=own, uniform=log(row.tokens),
        title="Entropy of the attention weights of every head, with and without scaling",
    )  # fmt: skip


def _positions(
    record: Record, row: WalkRow, rows: tuple[PermutationRow, ...], answers: dict[str, AnswerRow]
) -> Section:
    placed, without = sorted(rows, key=lambda each: not each.positions)
    if without.equivariant:
        text = (
            f"Without positions the model does not know where a patch is: the same {row.patches} patches in another "
            f"order give the same outputs in that order (largest difference {tiny(without.difference)}, where the "
            f"largest value is {number(without.largest)}), and logits that differ by at most {tiny(without.logits)}. "
            f"With the positions staying in their places the outputs differ by up to {number(placed.difference)}."
        )
    else:
        text = (
            "Without a vector of its place added to each patch, the patches in another order still give other outputs "
            f"(largest difference {number(without.difference)}, where the largest value is {number(without.largest)}): "
            "this model has positions in its attention, too (rotary positions or a bias)."
        )
    own = answers.get("none")
    if own is not None and own.prediction is not None and placed.prediction is not None:
        text += (
            f" The prediction is {_said(own)}; of the permuted patches with positions it is {placed.prediction} "
            f"({percent(placed.probability or 0.0, 1)})."
        )
    known = (row, *rows) if own is None else (row, *rows, own)
    figure = FigureSpec(
        "without_positions",
        "The image and its patches in another order; at the right, by how much the patches after the last block differ "
        "from the plain run's in that order.",
        partial(_draw_permuted, record, row, placed, without, own),
    )
    return Section("12. Without positions", (Sentence(text, known),), (), (figure,), leading=True, step=True)


def _draw_permuted(
    record: Record, row: WalkRow, placed: PermutationRow, without: PermutationRow, own: AnswerRow | None
) -> "Figure":
    from vitlens.figures.walkthrough.without import permuted

    arrays = record.arrays(HEAD)
    plain = "" if own is None or own.prediction is None else f"\n{_said(own)}"
    moved = "" if placed.prediction is None else f"\n{placed.prediction} ({percent(placed.probability or 0.0, 1)})"
    return permuted(
        image=pixels_of(arrays),
        order=arrays.order.tolist(),
        grid=row.grid,
        captions=(f"the image{plain}", f"its patches in another order{moved}"),
        differences=[
            (name, each.difference / each.largest)
            for name, each in (("with\npositions", placed), ("without\npositions", without))
        ],
        title="The same patches in another order",
    )


def _readout(row: WalkRow, answers: dict[str, AnswerRow]) -> Section:
    patches, prefix, unread = (answers.get(name) for name in ("patches-zero", "prefix-zero", "prefix-unread"))
    read = {"cls": "CLS", "cls+distillation": "CLS and the distillation token", "mean": "the mean of the patches"}
    parts = [
        f"The classifier reads {read.get(row.readout, 'the tokens through attention pooling')} after the last block."
    ]
    if patches is not None:
        same = "do not change at all" if not patches.difference else f"change by up to {number(patches.difference)}"
        parts.append(f"With all patches set to zero there the logits {same}.")
    if prefix is not None:
        parts.append(
            f"With the tokens before the patches set to zero they change by up to {number(prefix.difference)}."
        )
    if unread is not None and unread.of_own is not None:
        parts.append(
            "If no patch may attend to these tokens in any layer, the predicted class keeps "
            f"{percent(unread.of_own, 1)} of {percent(answers['none'].of_own or 0.0, 1)} probability."
        )
    mean = answers.get("mean-read")
    if mean is not None and mean.prediction is not None:
        parts.append(f"Read from the mean of the patches in its place, the prediction is {_said(mean)}.")
    rows = tuple(answers.values())
    columns = {
        "change": lambda each: WORDS.get(each.change, each.change),
        "largest change of a logit": lambda each: each.difference,
        "prediction": lambda each: each.prediction,
        "probability": lambda each: each.probability,
        "of the model's own class": lambda each: each.of_own,
    }
    table = Table.of("The model's answer with each change", rows, columns)
    figures: tuple[FigureSpec, ...] = ()
    if all(each.prediction is not None for each in rows):
        spec = FigureSpec(
            "answers", "The model's own class under each change of the model.", partial(_draw_answers, rows)
        )
        figures = (spec,)
    title = "13. Without CLS: which token is read" if row.prefix else "13. Which tokens are read"
    return Section(title, (Sentence(" ".join(parts), rows),), (table,), figures, leading=True, step=True)


def _draw_answers(rows: tuple[AnswerRow, ...]) -> "Figure":
    from vitlens.figures.walkthrough.without import answers

    return answers(
        names=[WORDS.get(each.change, each.change) for each in rows],
        own=[each.of_own or 0.0 for each in rows],
        predictions=[each.prediction or "" for each in rows],
        title="The probability of the model's own prediction with each change",
    )


def _reversal(record: Record, rows: tuple[ReversalRow, ...]) -> Section:
    placed, without = sorted(rows, key=lambda each: not each.positions)
    text = (
        f"One attention layer was trained here for {placed.steps:,} steps to reverse sequences of {placed.length} "
        "random vectors. With positions added to what queries and keys are made of, its mean squared error is "
        f"{placed.loss:.1e} and {percent(placed.anti_diagonal, 1)} of the weight lies on the anti-diagonal, the token "
        f"wanted; without them the error stays at {number(without.loss, 2)}, near the {number(without.floor, 2)} that "
        "is the least possible: attention alone sees a set, and the best guess is the mean of the others."
    )
    figure = FigureSpec(
        "reversal",
        "Left: the error of each training step. Right: the weights after training, mean over heads and fresh "
        "sequences. This layer is not part of the model.",
        partial(_draw_reversal, record, placed),
    )
    return Section("14. The sequence-reversal check", (Sentence(text, rows),), (), (figure,), leading=True, step=True)


def _draw_reversal(record: Record, placed: ReversalRow) -> "Figure":
    from vitlens.figures.walkthrough.without import Trained, reversal

    arrays = record.arrays(REVERSED)
    layers = [
        Trained("with positions" if row.positions else "without positions", arrays.losses[index], arrays.weights[index])
        for index, row in enumerate(record.rows(REVERSAL))
    ]
    return reversal(layers=layers, floor=placed.floor, title="One attention layer learns to reverse a sequence")
