"""What could overturn the findings of an ablation, with this run's numbers."""

from collections.abc import Iterator
from math import comb

from vitlens.commands.ablate.conclusions import images_in, smallest_in
from vitlens.commands.ablate.judgement import images_needed, of_judgement
from vitlens.commands.ablate.options import AblateOptions
from vitlens.commands.ablate.ranking import REPLACED, heads_of, main_replacement, main_rows
from vitlens.commands.ablate.record import ELIMINATION, HEAD_LABELS, PAIRS
from vitlens.records import Record
from vitlens.report.document import Sentence
from vitlens.report.numbers import in_words
from vitlens.uncertainty import Estimate


def limits(record: Record) -> Iterator[Sentence]:
    """At most four, those that touch most heads first."""
    if record.options(AblateOptions).top is not None:
        yield _one_at_a_time(record, len(record.rows(ELIMINATION)))
        return
    heads = heads_of(main_rows(record))
    yield from _undecided(record)
    if len(heads) > 1:
        yield _one_at_a_time(record, len(heads))
    yield from _replacements(record)
    labels = record.rows(HEAD_LABELS)
    if labels:
        yield Sentence(
            f"What a head does was labelled on {labels[0].images} images by where it attends, not by what it writes: a "
            "head may attend to a neighbour and matter for another reason.",
            labels,
        )


def _undecided(record: Record) -> Iterator[Sentence]:
    heads = heads_of(main_rows(record))
    if not heads:
        return
    smallest, n = smallest_in(record), images_in(record)
    undecided = of_judgement(heads, smallest, "undecided")
    needed = images_needed(undecided, smallest, n)
    if undecided and needed is not None:
        yield Sentence(
            f"On {n:,} images {len(undecided)} of {len(heads)} heads are neither shown to change the loss by "
            f"{in_words(smallest)} nor to change it by less; about {needed.value:,.0f} images would decide.",
            (*heads, smallest, needed, Estimate(float(n), unit="images")),
        )


def _one_at_a_time(record: Record, heads: int) -> Sentence:
    removed, every = len(record.rows(PAIRS)), comb(heads, 2)
    counts = tuple(Estimate(float(count), unit="") for count in (heads, removed, every))
    return Sentence(
        f"Heads were removed one at a time, and {removed:,} of {every:,} pairs together: of other heads with the same "
        "function each can appear unimportant.",
        counts,
    )


def _replacements(record: Record) -> Iterator[Sentence]:
    names, by = record.options(AblateOptions).replace, main_replacement(record)
    if by == "zero":
        yield Sentence(
            "Outputs were replaced by zero, which no image produces: part of each effect may come from that. Compare "
            "`--replace resample`.",
            says="setting",
        )
    elif "resample" not in names:
        yield Sentence(
            f"Outputs were replaced by {REPLACED[by]} alone, which hides a head whose output the model needs to differ "
            "from image to image; `--replace mean,resample` finds such heads.",
            says="setting",
        )
