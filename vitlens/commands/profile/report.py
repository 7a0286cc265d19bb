"""The report of `vitlens profile`: speed, parts, and growth of cost."""

from collections.abc import Iterator, Sequence
from math import prod
from typing import Final

from vitlens.charts import lines, matrix
from vitlens.commands.profile.claims import (
    best_batches,
    claims,
    common_batches,
    in_pixels,
    noisy_rows,
)
from vitlens.commands.profile.record import ProfileRecord, SpeedRow
from vitlens.display import protected, visible
from vitlens.report.prose import finalize, say
from vitlens.report.sections import Chart, Glance, Report, Section

_MOST_LEFT_OUT: Final = 2  # sentences about image sizes at which a model does not run


def unknown(record: ProfileRecord) -> Iterator[str]:
    """Yield what could overturn a comparison of costs, the most serious first."""
    if noisy_rows(record.speed):
        yield (
            "Other processes ran during the timings. Repeat them on an idle machine before you "
            "compare latencies."
        )
    yield say(
        "Latency was measured on one machine ({{ machine.name }}, {{ machine.threads }} "
        "thread{{ machine.threads|s }}, {{ machine.arithmetic }}). On another machine, the order "
        "of the models may differ.",
        machine=record.machine[0],
    )
    smallest = min(record.costs, key=lambda row: prod(row.size))
    largest = max(record.costs, key=lambda row: prod(row.size))
    if smallest.size != largest.size:
        yield say(
            "The models use different image sizes, from {{ smallest_size }} px "
            "({{ smallest.model }}) to {{ largest_size }} px ({{ largest.model }}). Differences "
            "may be due to size, not to architecture.",
            smallest=smallest,
            largest=largest,
            smallest_size=in_pixels(smallest.size),
            largest_size=in_pixels(largest.size),
        )
    for row in record.left_out[:_MOST_LEFT_OUT]:
        yield say(
            "**{{ row.model }}** does not run at {{ size }} px ({{ row.reason }}); its growth "
            "curve lacks this size.",
            row=row,
            size=in_pixels(row.size),
        )
    yield (
        "Accuracy was not measured, because cost does not depend on the weights. Use `vitlens "
        "evaluate`."
    )


def definitions(record: ProfileRecord) -> Iterator[tuple[str, str]]:
    """Yield the parts of the models with their meaning; numbered stages share one definition."""
    meanings = {}
    for row in record.parts:
        name = finalize(row.part.rstrip(" 0123456789"))
        meanings[name] = protected(visible(row.meaning))
    yield from meanings.items()


def _smallest_batch(record: ProfileRecord) -> Sequence[SpeedRow]:
    batches = common_batches(record)
    return batches[0] if batches else ()


def _products_words(record: ProfileRecord) -> str:
    """Return the share of attention products in the FLOPs, and from which length they dominate."""
    sentences = []
    for row in record.costs:
        if not row.products:
            continue
        sentence = say(
            "At the {{ row.tokens }} tokens of **{{ row.model }}**, attention products are "
            "{{ share|percent(1) }} of its FLOPs.{% if row.crossover is not none %} At "
            "{{ row.crossover|number }} tokens, they would be as many as those of the rest of its "
            "blocks.{% endif %}",
            row=row,
            share=row.products / row.flops,
        )
        sentences.append(sentence)
    if not sentences:
        return "No model has attention."
    return " ".join(sentences)


REPORT: Final = Report(
    ProfileRecord,
    claims=claims,
    unknown=unknown,
    about_weights=False,
    definitions=definitions,
    picture=Chart(
        "parts",
        matrix("model", "part", "of_flops"),
        "Share of each part in the FLOPs of its model, in %.",
        title="Where the FLOPs are",
        rows="parts",
    ),
    glance=(
        Glance(_smallest_batch, "latency", question="timings", title="latency, smallest batch"),
        Glance(best_batches, "rate", title="highest throughput"),
        Glance("costs", "parameters"),
        Glance("costs", "flops"),
        Glance("costs", "training_bytes"),
        Glance("costs", "inference_bytes"),
        Glance("costs", "tokens"),
    ),
    sections=(
        Section(
            "Which parts cost most?",
            "parts",
            opening=_products_words,
            order=lambda row: -(row.of_flops or 0.0),
            columns=("model", "part", "parameters", "flops"),
        ),
        Section(
            "At which batch size is a model fastest?",
            best_batches,
            about=("timings",),
            order=lambda row: -row.rate.value,
            opening="The table shows each model at the batch size with the highest throughput.",
            columns=("model", "images", "latency", "rate", "spread", "device_bytes"),
            charts=(
                Chart(
                    "speed",
                    lines("images", "rate", of="model", loglog=True),
                    "Throughput by batch size: medians over passes with 95 % intervals. Where a "
                    "curve is flat, larger batches are no faster.",
                    title="Throughput by batch size",
                    rows="speed",
                ),
            ),
        ),
        Section(
            "How does cost grow with the number of tokens?",
            "exponents",
            opening="An exponent of one means that cost is proportional to the number of tokens.",
            columns=("model", "sweep", "cost", "exponent", "tokens_from", "tokens_to"),
            charts=(
                Chart(
                    "growth",
                    lines("tokens", "latency", of="model", loglog=True),
                    "Latency by number of tokens, on logarithmic axes. The slope of a straight "
                    "line is the exponent. For CNNs, tokens are positions of the first block.",
                    title="Latency by number of tokens, varied by "
                    "{{ first.sweep|replace('-', ' ') }}",
                    rows="tokens",
                    each="sweep",
                ),
            ),
        ),
    ),
)
