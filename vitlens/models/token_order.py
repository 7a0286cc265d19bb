"""The positions of a model's special tokens and patches, and the tokens that its classifier reads.

Both are read from images that differ in one place. If special tokens are not the first ones,
`reordered` moves them while tokens pass through the model.
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

_MOST_PREFIX: Final = 5  # most special tokens that depend on the image and are still recognised
# patches that are changed, to compare their effect on the logits with that of a special token
_PATCHES_CHANGED: Final = 3
_ROUNDING_STEPS: Final = 16  # tolerance of 16-bit modules in units of the type's epsilon
_SAY: Final = "say grid=(rows, columns) and prefix=('cls', ...)"
_REORDER: Final = "put them row by row in forward, before the first block"
# the innermost `reordered` context
_RUN: Final[ContextVar[object]] = ContextVar("run", default=None)
LogitsOf = Callable[[Any], Tensor]  # from the output of a module to the logits


@dataclass(frozen=True, eq=False)
class TokenOrder:
    """The order of a model's tokens.

    special: the positions of the tokens that are no patches.
    grid: the (rows, columns) of the patches, or None if they are not row by row or this cannot be
        read.
    reason: why there is no grid, and what to do.
    places: where in the image each token lies, (2, tokens), or None if this could not be read.
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
        """Return True if the patches clearly do not lie row by row in a grid.

        special: the positions of the special tokens; all others are patches.
        """
        if self.places is None:
            return False
        patches = [token for token in range(self.places.shape[1]) if token not in special]
        places = self.places[:, patches]
        return shows_places(places) and grid_fit(places, grid) < FITS


@dataclass(frozen=True)
class Reordering:
    """Tokens (batch, tokens, width) in another order from one module on, up to another module.

    entry: the module that gets reordered tokens as input.
    exit: the module after which the tokens are in their original order again.
    order: for each position inside, the position outside. The special tokens come first, then the
        patches.
    """

    entry: str
    exit: str
    order: tuple[int, ...]


@contextmanager
def reordered(module: nn.Module, reordering: Reordering | None) -> Iterator[None]:
    """Reorder the tokens between the two modules of a reordering; None changes nothing.

    Hooks that were registered before see the reordered tokens, too.
    """
    if reordering is None:
        yield
        return
    run = object()  # identifies this run of the module
    count = len(reordering.order)
    order = torch.tensor(reordering.order)

    def in_order(value: Any, positions: Tensor) -> Any:
        """Return tokens in this order, and anything else unchanged."""
        if isinstance(value, Tensor) and value.dim() == 3 and value.shape[1] == count:
            return value.index_select(1, positions.to(value.device))
        return value

    # Only this run is reordered: another one, inside it or in another thread, has hooks of its own.
    # `kwargs` is None while another thread adds or removes this hook, which is not this run.
    def enter(
        _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> Any:
        if kwargs is None or _RUN.get() is not run:
            return None
        new_args = tuple(in_order(value, order) for value in args)
        new_kwargs = {name: in_order(value, order) for name, value in kwargs.items()}
        return new_args, new_kwargs

    def leave(_module: nn.Module, _args: Any, output: Any) -> Any:
        if _RUN.get() is not run:
            return None
        tensor = first_tensor(output)
        if tensor is None:
            return output
        original_order = order.argsort()
        return with_tensor(output, 0, in_order(tensor, original_order))

    entry = module.get_submodule(reordering.entry)
    exit_ = module.get_submodule(reordering.exit)
    handles = (
        entry.register_forward_pre_hook(enter, with_kwargs=True, prepend=True),
        exit_.register_forward_hook(leave),
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

    Tokens that do not differ between two images are the special ones. Images that differ in one
    band show where each patch lies (bands.py).

    images: two or more images of normalised noise.
    """
    size = int(images.shape[2]), int(images.shape[3])
    # the first image, its variants with one band of the second image, and the second image
    trial_images = torch.cat([banded_images(images), images[1:2]])
    tokens = _tokens_entering(module, attention, trial_images)  # (images, tokens, width)
    if tokens is None:
        reason = f"the input of {attention} is not (batch, tokens, width); {_SAY}"
        return TokenOrder(special=(), grid=None, reason=reason)
    changes = (tokens[-1] - tokens[0]).abs().amax(-1)  # between the two images, of each token
    special = tuple((changes == 0).nonzero().flatten().tolist())
    places = mean_bands(tokens[:-1], channel_axis=2)
    places_of_patches = places[:, (changes > 0).cpu()]
    if not places_of_patches.shape[1]:
        reason = f"no token of {attention} depends on the image; {_SAY}"
        return TokenOrder(special, grid=None, reason=reason, places=places)
    grid, fit = best_grid(places_of_patches, size)
    if fit >= FITS:
        return TokenOrder(special, grid, places=places)
    reason = _why_no_grid(places_of_patches, size)
    return TokenOrder(special, grid=None, reason=reason, places=places)


def _why_no_grid(places: Places, size: Grid) -> str:
    """Describe why tokens do not lie row by row, and what to do.

    The patches may be in another order, or some of the tokens are no patches.

    places: the places of the tokens that depend on the image.
    size: the (height, width) of the image.
    """
    count = places.shape[1]
    down, across = places
    # with the axes exchanged or reversed, the patches of each order are row by row
    turned_by_order = {
        "column by column": (torch.stack([across, down]), (size[1], size[0])),
        "row by row from the right": (torch.stack([down, -across]), size),
        "row by row from the bottom": (torch.stack([-down, across]), size),
        "row by row from the last to the first": (-places, size),
    }
    for order, (turned_places, turned_size) in turned_by_order.items():
        _, fit = best_grid(turned_places, turned_size)
        if fit >= FITS:
            return f"its {count} patches are not row by row, but {order}; {_REORDER}"
    for prefix in range(1, min(_MOST_PREFIX, count - 1) + 1):
        grid, fit = best_grid(places[:, prefix:], size)
        if fit >= FITS and has_proportions(grid, size):
            kinds = ("cls", *["register"] * (prefix - 1))
            return (
                f"its first {prefix} of {count} tokens are not patches, but depend on "
                f"the image; say grid={grid} and prefix={kinds}"
            )
    if shows_places(places):
        return f"its {count} patches are not row by row in the image; {_REORDER}"
    return f"a forward pass does not show where in the image its {count} patches lie; {_SAY}"


class _Stop(Exception):  # noqa: N818  not an error
    """Stops the forward pass at the first attention layer."""


def _tokens_entering(module: nn.Module, attention: str, images: Tensor) -> Tensor | None:
    """Return the tokens (batch, tokens, width) that enter an attention module, or None."""
    entered: list[Tensor] = []

    def stop_before(_name: str, arguments: Arguments) -> None:
        entered.extend(value for value in arguments.values() if isinstance(value, Tensor))
        raise _Stop

    try:
        with evaluating(module), torch.no_grad(), watching(module, [attention], before=stop_before):
            module(images)
    except _Stop:
        pass
    sequences = [tensor for tensor in entered if tensor.dim() == 3]
    if not sequences:
        return None
    tokens = sequences[0]
    if len(images) not in tokens.shape[:2]:
        return None
    if len(tokens) != len(images):  # nn.MultiheadAttention: (tokens, batch, width)
        tokens = tokens.transpose(0, 1)
    return tokens


def keeps_logits(
    module: nn.Module, reordering: Reordering, attention: str, images: Tensor, logits_of: LogitsOf
) -> bool:
    """Return True if a reordering puts special tokens first and leaves the logits equal.

    attention: the attention module at which the order of the tokens is read.
    """
    with evaluating(module), torch.no_grad():
        plain = logits_of(module(images)).float()
        with reordered(module, reordering):
            order = read_order(module, attention, images)
            other = logits_of(module(images)).float()
    tolerance = max(TOLERANCE, _ROUNDING_STEPS * torch.finfo(images.dtype).eps)
    allowed = largest_allowed(plain, tolerance)
    is_close = allowed > 0 and (plain - other).abs().max().item() <= allowed
    return is_close and order.is_canonical


def gradient_at(
    module: nn.Module, attention: str, images: Tensor, logits_of: LogitsOf
) -> Tensor | None:
    """Return the gradient of a random sum of the logits at an attention module's output.

    Returns None if the logits have no gradient.
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
            generator = torch.Generator().manual_seed(0)
            factors = torch.rand(logits.shape, generator=generator).to(logits)
            (gradient,) = torch.autograd.grad(
                (logits * factors).sum(),
                leaves[-1],
                # zeros if the logits do not depend on the output
                allow_unused=True,
                materialize_grads=True,
            )
    except RuntimeError as error:
        # the forward pass is in inference mode, or has a checkpoint that autograd.grad cannot pass
        if lacks_memory(error) or isinstance(error, torch.OutOfMemoryError):
            raise
        return None
    finally:
        handle.remove()
    return gradient


@dataclass(frozen=True)
class TokensRead:
    """The tokens of the last layer that the classifier reads.

    special: the special tokens that it reads differently from the patches.
    patches: whether it reads patches.
    """

    special: tuple[int, ...]
    patches: bool


def tokens_read(
    module: nn.Module, attention: str, images: Tensor, logits_of: LogitsOf, special: int
) -> TokensRead | None:
    """Return what the classifier reads of the output of an attention module.

    Returns None if nothing shows it. A classifier of the mean or the maximum of all tokens reads
    special tokens in the same way as patches.

    special: the number of special tokens, which are the first ones.
    """
    strengths = _strengths(gradient_at(module, attention, images, logits_of))
    if strengths is None or not strengths.any():
        strengths = _changed_logits(module, attention, images, logits_of, special)
    if strengths is None or not strengths.any():
        return None
    patch_strengths = strengths[special:]
    of_read_patches = patch_strengths[patch_strengths > 0]
    count = len(of_read_patches)
    # A token in a mean over n patches has 1/n of the strength of a token that is read directly. The
    # threshold is the geometric mean of the two: the factor is the root of n x 1.
    threshold = of_read_patches.median() * count**0.5 if count else 0.0
    special_read = (strengths[:special] > threshold).nonzero().flatten().tolist()
    return TokensRead(tuple(special_read), patches=count > 0)


def _strengths(gradient: Tensor | None) -> Tensor | None:
    """Return the norm of the gradient at each token, or None without a gradient of tokens.

    gradient: (batch, tokens, width) or (tokens, batch, width) for two images.
    """
    if gradient is None or gradient.dim() != 3:
        return None
    if len(gradient) != 2:  # (tokens, batch, width)
        gradient = gradient.transpose(0, 1)
    strengths: Tensor = gradient.float().norm(dim=(0, 2))
    return strengths


class _NoiseTrial:
    """A hook on an attention module that adds noise to one of its output tokens.

    position: the token that is changed in the next forward pass; None for no change.
    count: the number of tokens in the last forward pass, 0 if its output is no sequence.
    """

    def __init__(self) -> None:
        self.position: int | None = None
        self.count = 0

    def change(self, _module: nn.Module, _inputs: Any, output: Any) -> Any:
        """Return the output with noise in the token; None leaves it as it is."""
        tokens = tensors_in(output)[0]
        if tokens.dim() != 3:
            return None
        # (batch, tokens, width) or (tokens, batch, width), of two images
        token_axis = 1 if len(tokens) == 2 else 0
        self.count = tokens.shape[token_axis]
        if self.position is None:
            return None
        noise = torch.randn(tokens.shape[-1], generator=torch.Generator().manual_seed(0)).to(tokens)
        changed = tokens.clone()
        changed.select(token_axis, self.position).add_(noise * tokens.std())
        return with_tensor(output, 0, changed)


def _changed_logits(
    module: nn.Module, attention: str, images: Tensor, logits_of: LogitsOf, special: int
) -> Tensor | None:
    """Return how much the logits change with noise in each token.

    Only special tokens and some patches are changed. All patches get the mean of these patches.

    special: the number of special tokens, which are the first ones.
    """
    trial = _NoiseTrial()
    handle = module.get_submodule(attention).register_forward_hook(trial.change)
    try:
        with evaluating(module), torch.no_grad():
            plain = logits_of(module(images[:2])).float()
            count = trial.count
            if count <= special:
                return None
            strengths = torch.zeros(count)
            # evenly spaced, from the first patch to the last one
            patches = torch.linspace(special, count - 1, _PATCHES_CHANGED).long().unique().tolist()
            for position in (*range(special), *patches):
                trial.position = position
                changed = logits_of(module(images[:2])).float()
                strengths[position] = (changed - plain).norm()
    finally:
        handle.remove()
    strengths[special:] = strengths[patches].mean()
    return strengths


def prefix_kinds(special: tuple[int, ...], read: TokensRead | None) -> tuple[PrefixKind, ...]:
    """Return the kinds of the special tokens.

    CLS is the first one that the classifier reads differently from the patches. If exactly two are
    read, the second one is the distillation token. If nothing shows what the classifier reads, CLS
    is the first of all tokens. All others are registers.

    special: the positions of the special tokens.
    read: the tokens that the classifier reads, or None if nothing shows them.
    """
    kinds: list[PrefixKind] = ["register"] * len(special)
    class_tokens: tuple[int, ...] = ()
    if read is not None:
        class_tokens = read.special
    elif 0 in special:
        class_tokens = (0,)
    if class_tokens:
        kinds[class_tokens[0]] = "cls"
    if len(class_tokens) == 2:
        kinds[class_tokens[1]] = "distillation"
    return tuple(kinds)


def readout_of(layout: TokenLayout, read: TokensRead | None, *, pooled: bool) -> Readout:
    """Return what the classifier reads.

    pooled: whether an attention layer after the blocks pools the tokens.
    """
    if pooled:
        return "pool"
    if read is None:
        return "cls" if "cls" in layout.prefix else "mean"
    if not read.special:
        return "mean"
    if len(read.special) == 2 and not read.patches:
        return "cls+distillation"
    return "cls"
