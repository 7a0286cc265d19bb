"""The images that are drawn: nearest images, colours of patches, and matches between patches."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from vitlens.analysis.features.embedding import patch_colours
from vitlens.analysis.features.features import Features, patch_tokens
from vitlens.analysis.features.neighbours import Correspondence, Neighbours, correspond, nearest
from vitlens.commands.features.images import Subject, batch_of, names_of, pixels
from vitlens.commands.features.patches import FEWEST_PATCHES, patch_count
from vitlens.commands.features.record import MatchRow, ShownArrays
from vitlens.data.split import Split
from vitlens.lens.stages import stages

_RETRIEVED: Final = 7  # nearest images shown for each query
_PAIRS: Final = 2  # pairs of images whose patches are matched
_SIDE: Final = 128  # px, longest side of a retrieved image
_COLOURS: Final = 3  # dimensions that patches need to be coloured


@dataclass(frozen=True)
class Drawing:
    """What is drawn of one model.

    arrays: the pixels and results that are drawn.
    fields: the fields of FeaturesRow about them.
    matches: the pairs of images whose patches are matched.
    """

    arrays: ShownArrays
    fields: Mapping[str, Any] = field(default_factory=dict)
    matches: tuple[MatchRow, ...] = ()


@dataclass(frozen=True)
class Search:
    """The images that are searched for the nearest ones.

    features: the features of the images.
    description: the images in words.
    has_drawn: True if the drawn images are among them.
    """

    images: Split
    features: Features
    description: str
    has_drawn: bool


def draw(subject: Subject, features: Mapping[str, Features]) -> Drawing:
    """Return what is drawn of one model; the images are the same for all models."""
    images = subject.to_draw
    indices = subject.indices_to_draw
    arrays: dict[str, Any] = {}
    fields: dict[str, Any] = {}
    matches: list[MatchRow] = []
    search = _search(subject, features)
    neighbours = _nearest_to_drawn(subject, features, search)
    # other images (--query) are also searched for where a drawn one has none but itself
    if neighbours is not None or subject.query is not None:
        fields |= {"among": search.description, "searched": len(search.features)}
        arrays |= _retrieval_arrays(subject, features, search, neighbours)
    last = stages(subject.model)[-1]
    if patch_count(last) >= FEWEST_PATCHES and last.width >= _COLOURS:
        [tokens] = patch_tokens(subject.model, batch_of(images, indices, subject.model))
        colours, explained = patch_colours(tokens)
        arrays["colours"] = colours.numpy().astype(np.float32)
        fields["colours"] = float(explained.sum())
        if neighbours is not None:
            targets = neighbours.indices[:_PAIRS, 0].long()
            pairs = _match(subject, tokens, search.images, targets)
            arrays |= _match_arrays(subject, search.images, targets, pairs)
            matches = _match_rows(subject, tokens, search.images, targets, pairs)
    shown_arrays = ShownArrays(
        pixels=pixels(images, indices).numpy(),
        names=np.array(names_of(images, indices)),
        **arrays,
    )
    return Drawing(shown_arrays, fields, tuple(matches))


def _search(subject: Subject, features: Mapping[str, Features]) -> Search:
    """Return the images to search: those of --show, or else the bank, or else the test images."""
    if subject.selected is not None:
        return Search(subject.selected, features["selected"], "images shown", has_drawn=True)
    if subject.bank is not None:
        return Search(subject.bank, features["bank"], "training images", has_drawn=False)
    return Search(subject.test, features["test"], "test images", has_drawn=True)


def _nearest_to_drawn(
    subject: Subject, features: Mapping[str, Features], search: Search
) -> Neighbours | None:
    """Return the nearest images of each drawn image, None if there are no other images."""
    indices = subject.indices_to_draw
    candidates = len(search.features)
    if search.has_drawn:
        candidates -= 1  # an image is not its own neighbour
    count = min(_RETRIEVED, candidates)
    if count <= 0:
        return None
    queries = features["test"] if subject.selected is None else features["selected"]
    return nearest(
        queries.at(-1)[indices],  # of the last layer
        search.features.at(-1),
        k=count,
        leave_out=indices if search.has_drawn else None,
    )


def _retrieval_arrays(
    subject: Subject,
    features: Mapping[str, Features],
    search: Search,
    nearest_to_drawn: Neighbours | None,
) -> dict[str, Any]:
    """Return the queries and their nearest images, for ShownArrays.

    The queries are the images of --query, or else the drawn images.

    nearest_to_drawn: None if there are no images but the drawn one; there is --query, then.
    """
    if nearest_to_drawn is not None and subject.query is None:
        queries = subject.to_draw
        indices = subject.indices_to_draw
        neighbours = nearest_to_drawn
    else:
        assert subject.query is not None
        queries = subject.query
        indices = torch.arange(len(subject.query))
        count = min(_RETRIEVED, len(search.features))
        neighbours = nearest(features["query"].at(-1), search.features.at(-1), k=count)
    nearest_indices = neighbours.indices.long()  # (queries, neighbours)
    is_same_class = None
    if subject.query is None and search.images.labels is not None and queries.labels is not None:
        query_labels = queries.labels.cpu()[indices]
        nearest_labels = search.images.labels.cpu()[nearest_indices]
        is_same_class = (nearest_labels == query_labels[:, None]).numpy()
    nearest_pixels = [pixels(search.images, row, most=_SIDE) for row in nearest_indices]
    return {
        "queries": pixels(queries, indices, most=_SIDE).numpy(),
        "query_names": np.array(names_of(queries, indices)),
        "near": torch.stack(nearest_pixels).numpy(),
        "near_names": np.array([names_of(search.images, row) for row in nearest_indices]),
        "similarity": neighbours.similarity.double().numpy(),
        "same": is_same_class,
    }


def _match(
    subject: Subject, tokens: Tensor, searched: Split, targets: Tensor
) -> list[Correspondence]:
    """Return the matching patches of the first drawn images and their nearest images.

    tokens: (drawn, rows, columns, dim), patches of the drawn images.
    targets: (pairs,), the nearest image of the first drawn images, as indices into `searched`.
    """
    [target_tokens] = patch_tokens(subject.model, batch_of(searched, targets, subject.model))
    # zip stops after the pairs: there are more drawn images
    return [correspond(first, second) for first, second in zip(tokens, target_tokens)]


def _match_arrays(
    subject: Subject, searched: Split, targets: Tensor, pairs: Sequence[Correspondence]
) -> dict[str, Any]:
    """Return the pixels and positions of the matched patches, for ShownArrays."""
    return {
        "first": pixels(subject.to_draw, subject.indices_to_draw[:_PAIRS]).numpy(),
        "second": pixels(searched, targets).numpy(),
        "sources": {number: pair.sources.numpy() for number, pair in enumerate(pairs)},
        "targets": {number: pair.targets.numpy() for number, pair in enumerate(pairs)},
        "alike": {number: pair.similarity.numpy() for number, pair in enumerate(pairs)},
    }


def _match_rows(
    subject: Subject,
    tokens: Tensor,
    searched: Split,
    targets: Tensor,
    pairs: Sequence[Correspondence],
) -> list[MatchRow]:
    rows, columns = tokens.shape[1:3]
    first_names = names_of(subject.to_draw, subject.indices_to_draw)
    second_names = names_of(searched, targets)
    match_rows = []
    for first, second, pair in zip(first_names, second_names, pairs):
        row = MatchRow(
            model=subject.alias,
            first=first,
            second=second,
            matches=len(pair.similarity),
            grid=(rows, columns),
        )
        match_rows.append(row)
    return match_rows
