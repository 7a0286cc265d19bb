"""What the calibration of an evaluation shows, and what could overturn its findings."""

from collections.abc import Iterator
from typing import Final

from vitlens.commands.evaluate.conclusions import leans, misjudged
from vitlens.commands.evaluate.record import ACCURACY, CLASSES, DIFFERENCE, PREDICTED, PredictedClassRow
from vitlens.commands.scaffold.calibration import CALIBRATION, CALIBRATION_ERROR, FEW, reliability, undrawn
from vitlens.commands.scaffold.pairs import PAIRS
from vitlens.commands.scaffold.trainings import TRAINING, differences
from vitlens.records import Record
from vitlens.report.document import Section, Sentence, Table, sentences
from vitlens.report.numbers import in_words, percent
from vitlens.uncertainty import LEVEL

_HOW: Final = (
    f"The accuracy of fewer than {FEW} images has a 95 % interval of 10 to 40 points, so a bin or a predicted class of "
    "so few shows little by itself. p of a predicted class: the exact test that each of its predictions is correct "
    "with the probability of its confidence (Poisson binomial); p (Holm) is corrected for the classes of the model."
)
_SHARE: Final = 0.5  # of the occupied bins, or of the classes, that are small before it is a limit of the whole run


def calibration_section(record: Record) -> Section:
    """Confidence against accuracy, as a whole, by bin and by predicted class."""
    lines = tuple(line for alias in record.aliases for line in _calibration_sentences(record, alias))
    rows = record.rows(PREDICTED)
    tables = (_by_prediction(rows),) if rows else ()
    said = (*lines, *undrawn(record), *sentences(_HOW, says="method"))
    return Section("Calibration", said, tables, tuple(reliability(record)), leading=True)


def limits(record: Record) -> Iterator[Sentence]:
    """What could overturn the findings of this evaluation, the most serious first; at most five."""
    pairs = record.rows(PAIRS)
    for row in pairs:
        gain = record.metric(DIFFERENCE(first=row.first, second=row.second))
        if row.p_holm > LEVEL and row.only_first_right + row.only_second_right:
            yield Sentence(
                f"That {row.first} and {row.second} do not differ significantly is no evidence that they are equal: "
                f"their difference in accuracy may be anything within {in_words(gain)}.",
                (gain, row),
            )
            break
    trained = differences(record.rows(TRAINING))
    if trained and pairs:
        yield Sentence(
            f"The models differ in {len(trained)} things besides their architecture (data, length or start of their "
            "training), and one set of weights of each was evaluated: a finding is about these weights.",
            (*trained, *record.rows(TRAINING)),
        )
    yield from _small_parts(record)
    error = record.metric(CALIBRATION_ERROR(model=record.aliases[0]))
    yield Sentence(
        f"The calibration error is an average over bins, which is biased upwards on {error.n or 0:,} images: the upper "
        "end of its interval is too high rather than too low, and two models with overlapping intervals are not ranked "
        "by it.",
        (error,),
    )


def _small_parts(record: Record) -> Iterator[Sentence]:
    """That most classes have too few images."""
    rows = [row for row in record.rows(CLASSES) if row.model == record.aliases[0] and row.n]
    few = [row for row in rows if row.n < FEW]
    if len(few) > _SHARE * len(rows):
        yield Sentence(
            f"{len(few):,} of the {len(rows):,} classes have fewer than {FEW} images, the smallest "
            f"{min(row.n for row in few)}: another sample of images could make another class the worst.",
            (*rows, FEW),
        )
    own = record.metric(ACCURACY(model=record.aliases[0]))
    if own.low is not None and own.high is not None:
        yield Sentence(
            f"The test images are a sample: with {own.n or 0:,} of them the accuracy of {record.aliases[0]} is known "
            f"to within {percent(own.low, 1)} and {percent(own.high, 1)}, for images of this kind only.",
            (own,),
        )


def _calibration_sentences(record: Record, alias: str) -> Iterator[Sentence]:
    error = record.metric(CALIBRATION_ERROR(model=alias))
    bins = [row for row in record.rows(CALIBRATION) if row.model == alias and row.count]
    small = [row for row in bins if row.count < FEW]
    held = f", {sum(row.count for row in small):,} of the images" if small else ""
    yield Sentence(
        f"{alias}: expected calibration error {in_words(error)}; {len(small)} of its {len(bins)} occupied bins hold "
        f"fewer than {FEW} images{held}.",
        (error, *bins, FEW, sum(row.count for row in small)),
    )
    predicted = [row for row in record.rows(PREDICTED) if row.model == alias]
    leaning = misjudged(predicted)
    if leaning:
        row = leaning[0]
        yield Sentence(
            f"{alias} is {leans(row.gap)} in {len(leaning)} of its {len(predicted)} predicted classes, most where it "
            f"predicts {row.class_name}: mean confidence minus accuracy {in_words(row.estimate)}."
            if len({leans(each.gap) for each in leaning}) == 1
            else f"Confidence differs from accuracy in {len(leaning)} of the {len(predicted)} predicted classes of "
            f"{alias}, in both directions.",
            tuple(predicted),
        )
    elif predicted:
        few = sum(row.n < FEW for row in predicted)
        weak = f"; {few} of them hold fewer than {FEW} images, which could hardly show it" if few else ""
        yield Sentence(
            f"In none of the {len(predicted)} predicted classes of {alias} does confidence differ significantly from "
            f"accuracy{weak}.",
            (*predicted, FEW),
        )


def _by_prediction(rows: tuple[PredictedClassRow, ...]) -> Table:
    return Table.of(
        "Confidence and accuracy by predicted class, the least probable under calibration first",
        sorted(rows, key=lambda row: (row.p_holm, row.p)),
        {
            "model": lambda row: row.model,
            "predicted class": lambda row: row.class_name,
            "images": lambda row: row.n,
            "mean confidence": lambda row: percent(row.confidence, 1),
            "accuracy": lambda row: percent(row.accuracy, 1),
            "difference": lambda row: in_words(row.estimate, with_n=False),
            "p (Holm)": lambda row: row.p_holm,
        },
    )
