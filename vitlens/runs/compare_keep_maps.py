"""What `vitlens compare` writes down of maps: where they look, what they share, and the images that are shown."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from vitlens.analysis.answers.evaluate import accuracy
from vitlens.analysis.failures.errors import CELLS, Comparison
from vitlens.analysis.faithfulness.localisation import mask_areas, pointing_hits
from vitlens.analysis.faithfulness.map_shares import as_shares
from vitlens.commands.scaffold.folder import RunFolder
from vitlens.data.split import Split
from vitlens.runs.compare_maps import Looks, Maps
from vitlens.uncertainty import bootstrap_difference, bootstrap_mean

LOOKS = {
    "half": "area of half the map",
    "spread": "spread of the map",
    "central": "map on the middle quarter",
    "inside": "map on the object",
}


def keep_looks(folder: RunFolder, maps: Maps, found: Looks, split: Split, comparison: Comparison, *, seed: int) -> None:
    """Where each model looks, how concentrated, how much is shared; means over the sampled maps that say something."""
    indices, sampled = maps.indices, maps.sampled
    groups = None if split.groups is None else split.groups[indices]
    masks = None if split.masks is None else split.masks[indices]
    known = None if masks is None else masks.flatten(1).any(1)
    aliases = comparison.first.alias, comparison.second.alias
    means = []

    def mean(name: str, values: Tensor, kept: Tensor) -> None:
        own = None if groups is None else groups[kept].numpy()
        folder.metric(name, bootstrap_mean(values[kept].numpy(), groups=own, seed=seed))

    for alias, values, looking in zip(aliases, (maps.first, maps.second), (found.first, found.second)):
        kept = looking.usable & sampled
        folder.metric(f"maps/usable/{alias}", accuracy(looking.usable[sampled]))
        if not kept.any():
            means.append(torch.full(found.grid, 1 / (found.grid[0] * found.grid[1])).double())
            continue
        for name in ("half", "spread", "central", "row", "column"):
            mean(f"look/{name}/{alias}", getattr(looking, name), kept)
        if masks is not None and known is not None and looking.inside is not None and (kept & known).any():
            seen = kept & known
            mean(f"look/inside/{alias}", looking.inside, seen)
            hits = pointing_hits(values[seen], masks[seen])
            folder.metric(f"localisation/pointing/{alias}", accuracy(hits, groups=_some(groups, seen), seed=seed))
        means.append(as_shares(values[kept], size=found.size, grid=found.grid).mean(0))
    if masks is not None and known is not None and (sampled & known).any():
        mean("look/object-area", mask_areas(masks), sampled & known)
    _keep_overlap(folder, found, sampled, groups, aliases, seed=seed)
    kept = found.overlap.usable & sampled
    folder.arrays(
        "looks", first=means[0].numpy(), second=means[1].numpy(), agreement=found.overlap.spearman[kept].numpy()
    )


def _keep_overlap(
    folder: RunFolder, found: Looks, sampled: Tensor, groups: Tensor | None, aliases: tuple[str, str], *, seed: int
) -> None:
    kept = found.overlap.usable & sampled
    if not kept.any():
        return
    own = None if groups is None else groups[kept].numpy()
    for name in ("spearman", "top", "shared"):
        values = getattr(found.overlap, name)[kept].numpy()
        unit = "" if name == "spearman" else "fraction"
        folder.metric(f"agreement/{name}/{'/'.join(aliases)}", bootstrap_mean(values, groups=own, seed=seed, unit=unit))
    one, two = (looking.half[kept].numpy() for looking in (found.first, found.second))
    folder.metric(f"half_difference/{'/'.join(aliases)}", bootstrap_difference(one, two, groups=own, seed=seed))


def keep_images(
    folder: RunFolder, comparison: Comparison, split: Split, maps: Maps, found: Looks, sheets: Mapping[str, Tensor]
) -> None:
    """The images that are shown, sheet by sheet: rows of the table images, their pixels and both maps.

    sheets: by name the indices of its images, in the order in which they are shown.
    """
    place = {index: row for row, index in enumerate(maps.indices.tolist())}
    shown = list(dict.fromkeys(index for indices in sheets.values() for index in indices.tolist()))
    folder.table(
        "images",
        [
            {"image": index, "file": split.files[index] if split.files else f"{split.name} {index}",
             "truth": comparison.classes[comparison.labels[index]], "cell": CELLS[comparison.cells[index]],
             "agreement": _agreement(found, place[index]), **_answer(comparison, index)}
            for index in shown
        ],
    )  # fmt: skip
    folder.table("sheets", [{"sheet": name, "images": indices.tolist()} for name, indices in sheets.items()])
    rows = torch.tensor([place[index] for index in shown], dtype=torch.long)
    where = torch.tensor(shown, dtype=torch.long)
    arrays = {"pixels": split.source.read(where).numpy()}
    arrays |= {name: _positive(values[rows]) for name, values in (("first", maps.first), ("second", maps.second))}
    if split.masks is not None:
        arrays["masks"] = split.masks[where].numpy()
    folder.arrays("images", **arrays)


def _agreement(found: Looks, row: int) -> float | None:
    """Of one image's maps; None where either says nothing."""
    return round(float(found.overlap.spearman[row]), 4) if bool(found.overlap.usable[row]) else None


def _answer(comparison: Comparison, index: int) -> dict[str, object]:
    return {
        key: value
        for name, model in (("first", comparison.first), ("second", comparison.second))
        for key, value in (
            (f"{name}_prediction", comparison.classes[model.prediction[index]]),
            (f"{name}_probability", round(float(model.confidence[index]), 4)),
        )
    }


def _positive(maps: Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    """What is drawn: the positive part, finite."""
    return np.asarray(maps.nan_to_num(0.0, 0.0, 0.0).clamp_min(0).numpy(), dtype=np.float32)


def _some(groups: Tensor | None, kept: Tensor) -> Tensor | None:
    return None if groups is None else groups[kept]


def sheets_of(maps: Maps, found: Looks, chosen: Sequence[Tensor], *, panels: int) -> Iterator[tuple[str, Tensor]]:
    """Which images are shown on which sheet: panels by rising agreement, then examples of each cell.

    The panels are evenly spaced over the ranking of all sampled maps that say something, so that they show the whole
    range and not its end alone.
    """
    kept = (found.overlap.usable & maps.sampled).nonzero().flatten()
    order = kept[found.overlap.spearman[kept].argsort(stable=True)]
    count = min(panels, len(order))
    if count:
        spaced = torch.linspace(0, len(order) - 1, count, dtype=torch.float64).round().long()
        yield "panels", maps.indices[order[spaced]]
    for cell, indices in zip(CELLS, chosen):
        if len(indices):
            yield cell, indices
