"""Maps of the features (t-SNE and PCA of images and of patches, with their trustworthiness), and similarity of
layers."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations_with_replacement
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitlens.analysis.features.cka import FEWEST
from vitlens.analysis.features.embedding import Embedding, embed, require_perplexity
from vitlens.analysis.features.features import EMBEDDING, Features, LayerChoice
from vitlens.analysis.features.similarity import Similarity, distance_correlation, similarity
from vitlens.commands.features.arrays import LAYER_SIMILARITY, SPACE_ARRAYS, SimilarityArrays, SpaceArrays
from vitlens.commands.features.measure.classifiers import LastLayer
from vitlens.commands.features.measure.images import FeatureSets, pixels, sample
from vitlens.commands.features.measure.patches import PatchSample
from vitlens.commands.features.options import FeaturesOptions
from vitlens.commands.features.record import CKA, SIMILARITY, SPACE, TRUSTWORTHINESS
from vitlens.commands.features.record.rows import SimilarityRow, SpaceRow
from vitlens.commands.run.folder import RunFolder
from vitlens.commands.run.progress.bar import progress
from vitlens.data.split import Split
from vitlens.models.model import Model
from vitlens.names import PROJECTIONS
from vitlens.uncertainty import Estimate

POINTS = 1000  # images or patches in a map, at most
_FEWEST_POINTS = 4  # in a map
_THUMBNAILS = 150  # in a map, so few that they hardly overlap
_THUMBNAIL_SIDE = 32  # pixels
_CUT_SIDE = 16  # pixels of a patch

Of = Literal["images", "patches", "embedding", "content"]
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
    drawn: Sequence[Mapping[LayerChoice, PatchSample]],
    options: FeaturesOptions,
) -> None:
    """Write the maps of each model's last layer and patch embeddings, and their trustworthiness; drawn: its
    patches."""
    rows: list[SpaceRow] = []
    chosen = sample(len(tests[0]), POINTS, labels=sets[0].test.labels, seed=options.run.seed)
    for model, own, test, last, samples in zip(models, sets, tests, last_layers, drawn):
        split = own.test
        arrays: dict[str, Any] = {"classes": np.array(split.classes, dtype=np.str_)}
        clouds: list[tuple[Of, Tensor]] = [("images", test.at(-1)[chosen])]
        if split.labels is not None:
            arrays["labels_images"] = split.labels.cpu()[chosen].numpy()
        if last.marks is not None:
            arrays["wrong_images"] = last.marks[0][chosen].numpy()
        of_patches, more = _patch_arrays(split, samples, options)
        clouds, arrays = [*clouds, *of_patches], arrays | more
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


def _patch_arrays(
    split: Split, samples: Mapping[LayerChoice, PatchSample], options: FeaturesOptions
) -> tuple[list[tuple[Of, Tensor]], dict[str, Any]]:
    """The patches of the last layer and of the embedding to map, and what is drawn of them; nothing of a CNN."""
    clouds: list[tuple[Of, Tensor]] = []
    arrays: dict[str, Any] = {}
    last, embedding = samples.get(-1), samples.get(EMBEDDING)
    if last is not None and last.kind == "block":
        labels = last.classes if last.on_object is None else last.on_object
        clouds.append(("patches", last.tokens))
        arrays |= {} if labels is None else {"labels_patches": labels.numpy()}
    if embedding is not None and embedding.kind == "embedding":
        clouds += [("embedding", embedding.tokens), ("content", embedding.content)]
        arrays |= {"grid": np.array(embedding.grid), "places": embedding.places.numpy()}
        if not options.show:  # else only the images named there are drawn
            chosen = sample(len(embedding.tokens), _THUMBNAILS, labels=None, seed=options.run.seed)
            arrays |= {"cut": chosen.numpy(), "cut_pixels": _cut(split, embedding, chosen).numpy()}
    return clouds, arrays


def _cut(split: Split, patches: PatchSample, chosen: Tensor) -> Tensor:
    """Pixels (chosen, 3, side, side) of the part of the image below each patch."""
    (rows, columns), images, cuts = patches.grid, patches.images[chosen], []
    for image in images.unique():
        whole = pixels(split, image[None])[0]
        height, width = whole.shape[1:]
        for row, column in patches.places[chosen[images == image]].tolist():
            top, left = row * height // rows, column * width // columns
            bottom, right = -(-(row + 1) * height // rows), -(-(column + 1) * width // columns)
            cut = whole[None, :, top:bottom, left:right].float()
            cuts.append(torch.nn.functional.interpolate(cut, size=(_CUT_SIDE, _CUT_SIDE), mode="nearest")[0])
    return torch.stack(cuts).byte()  # in the order of chosen, whose images ascend


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
            for name, estimate in _cka_metrics(first, second, compared).items():
                folder.metric(name, estimate)
    folder.write(SIMILARITY, rows)
    folder.save(LAYER_SIMILARITY, SimilarityArrays(cka, rank))


def _cka_metrics(first: Features, second: Features, compared: Similarity) -> dict[str, Estimate]:
    metrics = {}
    for (row, column), value in np.ndenumerate(compared.values.numpy()):
        if np.isfinite(value):
            low, high = (None if end is None else float(end[row, column]) for end in (compared.low, compared.high))
            layer, other = (
                EMBEDDING if known.index is None else known.index
                for known in (first.layers[row], second.layers[column])
            )
            name = CKA(first=first.alias, second=second.alias, layer=layer, other=other)
            metrics[name] = Estimate(float(value), low, high, compared.n, "")
    return metrics


def _similarity_row(
    first: Features, second: Features, compared: Similarity, cka: Matrix, rank: Matrix
) -> SimilarityRow:
    """CKA of the first with the last layer, of the two last, the mean, and the most similar pair (within a model, of
    different layers), all without the embedding; and of the embedding with the last layer."""
    rows, columns = int(first.embedded), int(second.embedded)
    finite = np.where(np.isfinite(cka), cka, -np.inf)[rows:, columns:]
    if first is second:
        np.fill_diagonal(finite, -np.inf)
    has_pairs = np.isfinite(finite).any()  # not within a model of one layer
    layer, other = np.unravel_index(int(finite.argmax()), finite.shape)

    def ends(row: int) -> tuple[float | None, float | None]:
        low, high = (None if end is None else _number(end[row, -1]) for end in (compared.low, compared.high))
        return low, high

    (first_low, first_high), (last_low, last_high) = ends(rows), ends(-1)
    row = SimilarityRow(
        first=first.alias,
        second=second.alias,
        images=len(first),
        first_last=_number(cka[rows, -1]),
        first_last_low=first_low,
        first_last_high=first_high,
        last_last=_number(cka[-1, -1]),
        last_last_low=last_low,
        last_last_high=last_high,
        rank_first_last=_number(rank[rows, -1]),
        rank_last_last=_number(rank[-1, -1]),
        mean=_number(cka[rows:, columns:][np.isfinite(finite)].mean()) if has_pairs else None,
        most=_number(finite[layer, other]) if has_pairs else None,
        most_layers=(int(layer), int(other)) if has_pairs else None,
        embedded=(first.embedded, second.embedded),
    )
    if not first.embedded:
        return row
    low, high = ends(0)
    return replace(row, embedding_last=_number(cka[0, -1]), embedding_last_low=low, embedding_last_high=high)


def _number(value: Any) -> float | None:
    """The number, or None for NaN, which JSON does not have."""
    number = float(value)
    return number if np.isfinite(number) else None
