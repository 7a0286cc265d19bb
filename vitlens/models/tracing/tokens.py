"""The layout of a model's tokens and what its classifier reads, from images that differ in one place."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from vitlens.devices import evaluating
from vitlens.models.hooks import Arguments, watching
from vitlens.names import Readout
from vitlens.shapes import PrefixKind, TokenLayout

_CHANGE: Final = 4.0  # of a pixel, in units of the normalised images' standard deviation
Grid = tuple[int, int]


class _Stop(Exception):  # noqa: N818  not an error
    """Stops the forward pass at the first attention layer."""


@dataclass(frozen=True)
class TokenOrder:
    """The order of a model's tokens: the number before the patches, and the patches' grid (rows, columns)."""

    prefix: int
    grid: Grid


@dataclass(frozen=True)
class Unread:
    """Why the order cannot be read.

    spread: whether each patch depends on most of the image, as behind a deep CNN; last: whether tokens that do not
    depend on the image are not the first ones.
    """

    reason: str
    spread: bool = False
    last: bool = False


def read_order(module: nn.Module, attention: str, images: Tensor) -> TokenOrder | Unread:
    """The order of the tokens that enter an attention module, or why it cannot be read.

    images: six of normalised noise. Tokens that do not differ between two images are the prefix; a pixel changed in
    each corner of an image tells which token each corner is.
    """
    tokens = _tokens_entering(module, attention, _probes(images))
    if tokens is None:
        return Unread(f"the input of {attention} is not (batch, tokens, width)")
    changes = (tokens - tokens[:1]).abs().amax(-1)  # (6, tokens)
    same = (changes[5] == 0).nonzero().flatten().tolist()
    prefix = len(same)
    if same != list(range(prefix)):
        return Unread(f"tokens {same[:8]} do not depend on the image and are not the first ones", last=True)
    top_left, top_right, bottom_left, bottom_right = (int(changes[corner].argmax()) for corner in range(1, 5))
    columns = top_right - top_left + 1
    rows, rest = divmod(tokens.shape[1] - prefix, max(columns, 1))
    expected = (prefix, prefix + (rows - 1) * columns, tokens.shape[1] - 1)
    if columns < 1 or rest or (top_left, bottom_left, bottom_right) != expected:
        patches = tokens.shape[1] - prefix
        return Unread(
            f"its {patches} patches are not row by row: the image's corners are tokens {top_left}, {top_right}, "
            f"{bottom_left} and {bottom_right}",
            spread=bool(((changes[1:5] > 0).sum(1) > patches / 2).all()),
        )
    return TokenOrder(prefix, (rows, columns))


def _probes(images: Tensor) -> Tensor:
    """Five copies of the first image, four of them with one corner changed, and another image."""
    probes = images[:1].repeat(6, 1, 1, 1)
    for index, (row, column) in enumerate(((0, 0), (0, -1), (-1, 0), (-1, -1)), start=1):
        probes[index, :, row, column] += _CHANGE
    probes[5] = images[1]
    return probes


def _tokens_entering(module: nn.Module, attention: str, images: Tensor) -> Tensor | None:
    entered: list[Tensor] = []

    def before(_name: str, arguments: Arguments) -> None:
        entered.extend(value for value in arguments.values() if isinstance(value, Tensor))
        raise _Stop

    try:
        with evaluating(module), torch.no_grad(), watching(module, [attention], before=before):
            module(images)
    except _Stop:
        pass
    tokens = next((tensor for tensor in entered if tensor.dim() == 3), None)
    if tokens is None or len(images) not in tokens.shape[:2]:
        return None
    return tokens if len(tokens) == len(images) else tokens.transpose(0, 1)  # nn.MultiheadAttention: (tokens, batch, .)


def positions_read(
    module: nn.Module, attention: str, images: Tensor, logits_of: Callable[[Any], Tensor]
) -> tuple[int, ...]:
    """The positions of the last attention layer's output on which the logits depend; () where none can be told."""
    gradient = _gradient_at(module, attention, images, logits_of)
    if gradient is None or gradient.dim() != 3:
        return ()
    if len(gradient) != 2:  # (tokens, batch, width)
        gradient = gradient.transpose(0, 1)
    return tuple((gradient.abs().amax((0, 2)) > 0).nonzero().flatten().tolist())


def is_read(module: nn.Module, attention: str, images: Tensor, logits_of: Callable[[Any], Tensor]) -> bool:
    """Whether the logits depend on the output of an attention module."""
    gradient = _gradient_at(module, attention, images, logits_of)
    return gradient is None or bool((gradient != 0).any())


def _gradient_at(
    module: nn.Module, attention: str, images: Tensor, logits_of: Callable[[Any], Tensor]
) -> Tensor | None:
    """The gradient of a random mix of the logits at an attention module's output; None where there is no graph."""
    leaves: list[Tensor] = []

    def cut(_module: nn.Module, _inputs: Any, output: Any) -> Any:
        first = output[0] if isinstance(output, tuple) else output
        leaves.append(first.detach().requires_grad_())
        return (leaves[-1], *output[1:]) if isinstance(output, tuple) else leaves[-1]

    handle = module.get_submodule(attention).register_forward_hook(cut)
    try:
        with evaluating(module), torch.enable_grad():
            logits = logits_of(module(images[:2]))
            if not logits.requires_grad:
                return None
            mix = torch.rand(logits.shape, generator=torch.Generator().manual_seed(0)).to(logits)
            (gradient,) = torch.autograd.grad(
                (logits * mix).sum(), leaves[-1], allow_unused=True, materialize_grads=True
            )
    finally:
        handle.remove()
    return gradient


def prefix_kinds(count: int, read: tuple[int, ...]) -> tuple[PrefixKind, ...]:
    """The kinds of the tokens before the patches: CLS is the first that the classifier reads, else the first."""
    kinds: list[PrefixKind] = ["register"] * count
    tokens_read = [position for position in read if position < count]
    if count:
        kinds[tokens_read[0] if tokens_read else 0] = "cls"
    if len(tokens_read) == 2:
        kinds[tokens_read[1]] = "distillation"
    return tuple(kinds)


def readout_of(layout: TokenLayout, read: tuple[int, ...], *, pooled: bool) -> Readout:
    """What the classifier reads; pooled: by an attention layer of its own after the blocks."""
    if pooled:
        return "pool"
    if not read:
        return "cls" if "cls" in layout.prefix else "mean"
    first = [position for position in read if position < len(layout.prefix)]
    if not first:
        return "mean"
    return "cls+distillation" if len(first) == 2 and len(read) == 2 else "cls"
