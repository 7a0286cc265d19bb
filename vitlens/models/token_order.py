"""Where a model's special tokens and patches stand, and what its classifier reads, from images that differ in one
place; and tokens put in order while they pass through a model."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from vitlens.devices import evaluating
from vitlens.models.hooks import Arguments, watching
from vitlens.models.trials import TOLERANCE, largest_allowed
from vitlens.names import Readout
from vitlens.shapes import PrefixKind, TokenLayout

_CHANGE: Final = 4.0  # of a pixel, in units of the normalised images' standard deviation
_RUN: Final[ContextVar[object]] = ContextVar("run", default=None)  # the innermost `reordered` context
Grid = tuple[int, int]
LogitsOf = Callable[[Any], Tensor]  # from what a module returns to the logits


@dataclass(frozen=True)
class TokenOrder:
    """The order of a model's tokens: the positions of those that are no patches, and the patches' (rows, columns).

    grid: None where it cannot be read; reason: why; spread: whether that is as each patch depends on most of the image,
    as behind a deep CNN.
    """

    special: tuple[int, ...]
    grid: Grid | None
    reason: str = ""
    spread: bool = False

    @property
    def is_canonical(self) -> bool:
        """Whether the special tokens are the first ones."""
        return self.special == tuple(range(len(self.special)))


@dataclass(frozen=True)
class Reordering:
    """Tokens (batch, tokens, width) in another order from the input of one module to the output of another.

    order: at each place inside, the position outside: the special tokens first, then the patches.
    """

    entry: str
    exit: str
    order: tuple[int, ...]


@contextmanager
def reordered(module: nn.Module, reordering: Reordering | None) -> Iterator[None]:
    """Inside, the tokens are in the other order between the two modules, also for hooks that were there before."""
    if reordering is None:
        yield
        return
    run, count = object(), len(reordering.order)
    order = torch.tensor(reordering.order)

    def moved(value: Any, index: Tensor) -> Any:
        fits = isinstance(value, Tensor) and value.dim() == 3 and value.shape[1] == count
        return value.index_select(1, index.to(value.device)) if fits else value

    # another run of the module inside this one, or in another thread, has hooks of its own; torch may call a hook that
    # another thread has half registered or half removed, then without the keyword arguments
    def enter(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
        if kwargs is None or _RUN.get() is not run:
            return None
        return tuple(moved(each, order) for each in args), {name: moved(each, order) for name, each in kwargs.items()}

    def leave(_module: nn.Module, _args: Any, output: Any) -> Any:
        if _RUN.get() is not run:
            return None
        back = order.argsort()
        return (moved(output[0], back), *output[1:]) if isinstance(output, tuple) else moved(output, back)

    first, last = module.get_submodule(reordering.entry), module.get_submodule(reordering.exit)
    handles = (
        first.register_forward_pre_hook(enter, with_kwargs=True, prepend=True),
        last.register_forward_hook(leave),
    )
    token = _RUN.set(run)
    try:
        yield
    finally:
        _RUN.reset(token)
        for handle in handles:
            handle.remove()


def read_order(module: nn.Module, attention: str, images: Tensor) -> TokenOrder:
    """The order of the tokens that enter an attention module.

    images: two or more of normalised noise. Tokens that do not differ between two images are the special ones; a pixel
    changed in each corner of an image tells which token each corner is.
    """
    probes = images[:1].repeat(6, 1, 1, 1)
    for index, (row, column) in enumerate(((0, 0), (0, -1), (-1, 0), (-1, -1)), start=1):
        probes[index, :, row, column] += _CHANGE
    probes[5] = images[1]
    tokens = _tokens_entering(module, attention, probes)
    if tokens is None:
        return TokenOrder((), None, f"the input of {attention} is not (batch, tokens, width)")
    changes = (tokens - tokens[:1]).abs().amax(-1)  # (6, tokens)
    special = tuple((changes[5] == 0).nonzero().flatten().tolist())
    changes = changes[:, changes[5] > 0]  # (6, patches)
    patches = changes.shape[1]
    corners = changes[1:5].argmax(1).tolist() if patches else [0] * 4
    top_left, top_right, bottom_left, bottom_right = corners
    columns = top_right - top_left + 1
    rows, rest = divmod(patches, max(columns, 1))
    if columns < 1 or rest or (top_left, bottom_left, bottom_right) != (0, (rows - 1) * columns, patches - 1):
        reason = (
            f"its {patches} patches are not row by row: the image's corners are patches {top_left}, {top_right}, "
            f"{bottom_left} and {bottom_right}"
        )
        spread = bool(((changes[1:5] > 0).sum(1) > patches / 2).all())
        return TokenOrder(special, None, reason, spread)
    return TokenOrder(special, (rows, columns))


class _Stop(Exception):  # noqa: N818  not an error
    """Stops the forward pass at the first attention layer."""


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


def keeps_logits(
    module: nn.Module, reordering: Reordering, attention: str, images: Tensor, logits_of: LogitsOf
) -> bool:
    """Whether the special tokens are the first ones at an attention module in the other order, with equal logits."""
    with evaluating(module), torch.no_grad():
        plain = logits_of(module(images)).float()
        with reordered(module, reordering):
            order, other = read_order(module, attention, images), logits_of(module(images)).float()
    tolerance = max(TOLERANCE, 16 * torch.finfo(images.dtype).eps)
    allowed = largest_allowed(plain, tolerance)
    close = allowed > 0 and (plain - other).abs().max().item() <= allowed
    return close and order.is_canonical


def gradient_at(module: nn.Module, attention: str, images: Tensor, logits_of: LogitsOf) -> Tensor | None:
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


def positions_read(gradient: Tensor | None) -> tuple[int, ...]:
    """The positions of the last attention layer's output on which the logits depend; () where none can be told."""
    if gradient is None or gradient.dim() != 3:
        return ()
    if len(gradient) != 2:  # (tokens, batch, width)
        gradient = gradient.transpose(0, 1)
    return tuple((gradient.abs().amax((0, 2)) > 0).nonzero().flatten().tolist())


def prefix_kinds(special: tuple[int, ...], read: tuple[int, ...]) -> tuple[PrefixKind, ...]:
    """The kinds of the special tokens: CLS is the first that the classifier reads; else the first of all tokens."""
    kinds: list[PrefixKind] = ["register"] * len(special)
    tokens_read = [position for position in read if position < len(special)]
    if tokens_read or 0 in special:
        kinds[(*tokens_read, 0)[0]] = "cls"
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
