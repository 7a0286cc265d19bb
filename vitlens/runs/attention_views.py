"""What `vitlens attention` finds of one patch or one head, and keeps: tables and arrays that figures are drawn from."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from vitlens.analysis.attention.views import PatchView
from vitlens.analysis.attention.weights import LayerMaps, attention_maps
from vitlens.errors import InputError
from vitlens.models.naming import parse_model
from vitlens.models.zoo import load
from vitlens.runs.folder import RunFolder
from vitlens.runs.options import ModelOptions
from vitlens.shapes import Images, Maps
from vitlens.training.checkpoint import Kept, weights_over_training

EPOCHS = 6  # of those kept, in the figure of a head over training
Head = tuple[int, int]


@dataclass(frozen=True)
class HeadThen:
    """One head with the weights after so many epochs: where it looks, and what lies on the prefix."""

    kept: Kept
    maps: Maps
    prefix: Float[Tensor, " batch"]


def kept_weights(model: str, *, needed: bool) -> tuple[Kept, ...]:
    """The weights that the model's run kept and its last ones; where they are needed, none is an InputError."""
    folder = Path(parse_model(model).name)
    kept = weights_over_training(folder) if folder.is_dir() else ()
    if needed and not kept:
        raise InputError(
            f"expected a run that kept its weights for --head, found none kept in {model}; "
            "train one with vitlens train PRESET --keep-every N, or add --query or --key"
        )
    return kept


def find_layer(layers: Sequence[LayerMaps], number: int, *, option: str) -> LayerMaps:
    """The layer of that number. Raises InputError where it has no map, or is not there."""
    known = [layer.site.layer for layer in layers]
    if number not in known:
        whole = known == list(range(len(known)))
        words = f"from 0 to {known[-1]}" if whole else f"one of {', '.join(map(str, dict.fromkeys(known)))}"
        raise InputError(f"expected {option} with a layer {words}, found {number}")
    return layers[known.index(number)]


def require_head(layers: Sequence[LayerMaps], head: Head) -> LayerMaps:
    """The layer of that head. Raises InputError where one of them is not there."""
    layer = find_layer(layers, head[0], option="--head LAYER,HEAD")
    if not 0 <= head[1] < layer.site.heads:
        raise InputError(
            f"expected --head LAYER,HEAD with a head from 0 to {layer.site.heads - 1} in layer {head[0]}, "
            f"found {head[1]}"
        )
    return layer


def over_training(
    kept: Sequence[Kept], head: Head, images: Images, *, model_options: ModelOptions
) -> tuple[HeadThen, ...]:
    """The head with each of the kept weights, or as many as a figure holds: evenly spaced, with the first and last."""
    chosen = np.linspace(0, len(kept) - 1, min(len(kept), EPOCHS)).round().astype(int)
    found = []
    for one in (kept[index] for index in chosen):
        model = load(
            f"epoch-{one.epochs}={one.file}",
            image_size=model_options.image_size,
            mean=model_options.mean,
            std=model_options.std,
            device=images.device,
        )
        layer = require_head(attention_maps(model, images), head)
        found.append(HeadThen(one, layer.maps[:, head[1]], layer.prefix[:, head[1]]))
    return tuple(found)


def keep_training(folder: RunFolder, found: Sequence[HeadThen]) -> None:
    """The head's maps by epoch, and the table of what lay on the prefix."""
    if found:
        rows = [
            {"epochs": then.kept.epochs, "file": then.kept.file.name, "prefix_mass": float(then.prefix.mean())}
            for then in found
        ]
        folder.table("training", rows)
        folder.arrays("training", maps=np.stack([as_array(then.maps) for then in found], 1))


def keep_query(folder: RunFolder, views: Sequence[PatchView], *, head: Head | None) -> None:
    """Where the patch looks: fractions of its row, mean over images and heads; head_...: of the head asked for."""
    rows = []
    for view in views:
        prefix, found = view.prefix.sum(-1), _place(view)
        if view.prefix.shape[-1]:
            found["prefix_mass"] = float(prefix.mean())
            if head is not None:
                found["head_prefix_mass"] = float(prefix[:, head[1]].mean()) if _has(view, head) else None
        if view.site.windows is not None:
            found["padding"] = max(0.0, float((1 - view.maps.sum((2, 3)) - prefix).mean()))
        rows.append(found)
    _keep(folder, "query", rows, views, head)


def keep_key(folder: RunFolder, views: Sequence[PatchView], *, head: Head | None) -> None:
    """Who looks at it: what all patches give to it together, in rows, and what a prefix token gives (a fraction)."""
    rows = []
    for view in views:
        received, found = view.maps.sum((2, 3)), _place(view)
        found["received"] = float(received.mean())
        if head is not None:
            found["head_received"] = float(received[:, head[1]].mean()) if _has(view, head) else None
        if view.prefix.shape[-1]:
            found["from_prefix"] = float(view.prefix.mean())
        rows.append(found)
    _keep(folder, "key", rows, views, head)


def _place(view: PatchView) -> dict[str, object]:
    row, column = view.patch
    grid = "x".join(str(side) for side in view.maps.shape[-2:])
    itself = float(view.maps[:, :, row, column].mean())
    return {"layer": view.site.layer, "row": row, "column": column, "grid": grid, "itself": itself}


def _has(view: PatchView, head: Head) -> bool:
    return head[1] < view.site.heads


def _keep(
    folder: RunFolder,
    name: str,
    rows: Sequence[Mapping[str, object]],
    views: Sequence[PatchView],
    head: Head | None,
) -> None:
    """Each layer's mean over heads, and the head asked for in the layers that have it."""
    if not views:
        return
    arrays = {f"mean{index}": as_array(view.maps.mean(1)) for index, view in enumerate(views)}
    if head is not None:
        chosen = ((index, view) for index, view in enumerate(views) if _has(view, head))
        arrays |= {f"head{index}": as_array(view.maps[:, head[1]]) for index, view in chosen}
    folder.table(name, rows)
    folder.arrays(name, **arrays)


def as_array(values: Tensor) -> NDArray[np.float32]:
    """A tensor on any device, in any precision, as it is stored."""
    return np.asarray(values.float().cpu().numpy())
