"""Maps of the features: t-SNE and PCA of images and of patches, with how faithful they are."""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from vitlens.analysis.features.embedding import Embedding, embed, require_perplexity
from vitlens.analysis.features.features import Features, patch_tokens
from vitlens.commands.features.arrays import SPACE_ARRAYS, SpaceArrays
from vitlens.commands.features.measure.classifiers import LastLayer
from vitlens.commands.features.measure.images import FeatureSets, pixels, some
from vitlens.commands.features.options import FeaturesOptions
from vitlens.commands.features.record import SPACE, TRUSTWORTHINESS, SpaceRow
from vitlens.commands.scaffold.folder import RunFolder
from vitlens.commands.scaffold.progress import progress
from vitlens.data.split import Split
from vitlens.lens.stages import stages
from vitlens.models.model import Model
from vitlens.names import PROJECTIONS
from vitlens.uncertainty import Estimate

POINTS = 2000  # images, or patches, of a map at most
_LEAST = 4  # points of a map
_PICTURES = 150  # thumbnails that do not cover each other
_SMALL = 32  # pixels of a thumbnail
_PATCHED = 100  # images whose patches are mapped

Of = Literal["images", "patches"]


def require_enough(count: int, options: FeaturesOptions) -> None:
    """Raise InputError where t-SNE was asked for and there are too few images for its perplexity."""
    if options.tsne:
        require_perplexity(options.perplexity, count)


def write_space(
    folder: RunFolder,
    models: Sequence[Model],
    sets: Sequence[FeatureSets],
    tests: Sequence[Features],
    last_layers: Sequence[LastLayer],
    options: FeaturesOptions,
) -> None:
    """The maps of each model's last layer, and the table that says how far they can be trusted."""
    rows: list[SpaceRow] = []
    chosen = some(len(tests[0]), POINTS, labels=sets[0].test.labels, seed=options.run.seed)
    for model, own, test, last in zip(models, sets, tests, last_layers):
        split = own.test
        arrays: dict[str, Any] = {"classes": np.array(split.classes, dtype=np.str_)}
        clouds: list[tuple[Of, Tensor]] = [("images", test.at(-1)[chosen])]
        if split.labels is not None:
            arrays["labels_images"] = split.labels.cpu()[chosen].numpy()
        if last.marks is not None:
            arrays["wrong_images"] = last.marks[0][chosen].numpy()
        patches = _patches(model, split, options)
        if patches is not None:
            clouds.append(("patches", patches[0]))
            if patches[1] is not None:
                arrays["labels_patches"] = patches[1].numpy()
        for (of, method), embedding in _maps(model, clouds, options).items():
            arrays[f"{method}_{of}"] = np.asarray(embedding.points, dtype=np.float32)
            rows.append(_row(model.alias, of, embedding, dict(clouds)[of]))
            trust = Estimate(float(embedding.trustworthiness), n=len(embedding.points), unit="")
            folder.metric(TRUSTWORTHINESS(model=model.alias, method=method, of=of), trust)
        if options.thumbnails:
            few = some(len(chosen), _PICTURES, labels=None, seed=options.run.seed)
            arrays["pictures"] = few.numpy()
            arrays["pixels"] = pixels(split, chosen[few], most=_SMALL).numpy()
        folder.save(SPACE_ARRAYS, SpaceArrays(**arrays), model=model.alias)
    folder.write(SPACE, rows)


def _maps(
    model: Model, clouds: Sequence[tuple[Of, Tensor]], options: FeaturesOptions
) -> dict[tuple[Of, str], Embedding]:
    """The maps of images and of patches by each method, where there are points enough."""
    maps: dict[tuple[Of, str], Embedding] = {}
    with progress(
        f"Mapping {model.alias}", len(PROJECTIONS) * len(clouds), unit="maps", quiet=options.run.quiet
    ) as advance:
        for of, values in clouds:
            for method in PROJECTIONS:
                advance(1)
                if len(values) >= _LEAST and (method != "tsne" or _has_tsne(len(values), options)):
                    maps[of, method] = embed(
                        values, method=method, perplexity=options.perplexity, seed=options.run.seed
                    )
    return maps


def _has_tsne(count: int, options: FeaturesOptions) -> bool:
    # its neighbourhoods are three perplexities wide (van der Maaten 2014)
    return options.tsne is not False and count > 3 * options.perplexity


def _row(alias: str, of: Of, embedding: Embedding, values: Tensor) -> SpaceRow:
    shares = embedding.explained
    return SpaceRow(
        model=alias,
        of=of,
        method=embedding.method,
        n=len(values),
        dim=values.shape[1],
        perplexity=embedding.perplexity if embedding.method == "tsne" else None,
        neighbours=embedding.neighbours,
        trustworthiness=float(embedding.trustworthiness),
        explained=None if shares is None else tuple(float(f"{float(share):.6g}") for share in shares),
    )


def _patches(model: Model, split: Split, options: FeaturesOptions) -> tuple[Tensor, Tensor | None] | None:
    """Tokens of patches drawn from some images, and for each whether it lies on the object (1, else 0), or the class.

    None for a CNN, and for a model whose tokens have no known place.
    """
    if stages(model)[-1].grid is None or stages(model)[-1].kind != "block":
        return None
    images = some(len(split), _PATCHED, labels=split.labels, seed=options.run.seed)
    part = split.pick(images)
    batches = part.batches(options.run.batch_size or 32, device=model.device)
    tokens = torch.cat([patch_tokens(model, batch.images) for batch in batches])
    count, rows, columns = tokens.shape[:3]
    if rows * columns < 4:
        return None  # a map of one cell is the image again
    drawn = some(count * rows * columns, POINTS, labels=None, seed=options.run.seed)
    labels: Tensor | None = None
    if part.masks is not None:
        share = torch.nn.functional.adaptive_avg_pool2d(part.masks.float()[:, None], (rows, columns))[:, 0]
        labels = (share > 0.5).long().flatten()[drawn]
    elif part.labels is not None:
        labels = part.labels.cpu().long().repeat_interleave(rows * columns)[drawn]
    return tokens.flatten(0, 2)[drawn], labels
