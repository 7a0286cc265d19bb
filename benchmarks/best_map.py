"""`best` and published methods against known places, and by deletion and insertion.

On sets that the choice of its form looked at, and on others.

    VITLENS_DATA=../shared/data python benchmarks/best_map.py [--part places|removal] > tables of
        benchmarks/best_map.md

Every number is a mean over maps with its 95 % bootstrap interval; differences are paired, with
relevance on the same maps. Composites are resampled by composite, as several maps are of one.
"""

import argparse
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from vitlens.analysis.evaluation.evaluate import predicted_logits
from vitlens.analysis.evaluation.intervals import estimates
from vitlens.analysis.faithfulness.localisation import (
    cell_mass,
    confident_images,
    embedded,
    mosaics,
    pasted,
    pointing_hits,
    roc_auc,
)
from vitlens.analysis.faithfulness.removal import faithfulness
from vitlens.attribution.explain import explain
from vitlens.attribution.refinement import Refinement
from vitlens.data.catalogue import load_data
from vitlens.models.loading import load
from vitlens.models.model import Model
from vitlens.uncertainty import Estimate

METHODS: Mapping[str, tuple[str, Refinement | None]] = {
    "relevance": ("relevance", None),
    "gradient-rollout": ("gradient-rollout", None),
    "gradcam": ("gradcam", None),
    "legrad": ("legrad", None),
    "libra-relevance": ("libra-relevance", None),
    "relevance, affinity": ("relevance", Refinement(refine="affinity")),
    "gradient-rollout, affinity": ("gradient-rollout", Refinement(refine="affinity")),
    "eigencam": ("eigencam", None),
    "best": ("best", None),
}
PUBLISHED = 5  # the first of METHODS are those of papers
SEED = 7  # of composites kept aside; the choice looked at others


@dataclass(frozen=True)
class Places:
    """Images with the target of each and where its evidence lies; groups: maps of one image."""

    name: str
    model: Model
    images: Tensor
    targets: Tensor
    masks: Tensor
    groups: Tensor


def masked(data: Path) -> tuple[Tensor, Tensor, Tensor]:
    """Return the 56 photographs with their ImageNet class and mask, as the model's own loader reads
    them.
    """
    index = json.loads((data / "coco_masks" / "index.json").read_text())
    split = load_data(str(data / "coco_masks"), whole=True)
    classes = {Path(row["file"]).stem: int(row["imagenet_class"]) for row in index}
    assert split.masks is not None
    assert split.files is not None
    targets = torch.tensor([classes[Path(name).stem] for name in split.files])
    (batch,) = split.batches(len(split))
    return batch.images, targets, split.masks


def sets(data: Path) -> Iterator[Places]:
    """Yield the sets, those that the choice looked at first."""
    weights = data / "weights" / "deit_tiny_patch16_224.safetensors"
    deit = load(f"timm:deit_tiny_patch16_224@{weights}")
    images, targets, masks = masked(data)
    yield Places(
        "masks (DeiT-tiny; looked at)", deit, images, targets, masks, torch.arange(len(images))
    )
    scenes = load_data("digits")
    vit = load("vit-digits")
    assert scenes.masks is not None
    assert scenes.labels is not None
    for name, first in (
        ("digits (vit-digits; looked at)", 0),
        ("digits, other scenes (vit-digits)", 150),
    ):
        chosen = torch.arange(first, first + 150)
        (batch,) = scenes.pick(chosen).batches(150)
        groups = torch.arange(150) if scenes.groups is None else scenes.groups[chosen]
        yield Places(name, vit, batch.images, scenes.labels[chosen], scenes.masks[chosen], groups)
    photos = load_data(str(data / "photos"), preprocessing=deit.preprocessing, whole=True)
    assert photos.labels is not None
    sure = confident_images(predicted_logits(deit, photos), photos.labels, least=0.6)
    (batch,) = photos.pick(sure).batches(len(sure))
    labels = photos.labels[sure]
    made = {
        "mosaics of 2 x 2, other draws": mosaics(batch.images, labels, side=2, count=20, seed=SEED),
        "mosaics of 3 x 3, other draws": mosaics(batch.images, labels, side=3, count=6, seed=SEED),
        "embedded, other draws": embedded(batch.images, labels, count=40, seed=SEED),
        "pasted, other backgrounds": pasted(images, targets, masks, count=40, seed=SEED),
    }
    for name, composites in made.items():
        shown = composites.images[composites.which]
        yield Places(
            f"{name} (DeiT-tiny)",
            deit,
            shown,
            composites.targets,
            composites.masks.bool(),
            composites.which,
        )


def maps_of(places: Places, name: str) -> Tensor:
    """Return the maps of one of METHODS."""
    method, refinement = METHODS[name]
    return explain(
        places.model,
        places.images,
        targets=places.targets,
        method=method,
        refinement=refinement,
        batch_size=16,
    )


def shown(estimate: Estimate) -> str:
    """Value and interval to three decimals."""
    return f"{estimate.value:.3f} ({estimate.low:.3f} to {estimate.high:.3f})"


def places_table(data: Path) -> None:
    """Localisation of every method on every set."""
    for places in sets(data):
        print(
            f"\n### {places.name}: n = {len(places.targets)}, mean area "
            f"{places.masks.float().mean():.3f}\n"
        )
        print(
            "| method | ROC-AUC | minus relevance | pointing | mass inside |\n| --- | --- | --- | "
            "--- | --- |"
        )
        base: Tensor | None = None
        for name in METHODS:
            maps = maps_of(places, name)
            auc = roc_auc(maps, places.masks)
            base = auc if base is None else base
            hits = pointing_hits(maps, places.masks).float()
            mass = cell_mass(maps, places.masks)
            rows = torch.stack([auc, auc - base, hits, mass])
            cells = [shown(estimate) for estimate in estimates(rows, groups=places.groups)]
            print(f"| {name} | {' | '.join(cells)} |", flush=True)


def with_photographs(data: Path) -> Iterator[Places]:
    """Yield the masks' photographs, the digits kept aside, and the other photographs, of which no
    masks are known.
    """
    for places in sets(data):
        if places.name in ("masks (DeiT-tiny; looked at)", "digits, other scenes (vit-digits)"):
            yield places
        if "DeiT" in places.name:
            deit = places.model
    photos = load_data(str(data / "photos"), preprocessing=deit.preprocessing, whole=True).limit(
        60, seed=SEED
    )
    assert photos.labels is not None
    (batch,) = photos.batches(len(photos))
    nowhere = torch.zeros(len(photos), *batch.images.shape[-2:], dtype=torch.bool)
    yield Places(
        "photographs (DeiT-tiny)",
        deit,
        batch.images,
        photos.labels,
        nowhere,
        torch.arange(len(photos)),
    )


def removal_table(data: Path) -> None:
    """Insertion minus deletion by blurred patches in 10 steps, and its difference from the best
    published method.
    """
    for places in with_photographs(data):
        maps = [maps_of(places, name) for name in METHODS]
        found = faithfulness(places.model, places.images, places.targets, maps, steps=10)
        gaps = torch.stack([each.gaps for each in found])
        print(f"\n### {places.name}: n = {gaps.shape[1]}\n")
        published = max(range(PUBLISHED), key=lambda place: gaps[place].mean().item())
        print(
            f"| method | insertion - deletion | minus {list(METHODS)[published]} |\n| --- | --- | "
            "--- |"
        )
        differences = estimates(gaps - gaps[published], groups=places.groups)
        for name, gap, difference in zip(
            METHODS, estimates(gaps, groups=places.groups), differences
        ):
            print(f"| {name} | {shown(gap)} | {shown(difference)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", choices=("places", "removal"), default="places")
    data = Path(os.environ["VITLENS_DATA"])
    {"places": places_table, "removal": removal_table}[parser.parse_args().part](data)


if __name__ == "__main__":
    main()
