"""Maps of the features (t-SNE and PCA of images and of patches, with their trustworthiness), and similarity of
layers."""

from collections.abc import Sequence
from itertools import combinations_with_replacement
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitlens.analysis.features.cka import FEWEST
from vitlens.analysis.features.embedding import Embedding, embed, require_perplexity
from vitlens.analysis.features.features import Features, patch_tokens
from vitlens.analysis.features.similarity import Similarity, distance_correlation, similarity
from vitlens.commands.features.arrays import LAYER_SIMILARITY, SPACE_ARRAYS, SimilarityArrays, SpaceArrays
from vitlens.commands.features.measure.classifiers import LastLayer
from vitlens.commands.features.measure.images import FeatureSets, pixels, sample
from vitlens.commands.features.options import FeaturesOptions
from vitlens.commands.features.record import CKA, SIMILARITY, SPACE, TRUSTWORTHINESS, SimilarityRow, SpaceRow
from vitlens.commands.scaffold.folder import RunFolder
from vitlens.commands.scaffold.progress.bar import progress
from vitlens.data.split import Split
from vitlens.lens.stages import stages
from vitlens.models.model import Model
from vitlens.names import PROJECTIONS
from vitlens.uncertainty import Estimate

POINTS = 2000  # images or patches in a map, at most
_FEWEST_POINTS = 4  # in a map
_THUMBNAILS = 150  # in a map, so few that they hardly overlap
_THUMBNAIL_SIDE = 32  # pixels
_PATCH_IMAGES = 100  # whose patches are mapped

Of = Literal["images", "patches"]
Matrix = NDArray[np.float64]


def require_enough_images(count: int, options: FeaturesOptions) -> None:
    """Raise InputError for --tsne with too few images for its perplexity."""
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
    """Write the maps of each model's last layer, and their trustworthiness."""
    rows: list[SpaceRow] = []
    chosen = sample(len(tests[0]), POINTS, labels=sets[0].test.labels, seed=options.run.seed)
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
            rows.append(_space_row(model.alias, of, embedding, dict(clouds)[of]))
            trust = Estimate(float(embedding.trustworthiness), n=len(embedding.points), unit="")
            folder.metric(TRUSTWORTHINESS(model=model.alias, method=method, of=of), trust)
        if options.thumbnails:
            thumbnails = sample(len(chosen), _THUMBNAILS, labels=None, seed=options.run.seed)
            arrays["pictures"] = thumbnails.numpy()
            arrays["pixels"] = pixels(split, chosen[thumbnails], most=_THUMBNAIL_SIDE).numpy()
        folder.save(SPACE_ARRAYS, SpaceArrays(**arrays), model=model.alias)
    folder.write(SPACE, rows)


def _maps(
    model: Model, clouds: Sequence[tuple[Of, Tensor]], options: FeaturesOptions
) -> dict[tuple[Of, str], Embedding]:
    """The maps of images and of patches by each method, where there are enough points."""
    maps: dict[tuple[Of, str], Embedding] = {}
    with progress(
        f"Mapping {model.alias}", len(PROJECTIONS) * len(clouds), unit="maps", quiet=options.run.quiet
    ) as advance:
        for of, values in clouds:
            for method in PROJECTIONS:
                advance(1)
                if len(values) >= _FEWEST_POINTS and (method != "tsne" or _has_tsne(len(values), options)):
                    maps[of, method] = embed(
                        values, method=method, perplexity=options.perplexity, seed=options.run.seed
                    )
    return maps


def _has_tsne(count: int, options: FeaturesOptions) -> bool:
    # its neighbourhoods are three perplexities wide (van der Maaten 2014)
    return options.tsne is not False and count > 3 * options.perplexity


def _space_row(alias: str, of: Of, embedding: Embedding, values: Tensor) -> SpaceRow:
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
    """A sample of patch tokens, and for each whether it lies on the object (1, else 0), or its image's class.

    None for a CNN, and for a model whose tokens cannot be placed in the image.
    """
    if stages(model)[-1].grid is None or stages(model)[-1].kind != "block":
        return None
    images = sample(len(split), _PATCH_IMAGES, labels=split.labels, seed=options.run.seed)
    part = split.pick(images)
    batches = part.batches(options.run.batch_size or 32, device=model.device)
    tokens = torch.cat([patch_tokens(model, batch.images) for batch in batches])
    count, rows, columns = tokens.shape[:3]
    if rows * columns < 4:
        return None  # a single patch is the whole image
    drawn = sample(count * rows * columns, POINTS, labels=None, seed=options.run.seed)
    labels: Tensor | None = None
    if part.masks is not None:
        share = torch.nn.functional.adaptive_avg_pool2d(part.masks.float()[:, None], (rows, columns))[:, 0]
        labels = (share > 0.5).long().flatten()[drawn]
    elif part.labels is not None:
        labels = part.labels.cpu().long().repeat_interleave(rows * columns)[drawn]
    return tokens.flatten(0, 2)[drawn], labels


def write_similarity(folder: RunFolder, tests: Sequence[Features], *, seed: int) -> None:
    """Write linear CKA and the rank correlation of distances between all layers, on the test images.

    Between two models each CKA is also a metric. With fewer than four images neither is defined, and nothing is
    written.
    """
    rows: list[SimilarityRow] = []
    cka: dict[int, Matrix] = {}
    rank: dict[int, Matrix] = {}
    pairs = combinations_with_replacement(range(len(tests)), 2) if len(tests[0]) >= FEWEST else ()
    for number, (model, other) in enumerate(pairs):
        first, second = tests[model], None if model == other else tests[other]
        compared = similarity(first, second, seed=seed)
        cka[number] = compared.values.numpy()
        rank[number] = distance_correlation(first, second, seed=seed).values.numpy()
        rows.append(_similarity_row(first, tests[other], compared, cka[number], rank[number]))
        if second is not None:
            for name, estimate in _cka_metrics(first.alias, second.alias, compared).items():
                folder.metric(name, estimate)
    folder.write(SIMILARITY, rows)
    folder.save(LAYER_SIMILARITY, SimilarityArrays(cka, rank))


def _cka_metrics(first: str, second: str, compared: Similarity) -> dict[str, Estimate]:
    metrics = {}
    for (layer, other), value in np.ndenumerate(compared.values.numpy()):
        if np.isfinite(value):
            low, high = (None if end is None else float(end[layer, other]) for end in (compared.low, compared.high))
            name = CKA(first=first, second=second, layer=layer, other=other)
            metrics[name] = Estimate(float(value), low, high, compared.n, "")
    return metrics


def _similarity_row(
    first: Features, second: Features, compared: Similarity, cka: Matrix, rank: Matrix
) -> SimilarityRow:
    """CKA of the first with the last layer, of the two last, the mean, and the most similar pair (within a model, of
    different layers)."""
    finite = np.where(np.isfinite(cka), cka, -np.inf)
    if first is second:
        np.fill_diagonal(finite, -np.inf)
    has_pairs = np.isfinite(finite).any()  # not within a model of one layer
    layer, other = np.unravel_index(int(finite.argmax()), finite.shape)
    low, high = compared.low, compared.high
    return SimilarityRow(
        first=first.alias,
        second=second.alias,
        images=len(first),
        first_last=_number(cka[0, -1]),
        first_last_low=None if low is None else _number(low[0, -1]),
        first_last_high=None if high is None else _number(high[0, -1]),
        last_last=_number(cka[-1, -1]),
        last_last_low=None if low is None else _number(low[-1, -1]),
        last_last_high=None if high is None else _number(high[-1, -1]),
        rank_first_last=_number(rank[0, -1]),
        rank_last_last=_number(rank[-1, -1]),
        mean=_number(cka[np.isfinite(finite)].mean()) if has_pairs else None,
        most=_number(finite[layer, other]) if has_pairs else None,
        most_layers=(int(layer), int(other)) if has_pairs else None,
    )


def _number(value: Any) -> float | None:
    """The number, or None for NaN, which JSON does not have."""
    number = float(value)
    return number if np.isfinite(number) else None
