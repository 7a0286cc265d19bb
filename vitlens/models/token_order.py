"""The positions of a model's special tokens and patches, and the tokens that its classifier reads.

Both are read from images that differ in one place. Tokens can be reordered while they pass through
a model.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from vitlens.devices import evaluating
from vitlens.errors import lacks_memory
from vitlens.models.bands import (
    FITS,
    Grid,
    Places,
    banded_images,
    best_grid,
    grid_fit,
    has_proportions,
    mean_bands,
    shows_places,
)
from vitlens.models.hooks import Arguments, first_tensor, watching
from vitlens.models.nested import tensors_in, with_tensor
from vitlens.models.trials import TOLERANCE, largest_allowed
from vitlens.names import Readout
from vitlens.shapes import PrefixKind, TokenLayout

_MOST_PREFIX: Final = 5  # special tokens that depend on the image
_PATCHES_CHANGED: Final = 3  # whose effect on the logits is compared with that of a special token
_SAY: Final = "say grid=(rows, columns) and prefix=('cls', ...)"
_REORDER: Final = "put them row by row in forward, before the first block"
# the innermost `reordered` context
_RUN: Final[ContextVar[object]] = ContextVar("run", default=None)
LogitsOf = Callable[[Any], Tensor]  # from what a module returns to the logits


@dataclass(frozen=True, eq=False)
class TokenOrder:
    """The order of a model's tokens: the positions of those that are no patches, and the patches'
    (rows, columns).

    grid: None where the patches are not row by row, or where that cannot be read.
    reason: why, and what to do.
    places: the places of all tokens in the image, None where they could not be read.
    """

    special: tuple[int, ...]
    grid: Grid | None
    reason: str = ""
    places: Places | None = None

    @property
    def is_canonical(self) -> bool:
        """Return True if the special tokens are the first ones."""
        return self.special == tuple(range(len(self.special)))

    def contradicts(self, special: tuple[int, ...], grid: Grid) -> bool:
        """Return True if the patches, all tokens but the special ones, clearly do not lie row by
        row in a grid.
        """
        if self.places is None:
            return False
        patches = [token for token in range(self.places.shape[1]) if token not in special]
        places = self.places[:, patches]
        return shows_places(places) and grid_fit(places, grid) < FITS


@dataclass(frozen=True)
class Reordering:
    """Tokens (batch, tokens, width) in another order from the input of one module to the output of
    another.

    order: at each place inside, the position outside: the special tokens first, then the patches.
    """

    entry: str
    exit: str
    order: tuple[int, ...]


@contextmanager
def reordered(module: nn.Module, reordering: Reordering | None) -> Iterator[None]:
    """Reorder the tokens between the two modules, also for hooks that were registered before."""
    if reordering is None:
        yield
        return
    run = object()
    count = len(reordering.order)
    order = torch.tensor(reordering.order)

    def moved(value: Any, index: Tensor) -> Any:
        if isinstance(value, Tensor) and value.dim() == 3 and value.shape[1] == count:
            return value.index_select(1, index.to(value.device))
        return value

    # another run of the module inside this one, or in another thread, has hooks of its own; torch
    # may call a hook that
    # another thread has half registered or half removed, then without the keyword arguments
    def enter(
        _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> Any:
        if kwargs is None or _RUN.get() is not run:
            return None
        moved_args = tuple(moved(value, order) for value in args)
        moved_kwargs = {name: moved(value, order) for name, value in kwargs.items()}
        return moved_args, moved_kwargs

    def leave(_module: nn.Module, _args: Any, output: Any) -> Any:
        if _RUN.get() is not run:
            return None
        tensor = first_tensor(output)
        if tensor is None:
            return output
        return with_tensor(output, 0, moved(tensor, order.argsort()))

    first = module.get_submodule(reordering.entry)
    last = module.get_submodule(reordering.exit)
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
    """Return the order of the tokens that enter an attention module.

    images: two or more of normalised noise. Tokens that do not differ between two images are the
    special ones; images that differ in one band show where each patch lies (bands.py).
    """
    size = int(images.shape[2]), int(images.shape[3])
    tokens = _tokens_entering(module, attention, torch.cat([banded_images(images), images[1:2]]))
    if tokens is None:
        reason = f"the input of {attention} is not (batch, tokens, width); {_SAY}"
        return TokenOrder((), None, reason)
    changes = (tokens[-1] - tokens[0]).abs().amax(-1)
    special = tuple((changes == 0).nonzero().flatten().tolist())
    places = mean_bands(tokens[:-1], 2)
    patches = places[:, (changes > 0).cpu()]
    if not patches.shape[1]:
        return TokenOrder(
            special, None, f"no token of {attention} depends on the image; {_SAY}", places
        )
    grid, fit = best_grid(patches, size)
    if fit >= FITS:
        return TokenOrder(special, grid, "", places)
    return TokenOrder(special, None, _why_no_grid(patches, size), places)


def _why_no_grid(places: Places, size: Grid) -> str:
    """Describe the order of patches that do not lie row by row, or tokens that are no patches, and
    what to do.
    """
    count = places.shape[1]
    down, across = places
    orders = {
        "column by column": (torch.stack([across, down]), (size[1], size[0])),
        "row by row from the right": (torch.stack([down, -across]), size),
        "row by row from the bottom": (torch.stack([-down, across]), size),
        "row by row from the last to the first": (-places, size),
    }
    for words, (turned, turned_size) in orders.items():
        if best_grid(turned, turned_size)[1] >= FITS:
            return f"its {count} patches are not row by row, but {words}; {_REORDER}"
    for prefix in range(1, min(_MOST_PREFIX, count - 1) + 1):
        grid, fit = best_grid(places[:, prefix:], size)
        if fit >= FITS and has_proportions(grid, size):
            kinds = ("cls", *["register"] * (prefix - 1))
            return (
                f"its first {prefix} of {count} tokens are no patches but depend on the image; "
                f"say grid={grid} and prefix={kinds}"
            )
    if shows_places(places):
        return f"its {count} patches are not row by row in the image; {_REORDER}"
    return f"a forward pass does not show where in the image its {count} patches lie; {_SAY}"


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
    sequences = [tensor for tensor in entered if tensor.dim() == 3]
    if not sequences or len(images) not in sequences[0].shape[:2]:
        return None
    tokens = sequences[0]
    if len(tokens) != len(images):  # nn.MultiheadAttention: (tokens, batch, width)
        tokens = tokens.transpose(0, 1)
    return tokens


def keeps_logits(
    module: nn.Module, reordering: Reordering, attention: str, images: Tensor, logits_of: LogitsOf
) -> bool:
    """Return True if the reordering puts special tokens first at an attention module, with equal
    logits.
    """
    with evaluating(module), torch.no_grad():
        plain = logits_of(module(images)).float()
        with reordered(module, reordering):
            order = read_order(module, attention, images)
            other = logits_of(module(images)).float()
    tolerance = max(TOLERANCE, 16 * torch.finfo(images.dtype).eps)
    allowed = largest_allowed(plain, tolerance)
    close = allowed > 0 and (plain - other).abs().max().item() <= allowed
    return close and order.is_canonical


def gradient_at(
    module: nn.Module, attention: str, images: Tensor, logits_of: LogitsOf
) -> Tensor | None:
    """Return the gradient of a random mix of the logits at an attention module's output.

    Returns None without a graph.
    """
    leaves: list[Tensor] = []

    def cut(_module: nn.Module, _inputs: Any, output: Any) -> Any:
        leaves.append(tensors_in(output)[0].detach().requires_grad_())
        return with_tensor(output, 0, leaves[-1])

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
    except (
        RuntimeError
    ) as error:  # a forward in inference mode, or a checkpoint that autograd.grad cannot pass
        if lacks_memory(error) or isinstance(error, torch.OutOfMemoryError):
            raise
        return None
    finally:
        handle.remove()
    return gradient


@dataclass(frozen=True)
class TokensRead:
    """The tokens of the last layer that the classifier reads.

    special: the special tokens that it reads otherwise than the patches.
    patches: whether it reads patches.
    """

    special: tuple[int, ...]
    patches: bool


def tokens_read(
    module: nn.Module, attention: str, images: Tensor, logits_of: LogitsOf, special: int
) -> TokensRead | None:
    """Return what the classifier reads of the output of an attention module.

    Returns None where nothing shows it. special: the number of special tokens, which are the first
    ones. A classifier of the mean or the maximum of all tokens reads the special ones as it
    reads the patches.
    """
    strengths = _strengths(gradient_at(module, attention, images, logits_of))
    if strengths is None or not strengths.any():
        strengths = _changed_logits(module, attention, images, logits_of, special)
    if strengths is None or not strengths.any():
        return None
    patches = strengths[special:]
    of_patch = patches[patches > 0]
    # a threshold between a mean's share and a token's
    least = of_patch.median() * len(of_patch) ** 0.5 if len(of_patch) else 0.0
    read = (strengths[:special] > least).nonzero().flatten().tolist()
    return TokensRead(tuple(read), len(of_patch) > 0)


def _strengths(gradient: Tensor | None) -> Tensor | None:
    """Return the norm of the gradient at each token; None where there is none."""
    if gradient is None or gradient.dim() != 3:
        return None
    if len(gradient) != 2:  # (tokens, batch, width)
        gradient = gradient.transpose(0, 1)
    strengths: Tensor = gradient.float().norm(dim=(0, 2))
    return strengths


def _changed_logits(
    module: nn.Module, attention: str, images: Tensor, logits_of: LogitsOf, special: int
) -> Tensor | None:
    """Return the change of the logits by noise in each special token and in some patches; the
    others as their mean.
    """
    position: int | None = None
    count = 0

    def change(_module: nn.Module, _inputs: Any, output: Any) -> Any:
        nonlocal count
        tokens = tensors_in(output)[0]
        if tokens.dim() != 3:
            return None
        axis = 1 if len(tokens) == 2 else 0  # (tokens, batch, width)
        count = tokens.shape[axis]
        if position is None:
            return None
        noise = torch.randn(tokens.shape[-1], generator=torch.Generator().manual_seed(0)).to(tokens)
        changed = tokens.clone()
        changed.select(axis, position).add_(noise * tokens.std())
        return with_tensor(output, 0, changed)

    handle = module.get_submodule(attention).register_forward_hook(change)
    try:
        with evaluating(module), torch.no_grad():
            plain = logits_of(module(images[:2])).float()
            if count <= special:
                return None
            strengths = torch.zeros(count)
            patches = torch.linspace(special, count - 1, _PATCHES_CHANGED).long().unique().tolist()
            for position in (*range(special), *patches):
                strengths[position] = (logits_of(module(images[:2])).float() - plain).norm()
    finally:
        handle.remove()
    strengths[special:] = strengths[patches].mean()
    return strengths


def prefix_kinds(special: tuple[int, ...], read: TokensRead | None) -> tuple[PrefixKind, ...]:
    """Return the kinds of the special tokens: CLS is the first that the classifier reads otherwise
    than the patches.

    Where nothing shows what it reads, CLS is the first of all tokens.
    """
    kinds: list[PrefixKind] = ["register"] * len(special)
    tokens: tuple[int, ...] = ()
    if read is not None:
        tokens = read.special
    elif 0 in special:
        tokens = (0,)
    if tokens:
        kinds[tokens[0]] = "cls"
    if len(tokens) == 2:
        kinds[tokens[1]] = "distillation"
    return tuple(kinds)


def readout_of(layout: TokenLayout, read: TokensRead | None, *, pooled: bool) -> Readout:
    """Return what the classifier reads; pooled: by an attention layer of its own after the
    blocks."""
    if pooled:
        return "pool"
    if read is None:
        return "cls" if "cls" in layout.prefix else "mean"
    if not read.special:
        return "mean"
    if len(read.special) == 2 and not read.patches:
        return "cls+distillation"
    return "cls"
