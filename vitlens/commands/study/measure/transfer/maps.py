"""Attention maps before and after training, side by side on the same images."""

import torch
from torch import Tensor

from vitlens.analysis.answers.evaluate import answers
from vitlens.analysis.attention.rollout import rollout
from vitlens.analysis.attention.weights import attention_maps
from vitlens.commands.run.folder import RunFolder
from vitlens.commands.study.measure.transfer.inside import shown
from vitlens.commands.study.measure.transfer.setup import TransferSetup
from vitlens.commands.study.transfer.record import MAP_ARRAYS, MAPS, MapArrays, MapRow
from vitlens.commands.study.transfer.regimes import FULL, MAPPED
from vitlens.data.split import Split
from vitlens.models.model import Model
from vitlens.models.support import meets

_AT_ONCE = 16  # images


def write_maps(folder: RunFolder, setup: TransferSetup) -> None:
    """Write the maps of the model before and after full training, with the predictions of each.

    The model before names its own classes, which may be others than the data's: the maps are those of attention, which
    needs no class.
    """
    images = shown(setup)
    chosen = images.pick(one_of_each(images))
    after = setup.trained(folder.path, FULL, seed=setup.seeds[0])
    maps = [_last_layer(model, images) for model in (setup.model, after)]
    pairs = [_last_layer(model, chosen) for model in (setup.model, after)]
    rolled = [_rollout(model, chosen) for model in (setup.model, after)]
    told = [_predictions(model, chosen) for model in (setup.model, after)]
    assert chosen.labels is not None
    names = [chosen.classes[label] for label in chosen.labels.tolist()]
    files = chosen.files or tuple(f"image {number}" for number in range(len(chosen)))
    folder.write(MAPS, [MapRow(*row) for row in zip(files, names, *told, strict=True)])
    pixels = chosen.source.read(torch.arange(len(chosen)))
    means = [each.mean(0).numpy() for each in maps]
    shown_rollout = [None if each is None else each.numpy() for each in rolled]
    arrays = MapArrays(pixels.cpu().numpy(), pairs[0].numpy(), pairs[1].numpy(), *means, *shown_rollout)
    folder.save(MAP_ARRAYS, arrays)


def one_of_each(images: Split) -> Tensor:
    """The index of the first image of each class, of at most MAPPED classes: not chosen by what the maps show."""
    assert images.labels is not None
    labels = images.labels.tolist()
    return torch.tensor([labels.index(label) for label in sorted(set(labels))[:MAPPED]])


def _last_layer(model: Model, images: Split) -> Tensor:
    """The attention of the last layer that is a map, (images, rows, columns), mean over heads."""
    parts = [
        attention_maps(model, batch.images)[-1].maps.mean(1).cpu()
        for batch in images.batches(_AT_ONCE, device=model.device)
    ]
    return torch.cat(parts).float()


def _rollout(model: Model, images: Split) -> Tensor | None:
    if not meets(model, "chain"):
        return None
    return torch.cat([rollout(model, b.images).cpu() for b in images.batches(_AT_ONCE, device=model.device)]).float()


def _predictions(model: Model, images: Split) -> list[str]:
    """The most probable class of each image, by the model's own names; "" for a model without a classifier."""
    if not model.has_classifier:
        return [""] * len(images)
    return [model.classes[index] for index in answers(model, images).argmax(1).tolist()]
