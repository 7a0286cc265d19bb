"""What could overturn a comparison of costs, the most serious first; at most five."""

from collections.abc import Iterator

from vitlens.commands.profile.conclusions import DISTURBED, common_batches, disturbed, ratio, times_at
from vitlens.commands.profile.record import COSTS, SPEED, MachineRow
from vitlens.records import Record
from vitlens.report.document import Sentence
from vitlens.report.numbers import number


def limits(record: Record, machine: MachineRow) -> Iterator[Sentence]:
    """At most five."""
    rows = record.rows(SPEED)
    noisy = disturbed(rows)
    if noisy:
        yield Sentence(
            f"At {len(noisy)} of {len(rows)} batch sizes the upper quartile is more than {DISTURBED} times the lower, "
            "so other work probably ran on this machine. Repeat the measurement on an idle machine before comparing "
            "times.",
            (*rows, DISTURBED),
        )
    threads = f"{machine.threads} thread{'s' if machine.threads != 1 else ''}"
    yield Sentence(
        f"Times were measured on this machine ({machine.name}, {threads}, {machine.arithmetic}) under its load at the "
        "time; on other machines the order of models may differ.",
        (machine,),
    )
    yield from _sizes(record)
    yield from _flops(record)
    fewest = min(row.repeats for row in rows)
    yield Sentence(
        f"The medians are of {fewest} passes or more; their intervals assume independent passes, while successive ones "
        "are correlated. They include normalisation, but not reading, decoding and resizing of images.",
        (*rows, fewest),
    )


def _sizes(record: Record) -> Iterator[Sentence]:
    """That models work on images of different sizes."""
    rows = record.rows(COSTS)
    small, large = (choose(rows, key=lambda row: row.size[0] * row.size[1]) for choose in (min, max))
    if small.size != large.size:
        yield Sentence(
            f"Each model is timed at its own input size, from {small.size[0]} by {small.size[1]} px ({small.model}) to "
            f"{large.size[0]} by {large.size[1]} px ({large.model}): a difference is one of size as much as of "
            "architecture.",
            (small, large),
        )


def _flops(record: Record) -> Iterator[Sentence]:
    """How far FLOPs are from predicting the times of this run."""
    costs, batches = {row.model: row for row in record.rows(COSTS)}, common_batches(record)
    times = times_at(record, batches[0]) if batches else {}
    if len(times) < 2:
        return
    fast, slow = min(times, key=lambda alias: times[alias].value), max(times, key=lambda alias: times[alias].value)
    work, time = costs[slow].flops / costs[fast].flops, ratio(times[slow], times[fast])
    yield Sentence(
        f"FLOPs do not determine time: {slow} needs {number(work)} times the FLOPs of {fast} and {number(time.value)} "
        f"times its latency in batches of {batches[0]}. Memory access and what is not counted (norms, softmax, "
        "activations) take time, too.",
        (costs[slow], costs[fast], work, time, batches[0]),
    )
