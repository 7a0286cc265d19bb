"""Changes inside each model for the images that fool it: examples, maps, blocks, attention."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from vitlens.commands.attack.epsilons import epsilon_words
from vitlens.commands.attack.options import AttackOptions
from vitlens.commands.attack.record import BLOCKS, EXAMPLES, MAP_AGREEMENT, PARTING_BLOCK, SAMPLE, SHIFTS
from vitlens.commands.attack.record.arrays import AttackExampleArrays
from vitlens.commands.attack.record.rows import AttackSampleRow, AttentionShiftRow, BlockCosineRow
from vitlens.records import Record
from vitlens.report.document import FigureSpec, Section, Sentence
from vitlens.report.numbers import in_ranges, in_words
from vitlens.uncertainty import Side, beyond, widened

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PATHS: Final = (
    "One minus the cosine between the output of a block for the clean image and for the adversarial image, for the "
    "clean image with random noise of the same strength, and for another image of the sample; grey lines: factors of "
    "ten. The difference between the first two is the effect of the attack beyond that of noise."
)
_LEAST: Final = 0.01  # of a statistic's value before the attack
_COUNTS: Final = (
    "A change of attention counts where its interval excludes 0, widened for as many looks as layers, and where it is "
    f"at least {100 * _LEAST:g} % of the value before: a paired test of many images finds smaller ones, which mean "
    "nothing."
)
_SHIFTS: Final = (
    "After minus before the attack, paired by image, for the images that fool the model. Opposite changes of the heads "
    "of a layer cancel out in these means."
)


def inside(record: Record) -> Iterator[Section]:
    """Maps, attention and outputs of blocks before and after the attack; nothing with --no-inside."""
    if not record.options(AttackOptions).inside:
        return
    figures = (*_examples(record), *_paths(record), *_shifts(record))
    lines = (
        *_sample_sentences(record),
        *(sentence for row in record.rows(SAMPLE) for sentence in _change_sentences(record, row)),
        *_path_sentences(record),
        *_shift_sentences(record),
    )
    yield Section("Changes inside the models", lines, figures=figures, leading=True)


def _sample_sentences(record: Record) -> Iterator[Sentence]:
    for row in record.rows(SAMPLE):
        epsilon = epsilon_words(row.epsilon, row.norm)
        text = f"{row.title} at {epsilon} fools {row.model} on {row.fooled} of {row.n} images of a sample."
        yield Sentence(text, (row,))


def _change_sentences(record: Record, row: AttackSampleRow) -> Iterator[Sentence]:
    """How well maps agree, and from which block on outputs differ about as much as those of different images."""
    if not row.fooled:
        text = f"No image of the sample fooled {row.model} at {epsilon_words(row.epsilon, row.norm)}."
        yield Sentence(text, (row,))
        return
    agreements = {
        parts["maps"].replace("-", " "): estimate
        for parts, estimate in record.all(MAP_AGREEMENT)
        if (parts["model"], parts["measure"]) == (row.model, "spearman")
    }
    if agreements:
        listed = "; ".join(f"{name} {in_words(estimate)}" for name, estimate in agreements.items())
        text = f"{row.model}, rank correlation of maps before and after (1: unchanged): {listed}."
        yield Sentence(text, (row, *agreements.values()))
    block = record.metrics.get(PARTING_BLOCK(model=row.model))
    if block is None:
        text = (
            f"In no block of {row.model} do the outputs for clean and adversarial images differ by half as much as "
            "those for two different images."
        )
    else:
        text = (
            f"From block {int(block.value)} on, the outputs of {row.model} for clean and adversarial images differ by "
            "at least half as much as those for two different images."
        )
    yield Sentence(text, (row, *([] if block is None else [block])))


def _path_sentences(record: Record) -> Iterator[Sentence]:
    """How much the attack changes the output of each model's last block, compared with noise of the same strength."""
    rows = record.rows(BLOCKS)
    for alias in dict.fromkeys(row.model for row in rows):
        last = max(row.block for row in rows if row.model == alias)
        at_end = {row.kind: row for row in rows if (row.model, row.block) == (alias, last)}
        attacked, noise = at_end.get("adversarial"), at_end.get("noise")
        if attacked is not None and noise is not None:
            yield Sentence(
                f"{alias}, 1 − cosine between the last block's outputs for clean and changed images: "
                f"{in_words(attacked.distance)} for the attack, {in_words(noise.distance)} for noise of the same "
                f"strength (n = {noise.n}).",
                (attacked, noise, attacked.distance, noise.distance),
            )


def _shift_sentences(record: Record) -> Iterator[Sentence]:
    """In which layers attention changes, by 95 % intervals."""
    rows = record.rows(SHIFTS)
    for alias, statistic in dict.fromkeys((row.model, row.statistic) for row in rows):
        by_layer = [row for row in rows if (row.model, row.statistic) == (alias, statistic)]
        sides = {row.layer: _side(row, len(by_layer)) for row in by_layer}
        parts = []
        for verb, side in (("rises", Side.ABOVE), ("falls", Side.BELOW)):
            layers = [layer for layer, of_layer in sides.items() if of_layer is side]
            parts += [f"{verb} in {in_ranges(layers)}"] if layers else []
        change = " and ".join(parts) or "is not shown to change in any layer"
        short = by_layer[0].title.partition(",")[0]
        text = f"{alias}, attention under attack: {short} {change} ({by_layer[0].n} images)."
        yield Sentence(text, tuple(by_layer))
    if rows:
        yield Sentence(_COUNTS, says="method")


def _side(row: AttentionShiftRow, layers: int) -> Side:
    """Whether a layer's attention changes, also for as many looks as layers, and by enough to matter."""
    if abs(row.value) < _LEAST * abs(row.before):
        return Side.UNDECIDED
    return beyond(widened(row.estimate, layers), 0.0)


def _examples(record: Record) -> Iterator[FigureSpec]:
    """Single images before and after, with their maps, model by model."""
    for row in record.rows(SAMPLE):
        if record.has(EXAMPLES, model=row.model):
            arrays = record.arrays(EXAMPLES, model=row.model)
            yield FigureSpec(
                f"examples_{row.model}",
                f"Some of the images that fool {row.model}. Maps: {arrays.method} for the true class, divided by their "
                "sum, relative to a uniform map. Perturbations are drawn around grey, amplified as stated in their "
                "titles. A change of the map need not be the cause of the changed prediction.",
                partial(_draw_examples, row, arrays),
            )


def _draw_examples(row: AttackSampleRow, arrays: AttackExampleArrays) -> "Figure":
    from vitlens.figures.attack.examples import PredictedClass, attack_examples

    clean = arrays.pixels / np.float32(255)
    change = arrays.change.astype(np.float32)
    before, after = (
        [PredictedClass(str(word), float(probability)) for word, probability in zip(words, probabilities)]
        for words, probabilities in zip(arrays.answers, arrays.probability)
    )
    return attack_examples(
        clean=clean,
        adversarial=np.clip(clean + change, 0, 1),
        maps_before=arrays.before,
        maps_after=arrays.after,
        before=before,
        after=after,
        notes=[f"L∞ {255 * np.abs(part).max():.2g}/255\nL2 {np.linalg.norm(part):.2g}" for part in change],
        title=f"{row.model} before and after {row.title} at {epsilon_words(row.epsilon, row.norm)}",
    )


def _paths(record: Record) -> Iterator[FigureSpec]:
    if record.rows(BLOCKS):
        yield FigureSpec("paths", _PATHS, partial(_draw_paths, record.rows(BLOCKS)))


def _draw_paths(rows: Sequence[BlockCosineRow]) -> "Figure":
    from vitlens.figures.attack.inside import block_distances

    models = {}
    for alias in dict.fromkeys(row.model for row in rows):
        of_model = [row for row in rows if row.model == alias]
        models[f"{alias}, {of_model[0].n} images"] = {
            str(kind): _curve({row.block: row for row in of_model if row.kind == kind})
            for kind in dict.fromkeys(row.kind for row in of_model)
        }
    return block_distances(models=models, title="Change of the outputs of blocks")


def _shifts(record: Record) -> Iterator[FigureSpec]:
    if record.rows(SHIFTS):
        yield FigureSpec("shifts", _SHIFTS, partial(_draw_shifts, record.rows(SHIFTS)))


def _draw_shifts(rows: Sequence[AttentionShiftRow]) -> "Figure":
    from vitlens.figures.attack.inside import LayerShift, attention_shifts

    shifts = []
    for statistic in dict.fromkeys(row.statistic for row in rows):
        by_layer = [row for row in rows if row.statistic == statistic]
        curves = {
            alias: _curve({row.layer: row for row in by_layer if row.model == alias})
            for alias in dict.fromkeys(row.model for row in by_layer)
        }
        shifts.append(LayerShift(by_layer[0].title, f"after − before ({by_layer[0].unit})", curves))
    return attention_shifts(shifts=shifts, title="Change of attention under attack, means over heads")


def _curve(rows: Mapping[int, BlockCosineRow] | Mapping[int, AttentionShiftRow]) -> NDArray[np.floating]:
    """Values, lows and highs by block or layer, NaN where there is none; the value for an end that is not defined."""
    curve = np.full((3, 1 + max(rows)), np.nan)
    for place, row in rows.items():
        curve[:, place] = [row.value if end is None else end for end in (row.value, row.low, row.high)]
    return curve
