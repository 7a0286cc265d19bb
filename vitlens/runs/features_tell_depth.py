"""What `vitlens features` tells of accuracy by layer: its section with tables, from the run's folder alone."""

from collections.abc import Iterator
from typing import Any

from vitlens.files import RunRecord
from vitlens.runs import features_words as words
from vitlens.runs.features_record import ROWS, aliases_of, name_of_classifier, neighbours_asked, rows_of
from vitlens.runs.sections import Cell, Section, Table
from vitlens.uncertainty import Estimate


def depth_sections(record: RunRecord) -> Iterator[Section]:
    """Where on the way knowledge comes about, in sentences and tables; none without labels."""
    rows = rows_of(record, "depth")
    if not rows:
        return
    said: list[str] = []
    for classifier in ("probe", f"knn-{max(neighbours_asked(record))}"):
        for alias in aliases_of(record):
            said += words.over_depth(rows, alias, classifier, name_of_classifier(classifier))
    yield Section("What each layer knows", tuple(said), tuple(_tables(record, rows)), ("depth",))


def _tables(record: RunRecord, rows: list[dict[str, Any]]) -> Iterator[Table]:
    """A line a layer, a column a classifier; plain majority apart, and the models pair by pair."""
    count = f"on {int(rows[0]['n']):,} test images, by layer"
    for votes, caption in (
        ("dino", f"Accuracy {count}: linear probe, and neighbours whose votes are weighted by similarity"),
        ("majority", f"Accuracy {count}: neighbours with a vote each"),
    ):
        lines: dict[tuple[str, str], dict[str, Cell]] = {}
        for row in rows:
            classifier = str(row["classifier"])
            if row.get("weighting", "dino") != votes or (votes == "majority" and classifier == "knn-1"):
                continue  # one neighbour alone has all the votes
            line = lines.setdefault((row["model"], row["title"]), {"model": row["model"], "layer": row["title"]})
            line["dim"] = row["dim"]
            found = Estimate(float(row["accuracy"]), float(row["low"]), float(row["high"]))
            line[name_of_classifier(classifier)] = found
        if lines:
            more = f" (the first {ROWS} of {len(lines)} layers)" if len(lines) > ROWS else ""
            yield Table(caption + more, list(lines.values())[:ROWS])
    pairs = rows_of(record, "pairs")
    if pairs:
        yield Table(f"The last layers on the same {int(pairs[0]['n']):,} images", [_pair(row) for row in pairs])


def _pair(row: dict[str, Any]) -> dict[str, Cell]:
    gap = Estimate(float(row["difference"]), row["low"], row["high"], unit="points")
    return {
        "classifier": name_of_classifier(row["classifier"]),
        "models": f"{row['first']} minus {row['second']}",
        "difference": gap,
        "p (McNemar, Holm)": float(row["p_holm"]),
    }
