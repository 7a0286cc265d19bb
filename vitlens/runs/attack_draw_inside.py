"""What `vitlens attack` draws of single images and of what changes inside, from its folder alone."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from vitlens.analysis.heads.registry import STATISTICS
from vitlens.figures.attack_examples import Before, attack_examples
from vitlens.figures.attack_inside import LayerShift, attention_shifts, parting_paths
from vitlens.files import RunRecord
from vitlens.runs.attack_words import epsilon_words
from vitlens.runs.report import Drawn

Rows = Sequence[Mapping[str, Any]]


def aliases_of(record: RunRecord) -> list[str]:
    """What the models are called."""
    models: Any = record.config["models"]
    return [str(model["alias"]) for model in models]


def rows_of(record: RunRecord, name: str) -> Rows:
    """The rows of a table; none where it was not asked for."""
    tables: Any = record.results["tables"]
    rows: Rows = tables.get(name, [])
    return rows


def draw_examples(record: RunRecord) -> Iterator[Drawn]:
    """Single images before and after, with their maps, model by model."""
    for row in rows_of(record, "sample"):
        alias = str(row["model"])
        if not record.has_arrays(f"examples-{alias}"):
            continue
        found: Any = record.arrays(f"examples-{alias}")
        clean = found["pixels"] / np.float32(255)
        change = found["change"].astype(np.float32)
        words = [
            [Before(str(word), float(sure)) for word, sure in zip(answers, probabilities)]
            for answers, probabilities in zip(found["answers"], found["probability"])
        ]
        figure = attack_examples(
            clean=clean, adversarial=np.clip(clean + change, 0, 1), maps_before=found["before"],
            maps_after=found["after"], before=words[0], after=words[1],
            notes=[f"L∞ {255 * np.abs(one).max():.2g}/255\nL2 {np.linalg.norm(one):.2g}" for one in change],
            title=f"{alias} before and after {row['title']} at {epsilon_words(row)}", map_name="map",
        )  # fmt: skip
        yield Drawn(
            f"examples_{alias}",
            figure,
            f"Some of the images that fooled {alias}. Maps: {found['method']} for the true class, as shares of their "
            "sum in times an even map. The perturbation is drawn around grey, amplified as its title says. A map that "
            "changes need not be why the answer changed.",
        )


def draw_inside(record: RunRecord) -> Iterator[Drawn]:
    """Where paths part by block, and how attention shifts by layer."""
    blocks, layers = rows_of(record, "blocks"), rows_of(record, "shifts")
    if blocks:
        models = {
            f"{alias}, {_images_of(blocks, alias)} images": {
                kind: _ends([row for row in blocks if row["model"] == alias and row["kind"] == kind])
                for kind in dict.fromkeys(str(row["kind"]) for row in blocks if row["model"] == alias)
            }
            for alias in dict.fromkeys(str(row["model"]) for row in blocks)
        }
        yield Drawn(
            "paths",
            parting_paths(models=models, title="Where the paths of clean and adversarial images part"),
            "One minus the cosine between a block's whole output for the clean image and for another: the adversarial "
            "one, the clean one with random noise as strong, and another image of the sample; each grey line is ten "
            "times the one below. What an attack does that noise of its strength does not is the room between the two.",
        )
    if layers:
        shifts = []
        for name in dict.fromkeys(str(row["statistic"]) for row in layers):
            known = STATISTICS[name]
            curves = {
                alias: _ends(
                    [row for row in layers if row["model"] == alias and row["statistic"] == name], places="layer"
                )
                for alias in dict.fromkeys(str(row["model"]) for row in layers if row["statistic"] == name)
            }
            shifts.append(LayerShift(known.title, f"after − before ({known.unit})", curves))
        yield Drawn(
            "shifts",
            attention_shifts(shifts=shifts, title="What the attack changes in attention, means over heads"),
            "After minus before, image by image, for the images that were fooled. Heads of a layer may change in "
            "opposite ways and cancel out here.",
        )


def _images_of(rows: Rows, alias: str) -> int:
    return next(int(row["n"]) for row in rows if row["model"] == alias)


def _ends(rows: Rows, *, places: str = "block") -> Any:
    """Values, lows and highs by block or layer, NaN where there is none."""
    found = np.full((3, 1 + max(int(row[places]) for row in rows)), np.nan)
    for row in rows:
        found[:, int(row[places])] = [np.nan if row[end] is None else row[end] for end in ("value", "low", "high")]
    return found
