"""What `vitlens stats --over-training` draws and tells, from its folder alone."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from vitlens.analysis.heads.registry import STATISTICS, shown_in
from vitlens.figures.stats.training import MOMENTS, head_courses, position_courses
from vitlens.files import RunRecord
from vitlens.runs.report import Drawn
from vitlens.runs.sections import Section, Table, in_words, metrics
from vitlens.runs.stats_film import PLACE
from vitlens.runs.stats_learning import ARRAYS, near

_LINES = 12  # of the table of means


def draw_learning(record: RunRecord) -> Iterator[Drawn]:
    """Every head's course over the epochs, and the similarity of positions at a few moments."""
    if not record.has_arrays(ARRAYS):
        return
    found: Any = record.arrays(ARRAYS)
    for name in shown_in("training"):
        if name not in found or bool(np.isnan(found[name]).all()):
            continue
        title = STATISTICS[name].title
        figure = head_courses(
            epochs=found["epochs"].tolist(),
            values=found[name],
            title=f"{title[0].upper()}{title[1:]}, every head over training",
            label=STATISTICS[name].label,
            uniform=found["uniform_distance"] if name == "distance" else None,
        )
        yield Drawn(f"learning_{name}", figure, f"Epoch 0 is before training. {STATISTICS[name].reading}")
    if "similarity" in found:
        places = _spread(len(found["epochs"]), MOMENTS)
        figure = position_courses(epochs=found["epochs"][places].tolist(), similarity=near(found["similarity"])[places])
        caption = (
            "Mean over all pairs of positions that lie so far apart, up to half the grid; the middle, 1, is a position "
            "with itself. Random embeddings show no pattern; a cross means that those of rows or columns became alike."
        )
        yield Drawn("learning_positions", figure, caption)


def learning_figures(record: RunRecord) -> tuple[str, ...]:
    """The names of what draw_learning draws, in its order."""
    found: Any = record.arrays(ARRAYS)
    names = [name for name in shown_in("training") if name in found and not bool(np.isnan(found[name]).all())]
    return tuple(f"learning_{name}" for name in [*names, *(["positions"] if "similarity" in found else [])])


def tell_learning(record: RunRecord) -> Iterator[Section]:
    """A section where the weights of a training were looked at, else none."""
    if not record.has_arrays(ARRAYS):
        return
    epochs = [int(epoch) for epoch in np.asarray(record.arrays(ARRAYS)["epochs"])]
    means = metrics(record)
    chosen = [name for name in shown_in("training") if f"learning/{name}/{epochs[-1]}" in means]
    tables = [_means(record, epochs, chosen)]
    found: Any = record.results["tables"]
    if "positions" in found:
        tables.append(_positions(record, len(epochs)))
    words = tuple(_words(record, epochs, chosen))
    yield Section("How the heads came to be", words, tuple(tables), learning_figures(record))


def _means(record: RunRecord, epochs: Sequence[int], chosen: Sequence[str]) -> Table:
    found = metrics(record)
    rows: list[dict[str, Any]] = []
    for place in _spread(len(epochs), _LINES):
        means = {STATISTICS[name].title: found[f"learning/{name}/{epochs[place]}"] for name in chosen}
        rows.append({"epoch": epochs[place], **means})
    return Table("Mean of all heads, with 95 % intervals over images", rows)


def _words(record: RunRecord, epochs: Sequence[int], chosen: Sequence[str]) -> Iterator[str]:
    means, options = metrics(record), record.config["options"]
    assert isinstance(options, dict)
    first = means[f"learning/{chosen[0]}/{epochs[0]}"]
    yield (
        f"The weights of {len(epochs)} moments, after {epochs[0]} to {epochs[-1]} epochs, looked at {first.n} images, "
        "the same for all (a seeded choice, as many of each class). Those kept are in half precision."
    )
    for name in chosen:
        before, after = (in_words(means[f"learning/{name}/{epoch}"]) for epoch in (epochs[0], epochs[-1]))
        yield f"Mean {STATISTICS[name].title}: {before} after {epochs[0]} epochs, {after} after {epochs[-1]}."
    if options.get("animate"):
        place = PLACE.format(form=options["animate"])
        yield f"As a film, all scales fixed: [{place}]({place})."


def _positions(record: RunRecord, moments: int) -> Table:
    found = record.table("positions")
    rows: list[dict[str, Any]] = [
        {"epoch": row["epochs"], "four neighbours": row["neighbours"], "all others": row["others"]}
        for row in (found[place] for place in _spread(moments, _LINES))
    ]
    return Table("Cosine similarity of position embeddings, means over pairs", rows)


def _spread(count: int, most: int) -> list[int]:
    """At most so many of count places, evenly spaced, with the first and the last."""
    return [int(place) for place in np.linspace(0, count - 1, min(count, most)).round()]
