"""What could overturn the findings on features, the most serious first; at most five."""

from collections.abc import Iterator

from vitlens.commands.features.record import DATA, DEPTH, PROBE_ACCURACY, SIMILARITY, SPACE
from vitlens.records import Record
from vitlens.report.document import Sentence
from vitlens.report.numbers import in_words
from vitlens.uncertainty import Estimate


def limits(record: Record) -> Iterator[Sentence]:
    """At most five."""
    (data,) = record.rows(DATA)
    if data.bank is not None:
        yield Sentence(
            f"The {data.bank:,} images with which the features are read are the training part of the data. A model "
            "that was trained on them separates them better than unseen images: its neighbours are not comparable "
            "with those of a model that never saw them.",
            (data,),
        )
    probed = [(alias, record.metrics.get(PROBE_ACCURACY(model=alias))) for alias in record.aliases]
    for alias, estimate in probed:
        if estimate is not None:
            yield Sentence(
                f"A probe that reaches {in_words(estimate, with_n=False)} shows that the last layer of `{alias}` holds "
                "the class, not that the model uses it (vitlens ablate tests that); what is not linear it cannot read.",
                (estimate,),
            )
            break
    depth = record.rows(DEPTH)
    if depth:
        yield Sentence(
            f"The highest of {len({(row.model, row.layer) for row in depth}):,} layers is high partly by chance; the "
            "test images that choose it are those that measure it.",
            depth,
        )
    yield from _maps(record)
    similar = [row for row in record.rows(SIMILARITY) if row.first != row.second]
    if similar:
        yield Sentence(
            f"CKA compares {similar[0].images:,} images of one kind, and weighs the directions in which they vary "
            "most: two models with a high CKA may still classify different images correctly.",
            tuple(similar),
        )


def _maps(record: Record) -> Iterator[Sentence]:
    """How little of the features a map shows."""
    rows = [row for row in record.rows(SPACE) if row.explained is not None and row.of in ("images", "patches")]
    if rows:
        row = min(rows, key=lambda row: sum(row.explained or ()))
        share = Estimate(sum(row.explained or ()))
        yield Sentence(
            f"PCA of the {row.of} of `{row.model}` shows {in_words(share)} of their variance in two dimensions, and "
            "t-SNE distorts every distance: what looks separate in a map may not be.",
            (row, share),
        )
