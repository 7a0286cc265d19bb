"""Measurements inside the model: labels and exemplars of heads, activation patching, logit lens,
contributions.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from vitlens.analysis.evaluation.evaluate import accuracy
from vitlens.analysis.heads.registry import MIXED, UNLABELLED, head_words
from vitlens.analysis.heads.specialisation import HeadLabel, specialise
from vitlens.analysis.heads.statistics import Stream
from vitlens.analysis.patching.contribution import (
    above_mean,
    direct_logit_attribution,
    key_contributions,
    label_contributions,
)
from vitlens.analysis.patching.logit_lens import logits_by_depth
from vitlens.analysis.patching.patching import corrupt, patch_parts
from vitlens.commands.ablate.ablation_setup import AblationSetup
from vitlens.commands.ablate.record import (
    ContributionRow,
    ExemplarArrays,
    ExemplarRow,
    LensRow,
    PatchingArrays,
    PatchingRow,
)
from vitlens.commands.run.progress import phase
from vitlens.data.catalogue import load_images
from vitlens.errors import InputError, UnsupportedError
from vitlens.lens.trace import blocks
from vitlens.models.model import Model
from vitlens.shapes import TokenLayout
from vitlens.uncertainty import finite

# most images for labels of heads, the lens and contributions; the patched pair is among them
_IMAGES: Final = 64
_EXEMPLARS: Final = 2  # images shown for each head
_LARGEST: Final = 96  # px, longest side of a stored exemplar
_CANDIDATES: Final = 8  # images that are corrupted to find one whose prediction changes
# in the order of trial
_CORRUPTIONS: Final = {"blur": "blurred", "shuffle": "tiles shuffled", "noise": "with noise"}

Fields = dict[str, Any]  # of the record


@phase("What each head attends to")
def label_heads(setup: AblationSetup) -> dict[tuple[int, int], str]:
    """Return a label for the attention of each head, by layer and head.

    Empty for attention without a place in the image.
    """
    split = setup.run.split.pick(setup.first_images(_IMAGES))
    stream = Stream(setup.run.model, groups=split.groups)
    try:
        for batch in split.batches(setup.batch_size, device=setup.run.model.device):
            masks = None
            if split.masks is not None:
                masks = split.masks[batch.indices]
            stream.add(batch.images, masks=masks)
    except UnsupportedError:  # attention between channels, or heads of several shapes in one layer
        return {}
    labels = {}
    for layer, heads in enumerate(specialise(stream.result()).head_labels):
        for head, label in enumerate(heads):
            labels[layer, head] = _label_words(label)
    return labels


def _label_words(label: HeadLabel) -> str:
    if label.label in (MIXED, UNLABELLED):
        return head_words(label.label, label.best, label.other or None, label.score)
    return label.label


def measure_inside(setup: AblationSetup) -> tuple[Fields, tuple[str, ...]]:
    """Return the fields of the record that are measured inside the model, and the reasons for
    missing ones.

    Raises InputError if the images of --clean and --corrupted cannot be patched.
    """
    fields: Fields = {}
    reasons: list[str] = []
    indices = setup.first_images(_IMAGES)
    [batch] = setup.run.split.pick(indices).batches(len(indices), device=setup.run.model.device)
    parts: tuple[Callable[[AblationSetup, Tensor, Tensor], Fields], ...] = (
        _patch,
        _apply_lens,
        _measure_contributions,
        _find_exemplars,
    )
    for part in parts:
        try:
            fields |= part(setup, batch.images, setup.labels[indices])
        except UnsupportedError as error:
            reasons.append(str(error))
        except InputError as error:
            # only of the images of --clean and --corrupted, which the user can change
            if part is _patch and setup.run.options.clean is not None:
                raise
            reasons.append(str(error))
    different_reasons = dict.fromkeys(reasons)  # parts may fail for the same reason
    return fields, tuple(different_reasons)


@dataclass(frozen=True)
class ImagePair:
    """A clean and a corrupted image, (1, 3, height, width) each.

    corruption: "" for two different images.
    """

    clean: Tensor
    corrupted: Tensor
    clean_name: str
    corrupted_name: str
    corruption: str = ""


@phase("Activation patching")
def _patch(setup: AblationSetup, images: Tensor, labels: Tensor) -> Fields:
    """Return what activations of a clean image restore in a corrupted one.

    images, labels: those from which the pair is chosen, without --clean and --corrupted.
    """
    pair = _pair_of_options(setup) or _corrupted_pair(setup.run.model, images, labels)
    classes = setup.run.model.classes
    layout = setup.run.model.anatomy.layout
    grid = None
    prefix = None
    if layout is not None:
        grid = (layout.grid[0], layout.grid[1])
        prefix = tuple(layout.prefix)
    patched = patch_parts(setup.run.model, pair.clean, pair.corrupted)
    row = PatchingRow(
        clean=pair.clean_name,
        corrupted=pair.corrupted_name,
        target=classes[int(patched.targets[0])],
        other=classes[int(patched.others[0])],
        difference_clean=float(patched.clean[0]),
        difference_corrupted=float(patched.corrupted[0]),
        corruption=pair.corruption,
        grid=grid,
        prefix=prefix,
    )
    arrays = PatchingArrays(
        clean=pair.clean[0].cpu().numpy(),
        corrupted=pair.corrupted[0].cpu().numpy(),
        heads=patched.restored("heads").numpy(),
        positions=patched.restored("positions").numpy(),
    )
    return {"patching": (row,), "patched": arrays}


def _pair_of_options(setup: AblationSetup) -> ImagePair | None:
    """Return the images of --clean and --corrupted, if they are given."""
    clean = setup.run.options.clean
    corrupted = setup.run.options.corrupted
    if clean is None or corrupted is None:
        return None
    model = setup.run.model
    split = load_images([clean, corrupted], preprocessing=model.preprocessing)
    if len(split) != 2:
        raise InputError(
            f"expected two images that can be read, found {len(split)} of {clean} and {corrupted}"
        )
    [batch] = split.batches(2, device=model.device)
    return ImagePair(batch.images[:1], batch.images[1:], clean.name, corrupted.name)


def _corrupted_pair(model: Model, images: Tensor, labels: Tensor) -> ImagePair:
    """Return the most confident correct image whose prediction a corruption changes, and its
    corrupted copy.

    Positions of the two images correspond. Raises InputError if no corruption changes a prediction.
    """
    confidence, predictions = predict(model, images)
    correct = (predictions.cpu() == labels.cpu()).nonzero().flatten().tolist()
    most_confident = sorted(correct, key=lambda index: -float(confidence[index]))
    for index in most_confident[:_CANDIDATES]:
        clean = images[index : index + 1]
        label = int(labels[index])
        for corruption, words in _CORRUPTIONS.items():
            corrupted = corrupt(clean, corruption)
            _, prediction = predict(model, corrupted)
            if int(prediction) != label:
                name = model.classes[label]
                return ImagePair(clean, corrupted, name, f"{name}, {words}", corruption)
    raise InputError(
        "expected a correctly classified image whose prediction a corruption changes, found "
        "none; give --clean and --corrupted"
    )


@torch.no_grad()
def predict(model: Model, images: Tensor) -> tuple[Tensor, Tensor]:
    """Return the confidence and the class of each prediction, (batch,)."""
    confidence, predictions = model(images).float().softmax(-1).max(-1)
    return confidence, predictions


@phase("Logit lens")
def _apply_lens(setup: AblationSetup, images: Tensor, labels: Tensor) -> Fields:
    """Return the accuracy of the classifier on the residual stream at each depth."""
    logits = logits_by_depth(setup.run.model, images).float().cpu()  # (images, depths, classes)
    correct = logits.argmax(-1) == labels.unsqueeze(1)
    groups = setup.groups(torch.arange(len(labels)))
    rows = []
    for depth, correct_at_depth in enumerate(correct.unbind(1)):
        rows.append(LensRow(depth, accuracy(correct_at_depth, groups=groups)))
    return {"lens": tuple(rows)}


@phase("Contributions to the logits")
def _measure_contributions(setup: AblationSetup, images: Tensor, labels: Tensor) -> Fields:
    """Return the direct contribution of each head, of each MLP, and of the rest to the label."""
    parts = direct_logit_attribution(setup.run.model, images, labels)
    rows = []
    of_heads = parts.heads.mean(0).tolist()  # means over images, (layers, heads)
    for layer, logits in enumerate(of_heads):
        for head, logit in enumerate(logits):
            if finite(logit) is not None:
                unit = f"L{layer}.H{head}"
                rows.append(ContributionRow(unit, "head", logit, layer=layer, head=head))
    of_mlps = parts.mlps.mean(0).tolist()
    for block in blocks(setup.run.model):
        # a block with attention but without an MLP gets a row with the contribution 0
        if block.attention or block.mlp is not None:
            layer = block.index
            rows.append(ContributionRow(f"L{layer}.MLP", "MLP", of_mlps[layer], layer=layer))
    rest = parts.embedding + parts.bias + parts.rest
    rows.append(ContributionRow("rest", "rest", float(rest.mean())))
    return {"contributions": tuple(rows)}


@phase("Exemplars of the heads")
def _find_exemplars(setup: AblationSetup, images: Tensor, labels: Tensor) -> Fields:
    """Return the images whose label each head raises most, if it raises any."""
    model = setup.run.model
    contributions = label_contributions(model, images, labels)
    # (n, classes): 1 for the label, minus 1 / classes for every class
    logit_weights = above_mean(labels, len(model.classes))
    rows: list[ExemplarRow] = []
    pictures: dict[int, int] = {}  # row of the arrays by image; a new image gets the next row
    for unit in setup.heads:
        head = unit.head
        assert head is not None  # the units are heads
        label_logits = contributions[:, unit.layer, head]  # what the head adds, by image
        best = _best_images(label_logits)
        if not best:
            continue
        contributions_of_keys = key_contributions(
            model, images[best], logit_weights[best], unit.layer, head
        )
        for image, keys in zip(best, contributions_of_keys):
            row = ExemplarRow(
                layer=unit.layer,
                head=head,
                image=setup.run.split.names[image],
                class_name=model.classes[int(labels[image])],
                adds=float(label_logits[image]),
                picture=pictures.setdefault(image, len(pictures)),
                **_patch_fields(model.anatomy.layout, keys),
            )
            rows.append(row)
    if not rows:
        return {}
    return {
        "exemplars": tuple(rows),
        "pictures": ExemplarArrays(_downscale(images[list(pictures)])),
    }


def _best_images(contributions: Tensor) -> list[int]:
    """Return the images with the largest positive contributions (images,), the largest first."""
    best = []
    for image in contributions.argsort(descending=True)[:_EXEMPLARS].tolist():
        if contributions[image] > 0:
            best.append(image)
    return best


def _patch_fields(layout: TokenLayout | None, contributions: Tensor) -> dict[str, tuple[int, int]]:
    """Return the patch with the largest contribution and the grid of patches, if keys are tokens of
    the layout.
    """
    if layout is None or len(contributions) != layout.tokens:
        return {}
    if not contributions.isfinite().all():
        return {}
    best_patch = int(contributions[len(layout.prefix) :].argmax())
    rows, columns = layout.grid
    return {"patch": divmod(best_patch, columns), "grid": (rows, columns)}


def _downscale(images: Tensor) -> NDArray[np.uint8]:
    """Return pixels from 0 to 255 of images, with sides of at most _LARGEST px."""
    height, width = images.shape[-2:]
    scale = min(1.0, _LARGEST / max(height, width))
    size = (max(1, round(scale * height)), max(1, round(scale * width)))
    smaller = F.adaptive_avg_pool2d(images.float(), size)
    pixels: NDArray[np.uint8] = (smaller * 255).round().clamp(0, 255).byte().cpu().numpy()
    return pixels
