"""What `vitlens features` writes of the space: t-SNE and PCA of images and of patches, with how faithful they are."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from vitlens.analysis.features.embedding import Embedding, embed, require_perplexity
from vitlens.analysis.features.features import Features, patch_tokens
from vitlens.commands.scaffold.folder import RunFolder
from vitlens.commands.scaffold.options import RunOptions
from vitlens.commands.scaffold.progress import progress
from vitlens.data.split import Split
from vitlens.lens.stages import stages
from vitlens.models.model import Model
from vitlens.names import PROJECTIONS
from vitlens.runs.features_choices import FeatureChoices
from vitlens.runs.features_keep import Knowledge
from vitlens.runs.features_load import Sets, pixels, some
from vitlens.uncertainty import Estimate

POINTS = 2000  # images, or patches, of a map at most
_LEAST = 4  # points of a map
_PICTURES = 150  # thumbnails that do not cover each other
_SMALL = 32  # pixels of a thumbnail
_PATCHED = 100  # images whose patches are mapped


def require_enough(count: int, choices: FeatureChoices) -> None:
    """Raise InputError where t-SNE was asked for and there are too few images for its perplexity."""
    if choices.tsne:
        require_perplexity(choices.perplexity, count)


def _wanted(count: int, choices: FeatureChoices) -> bool:
    return choices.tsne is not False and _enough(count, choices)


def _enough(count: int, choices: FeatureChoices) -> bool:
    return count > 3 * choices.perplexity  # its neighbourhoods are three perplexities wide (van der Maaten 2014)


def keep_space(
    folder: RunFolder,
    models: Sequence[Model],
    sets: Sequence[Sets],
    tests: Sequence[Features],
    known: Sequence[Knowledge],
    choices: FeatureChoices,
    options: RunOptions,
) -> None:
    """The maps of each model's last layer, and the table that says how far they can be trusted."""
    rows: list[dict[str, object]] = []
    chosen = some(len(tests[0]), POINTS, labels=sets[0].test.labels, seed=options.seed)
    for model, own, test, knowledge in zip(models, sets, tests, known):
        end = f"/{model.alias}" if len(models) > 1 else ""
        arrays: dict[str, np.ndarray[tuple[int, ...], np.dtype[np.generic]]] = {}
        clouds = [("images", test.at(-1)[chosen])]
        if own.test.labels is not None:
            arrays["labels_images"] = own.test.labels.cpu()[chosen].numpy()
        if knowledge.marks is not None:
            arrays["wrong_images"] = knowledge.marks[0][chosen].numpy()
        patches = _patches(model, own.test, options)
        if patches is not None:
            clouds.append(("patches", patches[0]))
            if patches[1] is not None:
                arrays["labels_patches"] = patches[1].numpy()
        with progress(f"Mapping {model.alias}", 2 * len(clouds), unit="maps", quiet=options.quiet) as advance:
            for of, values in clouds:
                for method in PROJECTIONS:
                    advance(1)
                    if len(values) < _LEAST or (method == "tsne" and not _wanted(len(values), choices)):
                        continue
                    found = embed(values, method=method, perplexity=choices.perplexity, seed=options.seed)
                    arrays[f"{method}_{of}"] = np.asarray(found.points, dtype=np.float32)
                    rows.append({"model": model.alias, "of": of, **_row(found, values)})
                    folder.metric(f"trustworthiness{end}/{method}/{of}", _trust(found, len(values)))
        if choices.thumbnails:
            few = some(len(chosen), _PICTURES, labels=None, seed=options.seed)
            arrays["pictures"] = few.numpy()
            arrays["pixels"] = pixels(own.test, chosen[few], most=_SMALL).numpy()
        folder.arrays(f"space-{model.alias}", **arrays)
    folder.table("space", rows)


def _row(found: Embedding, values: Tensor) -> dict[str, object]:
    explained = None if found.explained is None else [float(f"{float(share):.6g}") for share in found.explained]
    return {
        "method": found.method,
        "n": len(values),
        "dim": values.shape[1],
        "perplexity": found.perplexity if found.method == "tsne" else None,
        "neighbours": found.neighbours,
        "trustworthiness": float(found.trustworthiness),
        "explained": explained,
    }


def _trust(found: Embedding, count: int) -> Estimate:
    return Estimate(float(found.trustworthiness), n=count, unit="")


def _patches(model: Model, split: Split, options: RunOptions) -> tuple[Tensor, Tensor | None] | None:
    """Tokens of patches drawn from some images, and for each whether it lies on the object (1, else 0), or the class.

    None for a CNN, and for a model whose tokens have no known place.
    """
    if stages(model)[-1].grid is None or stages(model)[-1].kind != "block":
        return None
    images = some(len(split), _PATCHED, labels=split.labels, seed=options.seed)
    part = split.pick(images)
    batches = part.batches(options.batch_size or 32, device=model.device)
    tokens = torch.cat([patch_tokens(model, batch.images) for batch in batches])
    count, rows, columns = tokens.shape[:3]
    if rows * columns < 4:
        return None  # a map of one cell is the image again
    drawn = some(count * rows * columns, POINTS, labels=None, seed=options.seed)
    labels: Tensor | None = None
    if part.masks is not None:
        share = torch.nn.functional.adaptive_avg_pool2d(part.masks.float()[:, None], (rows, columns))[:, 0]
        labels = (share > 0.5).long().flatten()[drawn]
    elif part.labels is not None:
        labels = part.labels.cpu().long().repeat_interleave(rows * columns)[drawn]
    return tokens.flatten(0, 2)[drawn], labels
