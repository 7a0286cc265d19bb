"""What `vitlens features` writes to look at: colours of patches, matches between images, neighbours, CLS by head."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitlens.analysis.attention.weights import attention, attention_maps
from vitlens.analysis.features.correspondence import correspond
from vitlens.analysis.features.features import Features, patch_tokens
from vitlens.analysis.features.neighbours import Neighbours, nearest
from vitlens.analysis.features.patch_colours import patch_components
from vitlens.commands.scaffold.folder import RunFolder
from vitlens.commands.scaffold.options import RunOptions
from vitlens.data.split import Split
from vitlens.errors import UnsupportedError
from vitlens.lens.stages import stages
from vitlens.models.model import Model
from vitlens.runs.features_load import SHOWN, names_of, pixels, some

NEIGHBOURS = 7  # shown of each query
PAIRS = 2  # of images whose patches are matched
_HEADED = 3  # images whose heads are shown
_SIDE = 128  # pixels to which the pictures of a sheet are made smaller


@dataclass(frozen=True)
class Looks:
    """What one model's figures draw: images, and those among which their neighbours are found (None: one another).

    query: images whose neighbours are drawn in place of theirs; asked: the user has named the images, in order.
    """

    images: Split
    features: Features
    bank: Split | None
    bank_features: Features | None
    query: Split | None
    query_features: Features | None
    asked: bool = False

    @property
    def among(self) -> tuple[Split, Features]:
        """Where neighbours are looked for."""
        if self.bank is None or self.bank_features is None:
            return self.images, self.features
        return self.bank, self.bank_features


def keep_looks(folder: RunFolder, models: Sequence[Model], looks: Sequence[Looks], options: RunOptions) -> None:
    """Everything that is looked at and not counted, for the same few images: the first ones asked for, or drawn."""
    shown = looks[0].images
    first = torch.arange(min(SHOWN, len(shown)))
    chosen = first if looks[0].asked else some(len(shown), SHOWN, labels=shown.labels, seed=options.seed)
    colours: dict[str, Any] = {"pixels": pixels(shown, chosen).numpy()}
    rows: list[dict[str, object]] = []
    for model, own in zip(models, looks):
        near = _retrieved(folder, model, own, chosen)
        images = _images(own.images, chosen, model)
        if stages(model)[-1].grid is None:
            continue
        tokens = patch_tokens(model, images)
        if tokens.shape[1] * tokens.shape[2] >= 4 and tokens.shape[3] >= 3:
            found = patch_components(tokens)
            colours[f"colours_{model.alias}"] = found.colours().numpy().astype(np.float32)
            rows.append(
                {
                    "model": model.alias,
                    "grid": list(tokens.shape[1:3]),
                    "explained": [float(one) for one in found.explained],
                }
            )
            if near is not None:
                _matched(folder, model, own, near, chosen, tokens)
        _headed(folder, model, images[:_HEADED], own.images, chosen[:_HEADED])
    folder.arrays("patches", **colours)
    folder.table("patches", rows)


def _images(split: Split, indices: Tensor, model: Model) -> Tensor:
    (batch,) = split.pick(indices).batches(max(1, len(indices)), device=model.device)
    return batch.images


def _retrieved(folder: RunFolder, model: Model, own: Looks, chosen: Tensor) -> Neighbours | None:
    """Keep the neighbours of the queries, or of the images chosen; returns those of the images chosen."""
    among, pool = own.among
    same = among is own.images
    count = min(NEIGHBOURS, len(pool) - (1 if same else 0))
    if count < 1:
        return None
    shown = nearest(own.features.at(-1)[chosen], pool.at(-1), k=count, leave_out=chosen if same else None)
    asked, near, places = own.images, shown, chosen
    if own.query_features is not None and own.query is not None:
        near = nearest(own.query_features.at(-1), pool.at(-1), k=min(NEIGHBOURS, len(pool)))
        asked, places = own.query, torch.arange(len(own.query))
    indices = near.indices.long()
    kin = _kin(among, asked, indices, places) if own.query is None else None
    folder.arrays(
        f"retrieval-{model.alias}",
        queries=pixels(asked, places, most=_SIDE).numpy(),
        query_names=np.array(names_of(asked, places)),
        neighbours=torch.stack([pixels(among, row, most=_SIDE) for row in indices]).numpy(),
        names=np.array([names_of(among, row) for row in indices]),
        similarity=near.similarity.double().numpy(),
        **({} if kin is None else {"same": kin.numpy()}),
    )
    return shown


def _kin(among: Split, asked: Split, indices: Tensor, places: Tensor) -> Tensor | None:
    """Whether each neighbour (queries, k) is of its query's class; None where either has no labels."""
    if among.labels is None or asked.labels is None:
        return None
    return among.labels.cpu()[indices] == asked.labels.cpu()[places][:, None]


def _matched(
    folder: RunFolder,
    model: Model,
    own: Looks,
    near: Neighbours,
    chosen: Tensor,
    tokens: Tensor,
) -> None:
    """Patches of a test image and of its nearest neighbour that are each other's best match."""
    among, _ = own.among
    others = near.indices[:PAIRS, 0].long()
    theirs = patch_tokens(model, _images(among, others, model))
    arrays: dict[str, Any] = {
        "first": pixels(own.images, chosen[:PAIRS]).numpy(),
        "second": pixels(among, others).numpy(),
        "names": np.array(
            [f"{one} and {two}" for one, two in zip(names_of(own.images, chosen[:PAIRS]), names_of(among, others))]
        ),
        "grid": np.array(tokens.shape[1:3]),
    }
    for place, (mine, other) in enumerate(zip(tokens, theirs)):
        pair = correspond(mine, other)
        arrays[f"sources_{place}"] = pair.sources.numpy()
        arrays[f"targets_{place}"] = pair.targets.numpy()
        arrays[f"similarity_{place}"] = pair.similarity.double().numpy()
    folder.arrays(f"matches-{model.alias}", **arrays)


def _headed(folder: RunFolder, model: Model, images: Tensor, split: Split, chosen: Tensor) -> None:
    """The last layer's attention of the CLS token (without one, of what the classifier reads), head by head."""
    if model.anatomy.family != "vit":
        return
    try:
        maps, reading, layer = _last_heads(model, images)
    except UnsupportedError:  # attention that the lens does not know, or none of patches
        return
    folder.arrays(
        f"heads-{model.alias}",
        pixels=pixels(split, chosen).numpy(),
        maps=maps.float().cpu().numpy(),
        reading=np.array(reading),
        layer=np.array(layer),
    )


def _last_heads(model: Model, images: Tensor) -> tuple[Tensor, str, int]:
    """Maps (batch, heads, rows, columns), whose they are, and of which layer; raises UnsupportedError."""
    layout = model.anatomy.layout
    if layout is not None and layout.positions("cls") and model.anatomy.readout == "mean":
        # a CLS token that no classifier reads, as DINOv3's in timm
        layers = attention(model, images, rows="cls")
        if layers[-1].shape[-1] == layout.tokens:
            return layout.as_map(layers[-1][:, :, 0]), "the CLS token", len(layers) - 1
    last = attention_maps(model, images)[-1]
    return last.maps, last.reading, last.site.layer
