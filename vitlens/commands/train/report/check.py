"""The report of `vitlens train --check`: what is wrong, what to try, and the norms by layer."""

from collections.abc import Iterator, Sequence
from functools import partial
from math import isfinite
from typing import TYPE_CHECKING, Final

from vitlens.commands.train.record import BATCH_LOSSES, CHECKS, CONSTANT_LOSS, LAYERS
from vitlens.records import Record
from vitlens.report.document import Document, FigureSpec, Section, Sentence, Table, Verdict, sentences
from vitlens.report.numbers import number
from vitlens.training.check.rows import FITTED, CheckRow, LayerRow

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_METHODS: Final = (
    "Before training, a few images pass once forward and backward through the model in training mode: the root mean "
    "square of each layer's output, and the norm of the gradient of its parameters, divided by the norm of the "
    "parameters.",
    "One batch: a few images, without augmentation, label smoothing and dropout, are trained on with the recipe's "
    "optimiser at its peak learning rate, after a warm-up of 5 steps. Where their labels are not learned, other rates "
    "are tried from the same weights. The loss of the best constant prediction is the entropy of the batch's labels.",
    "A check that could not have failed here is inconclusive. The checks stand in the order of causes: what fails "
    "first can make later ones fail.",
)
_LIMITS: Final = (
    "A pass shows that the model can learn a few images by heart, not that it reaches a good accuracy on others.",
    "Labels that are wrong but in range are not found, unless one image has two of them: look at some images of each "
    "class.",
    "Of large data sets a seeded part is read; copies are found only where every pixel is equal.",
)
_WORDS: Final = {"pass": "pass", "warn": "give a warning", "fail": "fail", "inconclusive": "are inconclusive"}


def check_report(record: Record) -> Document:
    """The checks as verdicts; in sentences what is wrong and what to try; norms by layer; losses on one batch."""
    checks, layers = record.rows(CHECKS), record.rows(LAYERS)
    sections = [Section("What is wrong, and what to try", tuple(_sentences(checks)), leading=True)]
    if layers:
        figure = FigureSpec(
            "layers",
            "Each layer before training, in the order of the forward pass: the root mean square of its output, and the "
            "gradient of its parameters relative to them. A cross at the left: zero, or none (tokens and positions "
            "have no output).",
            partial(_draw_layers, record),
        )
        sections.append(Section("Norms by layer", tuple(_norms(layers)), figures=(figure,), leading=True))
    if record.rows(BATCH_LOSSES):
        figure = FigureSpec(
            "one_batch",
            "Loss on the one batch at each learning rate that was tried; dashed: the best constant prediction, dotted: "
            "the loss at which the labels count as learned.",
            partial(_draw_losses, record),
        )
        sections.append(Section("One batch", _told(checks, "one batch", "learning rate"), figures=(figure,)))
    sections.append(Section("How it was measured", sentences(*_METHODS, says="method")))
    return Document(
        record.config.title,
        tuple(sections),
        limits=sentences(*_LIMITS, says="method"),
        verdicts=tuple(Verdict(row.name, row.state, None, row.expected, row.found) for row in checks),
        appendix=(Section("All layers", tables=(_table(layers),)),) if layers else (),
    )


def _sentences(checks: Sequence[CheckRow]) -> Iterator[Sentence]:
    """How many pass; then each that does not, in the order of causes."""
    counts = {state: sum(row.state == state for row in checks) for state in _WORDS}
    told = ", ".join(f"{count} {_WORDS[state]}" for state, count in counts.items() if count)
    yield Sentence(f"Of {len(checks)} checks, {told}.", tuple(checks))
    failed = [row for row in checks if row.state == "fail"]
    for place, row in enumerate(failed):
        follows = " (what stands above may be its cause)" if place else ""
        yield Sentence(f"**{row.name.capitalize()} failed**{follows}: {_words(row)}", (row,))
    for row in checks:
        if row.state in ("warn", "inconclusive"):
            word = "A warning" if row.state == "warn" else "Inconclusive"
            yield Sentence(f"{word}, **{row.name}**: {_words(row)}", (row,))
    if not failed:
        yield Sentence("Nothing that these checks can see stands in the way of this training.", tuple(checks))


def _words(row: CheckRow) -> str:
    return f"expected {row.expected}; found {row.found}. {row.advice}".rstrip()


def _told(checks: Sequence[CheckRow], *names: str) -> tuple[Sentence, ...]:
    rows = [row for row in checks if row.name in names]
    return tuple(Sentence(f"{row.name.capitalize()}, {row.state}: {row.found}.", (row,)) for row in rows)


def _norms(layers: Sequence[LayerRow]) -> Iterator[Sentence]:
    """The smallest and the largest of each quantity, with their layers."""
    for words, values in (
        ("The root mean square of the outputs", _outputs(layers)),
        ("Relative gradients", _ratios(layers)),
    ):
        known = {row.name: (value, row) for row, value in zip(layers, values) if value is not None and isfinite(value)}
        if len(known) > 1:
            low, high = (choose(known, key=lambda name: known[name][0]) for choose in (min, max))
            verb = "lies between" if words.startswith("The") else "lie between"
            yield Sentence(
                f"{words} {verb} {number(known[low][0])} (`{low}`) and {number(known[high][0])} (`{high}`).",
                (*known[low], *known[high]),
            )


def _outputs(layers: Sequence[LayerRow]) -> list[float | None]:
    return [row.activation for row in layers]


def _ratios(layers: Sequence[LayerRow]) -> list[float | None]:
    return [None if row.gradient is None or not row.weight else row.gradient / row.weight for row in layers]


def _table(layers: Sequence[LayerRow]) -> Table:
    return Table.of(
        "Every module with parameters of its own, before training",
        layers,
        {
            "layer": lambda row: row.name,
            "parameters": lambda row: row.parameters,
            "output (root mean square)": lambda row: row.activation,
            "gradient (norm)": lambda row: row.gradient,
            "parameters (norm)": lambda row: row.weight,
            "trained": lambda row: "yes" if row.trained else "no",
        },
    )


def _draw_layers(record: Record) -> "Figure":
    from vitlens.figures.train.check import layer_norms

    layers = record.rows(LAYERS)
    return layer_norms(
        names=[row.name for row in layers],
        outputs=_outputs(layers),
        gradients=_ratios(layers),
        title=record.config.title,
    )


def _draw_losses(record: Record) -> "Figure":
    from vitlens.figures.train.check import batch_losses

    curves: dict[float, list[float]] = {}
    for row in record.rows(BATCH_LOSSES):
        curves.setdefault(row.learning_rate, []).append(row.loss)
    constant = record.metric(CONSTANT_LOSS(model=record.aliases[0])).value
    return batch_losses(curves=curves, constant=constant, fitted=FITTED, title="Loss on one batch by learning rate")
