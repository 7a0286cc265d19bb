"""One head over the training of a run that kept its weights."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from jaxtyping import Float
from torch import Tensor

from vitlens.analysis.attention.weights import LayerMaps, attention_maps
from vitlens.commands.scaffold.options import ModelOptions
from vitlens.errors import InputError
from vitlens.models.loading import load
from vitlens.models.naming import parse_model
from vitlens.shapes import Images, Maps
from vitlens.training.checkpoint import KeptWeights, weights_over_training

CHECKPOINTS: Final = 6  # kept weights in the figure of a head over training, at most


@dataclass(frozen=True)
class HeadOverTraining:
    """One head with the weights after so many epochs: its map of each image, and the fraction on the prefix."""

    kept: KeptWeights
    maps: Maps
    prefix: Float[Tensor, " batch"]


def kept_weights(model: str, *, needed: bool) -> tuple[KeptWeights, ...]:
    """The weights that the model's run kept, and its final ones. Raises InputError for none where they are needed."""
    folder = Path(parse_model(model).name)
    kept = weights_over_training(folder) if folder.is_dir() else ()
    if needed and not kept:
        raise InputError(
            f"expected a run that kept its weights for --head, found none kept in {model}; "
            "train one with vitlens train PRESET --keep-every N, or add --query or --key"
        )
    return kept


def require_layer(layers: Sequence[LayerMaps], number: int, *, option: str) -> LayerMaps:
    """The layer of that number. Raises InputError where it does not exist or has no map."""
    known = [layer.site.layer for layer in layers]
    if number not in known:
        whole = known == list(range(len(known)))
        words = f"from 0 to {known[-1]}" if whole else f"one of {', '.join(map(str, dict.fromkeys(known)))}"
        raise InputError(f"expected {option} with a layer {words}, found {number}")
    return layers[known.index(number)]


def require_head(layers: Sequence[LayerMaps], head: tuple[int, int]) -> LayerMaps:
    """The layer of that head. Raises InputError where the layer or the head does not exist."""
    layer = require_layer(layers, head[0], option="--head LAYER,HEAD")
    if not 0 <= head[1] < layer.site.heads:
        raise InputError(
            f"expected --head LAYER,HEAD with a head from 0 to {layer.site.heads - 1} in layer {head[0]}, "
            f"found {head[1]}"
        )
    return layer


def head_over_training(
    kept: Sequence[KeptWeights], head: tuple[int, int], images: Images, *, model_options: ModelOptions
) -> tuple[HeadOverTraining, ...]:
    """The head with all kept weights, or at most CHECKPOINTS of them, evenly spaced and with the first and last."""
    chosen = np.linspace(0, len(kept) - 1, min(len(kept), CHECKPOINTS)).round().astype(int)
    checkpoints = []
    for weights in (kept[index] for index in chosen):
        model = load(
            f"epoch-{weights.epochs}={weights.file}",
            image_size=model_options.image_size,
            mean=model_options.mean,
            std=model_options.std,
            device=images.device,
        )
        layer = require_head(attention_maps(model, images), head)
        checkpoints.append(HeadOverTraining(weights, layer.maps[:, head[1]], layer.prefix[:, head[1]]))
    return tuple(checkpoints)
