"""What is mapped and drawn: samples of patches, maps in two dimensions, nearest images, colours, matches."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from vitlens.analysis.features.embedding import embed, patch_colours
from vitlens.analysis.features.features import EMBEDDING, Features, LayerChoice, patch_tokens
from vitlens.analysis.features.neighbours import (
    NEIGHBOURS,
    correspond,
    near,
    nearest,
    object_overlap,
    patch_neighbours,
    shared,
)
from vitlens.commands.features.images import FeatureSets, batch_of, names_of, pixels
from vitlens.commands.features.record import MapArrays, MapRow, MatchRow, Of, PatchesRow, ShownArrays
from vitlens.commands.run.progress import progress
from vitlens.data.split import Split, balanced
from vitlens.errors import DataError
from vitlens.lens.stages import FeatureStage, embedding_stage, stages
from vitlens.names import PROJECTIONS
from vitlens.uncertainty import Estimate

PATCHES: Final = 2000  # of a sample, at most
POINTS: Final = 1000  # images in a map, at most
RETRIEVED: Final = 7  # shown for each query
_IMAGES: Final = 100  # whose patches are drawn
_FEWEST: Final = 4  # patches of an image (a single one is the whole image), and points of a map
_THUMBNAILS: Final = 150  # in a map, so few that they hardly overlap
_THUMBNAIL_SIDE: Final = 32  # pixels
_CUT_SIDE: Final = 16  # pixels of a patch
_PAIRS: Final = 2  # pairs of images whose patches are matched
_SIDE: Final = 128  # pixels, at most, of a retrieved image


@dataclass(frozen=True)
class PatchSample:
    """Patches of one layer, drawn from many images.

    tokens: (n, dim); content: the same minus the mean of all images' tokens at the same place, so that positions drop
    out; images: (n,) indices into the split; places: (n, 2) rows and columns; classes: (n,) of their images, on_object:
    (n,) 1 on the object, or None where they are not known.
    """

    stage: FeatureStage
    grid: tuple[int, int]
    tokens: Tensor
    content: Tensor
    images: Tensor
    places: Tensor
    classes: Tensor | None
    on_object: Tensor | None


def draw_patches(own: FeatureSets) -> dict[LayerChoice, PatchSample]:
    """Return the patches of the embedding, where the model has one, and of the last layer (-1), from one pass; layers
    whose tokens cannot be placed in the image are left out."""
    model = own.model
    run = own.options.run
    known: dict[LayerChoice, FeatureStage | None] = {EMBEDDING: embedding_stage(model), -1: stages(model)[-1]}
    placed = {layer: stage for layer, stage in known.items() if stage is not None and _cells(stage) >= _FEWEST}
    if not placed:
        return {}
    images = own.sample(_IMAGES)
    part = own.test.pick(images)
    read = []
    with progress(f"Patches of {own.alias}", len(part), quiet=run.quiet) as advance:
        for batch in part.batches(run.batch_size or 32, device=model.device):
            read.append(patch_tokens(model, batch.images, tuple(placed)))
            advance(len(batch.images))
    samples = {}
    for (layer, stage), tokens in zip(placed.items(), map(torch.cat, zip(*read))):
        assert stage.grid is not None
        chosen = balanced(len(part) * _cells(stage), None, PATCHES, own.seed)
        of_part = chosen // _cells(stage)
        cell = chosen % _cells(stage)
        means = tokens.double().mean(0).flatten(0, 1)
        own_tokens = tokens.flatten(0, 2)[chosen]
        on_object = None
        if part.masks is not None:
            share = torch.nn.functional.adaptive_avg_pool2d(part.masks.float()[:, None], stage.grid)[:, 0]
            on_object = (share > 0.5).long().flatten().cpu()[chosen]
        samples[layer] = PatchSample(
            stage,
            stage.grid,
            own_tokens,
            content=(own_tokens.double() - means[cell]).float(),
            images=images[of_part],
            places=torch.stack((cell // stage.grid[1], cell % stage.grid[1]), 1),
            classes=None if part.labels is None else part.labels.cpu().long()[of_part],
            on_object=on_object,
        )
    return samples


def _cells(stage: FeatureStage) -> int:
    """Patches of an image; 0 where they have no place."""
    return 0 if stage.grid is None else stage.grid[0] * stage.grid[1]


def neighbour_rows(own: FeatureSets, samples: Mapping[LayerChoice, PatchSample]) -> Iterator[PatchesRow]:
    """Yield what the nearest patches of other images share; nothing with too few patches in other images."""
    for layer in samples.values():
        images = layer.images.unique(return_inverse=True)[1]
        try:
            neighbours = patch_neighbours(layer.tokens, images)
        except DataError:
            continue
        centres = (layer.places.double() + 0.5) / torch.tensor(layer.grid)
        found = {"position": shared(neighbours, near(centres), images, seed=own.seed)}
        if layer.classes is not None:
            found["class"] = shared(neighbours, layer.classes[:, None] == layer.classes, images, seed=own.seed)
        if layer.on_object is not None:
            overlap = object_overlap(neighbours, layer.on_object, images)
            found |= {"object": overlap} if overlap else {}
        number = str(EMBEDDING if layer.stage.index is None else layer.stage.index)
        for share, each in found.items():
            yield PatchesRow(
                own.alias,
                number,
                layer.stage.title,
                share,  # type: ignore[arg-type]
                *each,
                len(images.unique()),
                NEIGHBOURS,
                layer.grid,
            )


def map_model(
    own: FeatureSets, test: Features, wrong: Tensor | None, samples: Mapping[LayerChoice, PatchSample]
) -> tuple[list[MapRow], MapArrays]:
    """Return the maps of one model's last layer and patch embeddings by each method, where there are enough points."""
    split = own.test
    options = own.options
    seed = own.seed
    chosen = own.sample(POINTS)
    last = samples.get(-1)
    embedding = samples.get(EMBEDDING)
    clouds: dict[Of, Tensor] = {"images": test.at(-1)[chosen]}
    arrays: dict[str, Any] = {}
    if last is not None and last.stage.kind == "block":
        labels = last.classes if last.on_object is None else last.on_object
        clouds["patches"] = last.tokens
        arrays["labels_patches"] = None if labels is None else labels.numpy()
    if embedding is not None and embedding.stage.kind == "embedding":
        clouds["embedding"] = embedding.tokens
        if len(embedding.images.unique()) > 1:  # the content of a single image is zero
            clouds["content"] = embedding.content
        arrays |= {"grid": np.array(embedding.grid), "places": embedding.places.numpy()}
        if not options.show:  # else only the images named there are drawn
            cut = balanced(len(embedding.tokens), None, _THUMBNAILS, seed)
            arrays |= {"cut": cut.numpy(), "cut_pixels": _cut(split, embedding, cut).numpy()}
    if options.thumbnails:
        thumbnails = balanced(len(chosen), None, _THUMBNAILS, seed)
        pictures = pixels(split, chosen[thumbnails], most=_THUMBNAIL_SIDE)
        arrays |= {"pictures": thumbnails.numpy(), "pixels": pictures.numpy()}
    rows = []
    points = {}
    count = len(PROJECTIONS) * len(clouds)
    with progress(f"Mapping {own.alias}", count, unit="maps", quiet=options.run.quiet) as advance:
        for of, values in clouds.items():
            for method in PROJECTIONS:
                advance(1)
                # the neighbourhoods of t-SNE are three perplexities wide (van der Maaten 2014)
                wide = options.tsne is not False and len(values) > 3 * options.perplexity
                if len(values) < _FEWEST or (method == "tsne" and not wide):
                    continue
                found = embed(values, method=method, perplexity=options.perplexity, seed=seed)
                points[f"{method}_{of}"] = np.asarray(found.points, dtype=np.float32)
                trust = Estimate(float(found.trustworthiness), n=len(found.points), unit="")
                share = None if found.explained is None else float(found.explained.sum())
                size = values.shape[1]
                row = MapRow(own.alias, of, method, len(values), size, trust, found.neighbours, found.perplexity, share)
                rows.append(row)
    return rows, MapArrays(
        np.array(split.classes, dtype=np.str_),
        points,
        labels_images=None if split.labels is None else split.labels.cpu()[chosen].numpy(),
        wrong_images=None if wrong is None else wrong[chosen].numpy(),
        **arrays,
    )


def _cut(split: Split, patches: PatchSample, chosen: Tensor) -> Tensor:
    """Pixels (chosen, 3, side, side) of the part of the image below each patch."""
    (rows, columns), images, cuts = patches.grid, patches.images[chosen], []
    for image in images.unique():
        whole = pixels(split, image[None])[0]
        height, width = whole.shape[1:]
        for row, column in patches.places[chosen[images == image]].tolist():
            top = row * height // rows
            left = column * width // columns
            bottom = -(-(row + 1) * height // rows)
            right = -(-(column + 1) * width // columns)
            cut = whole[None, :, top:bottom, left:right].float()
            cuts.append(torch.nn.functional.interpolate(cut, size=(_CUT_SIDE, _CUT_SIDE), mode="nearest")[0])
    return torch.stack(cuts).byte()  # in the order of chosen, whose images ascend


def draw(own: FeatureSets, read: Mapping[str, Features]) -> tuple[ShownArrays, dict[str, Any], list[MatchRow]]:
    """Return what is only drawn, of the same few images for all models; the columns of FeaturesRow that say how;
    matches."""
    model = own.model
    chosen = own.chosen
    images = own.drawn
    arrays: dict[str, Any] = {}
    columns: dict[str, Any] = {}
    matches: list[MatchRow] = []
    features = read.get("shown", read["test"])
    among = images
    where = "test images" if own.shown is None else "images shown"
    bank = features
    if own.shown is None and own.bank is not None:
        among = own.bank
        where = "training images"
        bank = read["bank"]
    itself = among is images
    count = min(RETRIEVED, len(bank) - itself)
    if count > 0:
        neighbours = nearest(features.at(-1)[chosen], bank.at(-1), k=count, leave_out=chosen if itself else None)
        theirs = neighbours.indices[:_PAIRS, 0].long()
        queries = images
        places = chosen
        if own.query is not None:
            neighbours = nearest(read["query"].at(-1), bank.at(-1), k=min(RETRIEVED, len(bank)))
            queries = own.query
            places = torch.arange(len(own.query))
        indices = neighbours.indices.long()
        same = None
        if own.query is None and among.labels is not None and queries.labels is not None:
            same = (among.labels.cpu()[indices] == queries.labels.cpu()[places][:, None]).numpy()
        columns = {"among": where, "searched": len(bank)}
        arrays = {
            "queries": pixels(queries, places, most=_SIDE).numpy(),
            "query_names": np.array(names_of(queries, places)),
            "near": torch.stack([pixels(among, row, most=_SIDE) for row in indices]).numpy(),
            "near_names": np.array([names_of(among, row) for row in indices]),
            "similarity": neighbours.similarity.double().numpy(),
            "same": same,
        }
    if _cells(stages(model)[-1]) >= _FEWEST and stages(model)[-1].width >= 3:
        (tokens,) = patch_tokens(model, batch_of(images, chosen, model))
        colours, explained = patch_colours(tokens)
        arrays["colours"] = colours.numpy().astype(np.float32)
        columns["colours"] = float(explained.sum())
        if count > 0:
            pairs = list(map(correspond, tokens, *patch_tokens(model, batch_of(among, theirs, model))))
            arrays |= {"first": pixels(images, chosen[:_PAIRS]).numpy(), "second": pixels(among, theirs).numpy()}
            for column, found in (("sources", "sources"), ("targets", "targets"), ("alike", "similarity")):
                arrays[column] = {number: getattr(pair, found).numpy() for number, pair in enumerate(pairs)}
            matches = [
                MatchRow(own.alias, one, two, len(pair.similarity), (tokens.shape[1], tokens.shape[2]))
                for one, two, pair in zip(names_of(images, chosen), names_of(among, theirs), pairs)
            ]
    shown = ShownArrays(pixels(images, chosen).numpy(), np.array(names_of(images, chosen)), **arrays)
    return shown, columns, matches
