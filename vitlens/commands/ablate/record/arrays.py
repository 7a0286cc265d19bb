"""The arrays of `vitlens ablate`."""

from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from vitlens.archives import Form
from vitlens.records import ClassNames

_Floats = Annotated[NDArray[np.floating], Form("f", (None,))]
_Matrix = Annotated[NDArray[np.floating], Form("f", (None, None))]
_Counts = Annotated[NDArray[np.integer], Form("iu", (None,))]
_Image = Annotated[NDArray[np.floating], Form("f", (3, None, None))]
_Names = Annotated[NDArray[Any], Form("U", (None,))]


@dataclass(frozen=True)
class EffectArrays:
    """The results of every image with one replacement: delta_loss, correct, first_order (units, images); clean_loss and
    clean_correct: of the unchanged model; labels: columns of the logits."""

    units: _Names
    delta_loss: _Matrix
    correct: Annotated[NDArray[np.bool_], Form("b", (None, None))]
    clean_loss: _Floats
    clean_correct: Annotated[NDArray[np.bool_], Form("b", (None,))]
    labels: _Counts
    first_order: _Matrix


@dataclass(frozen=True)
class ClassEffectArrays:
    """Mean changes (units, classes) by true class, NaN where a class has no image; images (classes,)."""

    units: _Names
    names: ClassNames
    images: _Counts
    delta_loss: _Matrix
    delta_accuracy: _Matrix


@dataclass(frozen=True)
class RedundancyArrays:
    """Linear CKA (heads, heads) of heads' outputs, NaN where undefined; layers (heads,), from 0."""

    units: _Names
    layers: _Counts
    similarity: _Matrix


@dataclass(frozen=True)
class PatchingArrays:
    """The two images, and the share of the logit difference that each part restores: heads (layers, heads), blocks and
    mlps (layers,), positions (layers, tokens); NaN where there is no such part."""

    clean: _Image
    corrupted: _Image
    heads: _Matrix
    blocks: _Floats
    mlps: _Floats
    positions: _Matrix


@dataclass(frozen=True)
class LensArrays:
    """probability (depths, classes): of the first image; accuracy (depths,): of all; depth 0: the embedding."""

    probability: _Matrix
    accuracy: _Floats


@dataclass(frozen=True)
class ContributionArrays:
    """Mean direct contributions, logits: heads (layers, heads), mlps (layers,), and the rest."""

    heads: _Matrix
    mlps: _Floats
    rest: Annotated[NDArray[np.floating], Form("f", ())]
