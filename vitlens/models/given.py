"""The check that what a public function got for its model is a Model."""

from pathlib import Path

from torch import nn

from vitlens.errors import InputError
from vitlens.models.model import Model

_WRAP = "vitlens.wrap(module, image_size=..., mean=..., std=...)"


def require_model(given: object, other: object = None) -> None:
    """Raise InputError unless it is a Model; other: the argument beside it, to recognise two that were exchanged."""
    if isinstance(given, Model):
        return
    if isinstance(other, Model):
        raise InputError(f"expected a Model, found {type(given).__name__}, and a Model beside it; exchange the two")
    if isinstance(given, str | Path):
        raise InputError(f"expected a Model, found the text {str(given)!r}; load one with vitlens.load(NAME)")
    advice = f"wrap it with {_WRAP}" if isinstance(given, nn.Module) else "load one with vitlens.load(NAME)"
    raise InputError(f"expected a Model, found {type(given).__name__}; {advice}")
