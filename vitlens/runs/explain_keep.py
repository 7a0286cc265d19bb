"""What a run of `vitlens explain` keeps of each model: rows of methods and images, completeness, maps to draw from."""

from collections.abc import Sequence

import torch
from torch import Tensor

from vitlens.analysis.faithfulness.map_shares import map_faults
from vitlens.attribution.package import PROVENANCE
from vitlens.attribution.registry import ATTRIBUTIONS
from vitlens.commands.scaffold.folder import RunFolder
from vitlens.data.split import Split
from vitlens.models.model import Model
from vitlens.names import Engine
from vitlens.runs.explain_maps import Explained
from vitlens.runs.explain_report import SHOWN
from vitlens.uncertainty import bootstrap_mean

Rows = list[dict[str, object]]

_KEPT_BYTES = 32 << 20  # of a model's maps


def keep_maps(
    folder: RunFolder,
    model: Model,
    split: Split,
    logits: Tensor,
    targets: Tensor | None,
    made: Sequence[Explained],
    *,
    drawn: int = SHOWN,
    alias: str | None = None,
    engine: Engine = "vitlens",
) -> dict[str, Rows]:
    """Write a model's metrics and arrays; the rows of the tables methods and images, to be kept beside other models'.

    drawn: images that figures show, at most; alias: of the model in the names of metrics, where the run has several.
    """
    groups = None if split.groups is None else split.groups.numpy()
    for found in made:
        if found.gains is not None and bool(found.maps.isfinite().all()):
            error = (found.maps.sum((1, 2)) - found.gains).abs().numpy()
            name = "/".join(word for word in ("completeness", alias, found.method) if word)
            folder.metric(name, bootstrap_mean(error, groups=groups, unit="logits"))
    size = sum(4 * found.maps[0].numel() for found in made)
    kept, shown = max(drawn, _KEPT_BYTES // size), torch.arange(min(drawn, len(split)))
    masks = {} if split.masks is None else {"masks": split.masks[shown].numpy()}
    maps = {f"maps/{found.method}": found.maps[:kept].numpy() for found in made}
    folder.arrays(f"explain-{model.alias}", images=split.source.read(shown).numpy(), **masks, **maps)
    return {
        "methods": [_method_row(model, found, engine) for found in made],
        "images": _image_rows(model, split, logits, targets),
    }


def _method_row(model: Model, found: Explained, engine: Engine) -> dict[str, object]:
    method, faults = ATTRIBUTIONS[found.method], map_faults(found.maps)
    own = engine == "vitlens"
    row: dict[str, object] = {
        "model": model.alias,
        "method": method.name,
        "title": method.title if own else f"{method.title} (grad-cam package)",
        "source": method.paper if own else PROVENANCE,
        "map": "x".join(str(side) for side in found.maps.shape[1:]),
        "signed": method.signed and own,
        "maps": len(found.maps),
        "constant": int(faults.constant.sum()),
        "not_finite": int(faults.not_finite.sum()),
        "seconds": round(found.seconds, 5),
    }
    if found.gains is not None:
        row["gain"] = float(found.gains.abs().mean())
    return row


def _image_rows(model: Model, split: Split, logits: Tensor, targets: Tensor | None) -> Rows:
    """What the model answers to each image, and which class is explained; None where it has no classifier."""
    names = split.files or tuple(f"{split.name} {index}" for index in range(len(split)))
    rows: Rows = []
    for index, own in enumerate(logits.softmax(-1)):
        row: dict[str, object] = {"model": model.alias, "image": names[index]}
        row |= dict.fromkeys(("prediction", "probability", "target", "target_probability"))
        if targets is not None:
            asked = int(targets[index])
            row["prediction"], row["probability"] = model.classes[int(own.argmax())], round(float(own.max()), 4)
            row["target"], row["target_probability"] = model.classes[asked], round(float(own[asked]), 4)
        row["label"] = None if split.labels is None else split.classes[int(split.labels[index])]
        rows.append(row)
    return rows
