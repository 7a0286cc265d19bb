"""Attributions with planted maps under the names of known methods."""

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import pytest
from torch import Tensor

from vitlens.attribution.registry import ATTRIBUTIONS
from vitlens.models.model import Model

Method = Callable[[Model, Tensor, Tensor], Tensor]  # of the model, images and target classes
ANY = {
    "arguments": {},
    "options": (),
    "needs": None,
    "families": ("vit", "windowed", "cnn", "other"),
}


@contextmanager
def planted_methods(functions: Mapping[str, Method]) -> Iterator[None]:
    """Replace methods of these names, inside the context: `planted_methods({"saliency": mine})`."""
    # behind the read-only view
    (methods,) = (
        referent for referent in gc.get_referents(ATTRIBUTIONS) if isinstance(referent, dict)
    )
    with pytest.MonkeyPatch.context() as patch:
        for place, (name, function) in enumerate(functions.items()):
            patch.setitem(globals(), f"planted_{place}", function)
            patch.setitem(
                methods,
                name,
                replace(ATTRIBUTIONS[name], function=f"{__name__}:planted_{place}", **ANY),
            )
        yield
