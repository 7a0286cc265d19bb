"""The arrays that `vitlens attack` writes."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from vitlens.archives import Form
from vitlens.records import Pixels
from vitlens.schema import Untrusted

PerImage: TypeAlias = Annotated[Mapping[str, NDArray[np.floating]], Form("f", (None,))]
ShareMaps: TypeAlias = Annotated[NDArray[np.floating], Form("f", (None, None, None))]


@dataclass(frozen=True)
class AttackedArrays:
    """One model on all images: clean (images,): whether the clean image is classified correctly; label (images,);
    broken_at, distance: by attack (images,), the smallest epsilon at which the attack succeeds and the norm of the
    smallest perturbation found, in pixel units; 0 where the clean image is misclassified, infinite where none was
    found."""

    clean: Annotated[NDArray[np.bool_], Form("b", (None,))]
    label: Annotated[NDArray[np.integer], Form("iu", (None,))]
    broken_at: PerImage
    distance: PerImage


@dataclass(frozen=True)
class AttackExampleArrays:
    """Some images that fooled one model: pixels, and change, the perturbation (images, 3, height, width); before,
    after: maps by method that sum to 1 (images, rows, columns); answers: predicted classes, and probability: of these,
    clean and adversarial (2, images); image: indices into the data."""

    pixels: Pixels
    change: Annotated[NDArray[np.floating], Form("f", (None, 3, None, None))]
    before: ShareMaps
    after: ShareMaps
    answers: Annotated[NDArray[Any], Form("U", (2, None)), Untrusted()]
    probability: Annotated[NDArray[np.floating], Form("f", (2, None))]
    image: Annotated[NDArray[np.integer], Form("iu", (None,))]
    method: Annotated[NDArray[Any], Form("U")]
