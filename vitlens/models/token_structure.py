"""The tokens of a module with attention: their order, the layout of the patches, and the readout.

Like the rest of the anatomy (structure.py), they are read from forward passes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn

from vitlens.errors import UnsupportedError
from vitlens.models.anatomy import Anatomy, StructureHints, has_named_cls, has_windows, named_prefix
from vitlens.models.bands import Grid
from vitlens.models.recording import AttentionRecorder, TracedAttention
from vitlens.models.token_order import (
    LogitsOf,
    Reordering,
    TokenOrder,
    TokensRead,
    gradient_at,
    keeps_logits,
    prefix_kinds,
    read_order,
    readout_of,
    reordered,
    tokens_read,
)
from vitlens.shapes import PrefixKind, TokenLayout


@dataclass(frozen=True)
class TokenStructure:
    """The tokens of a module with attention.

    images, logits_of, hints: as in `trace_anatomy`.
    trace: the trace of a forward pass of these images.
    calls: the first attention call of each module that computes attention, in forward order.
    """

    module: nn.Module
    images: Tensor
    logits_of: LogitsOf
    hints: StructureHints
    trace: AttentionRecorder
    calls: Mapping[str, TracedAttention]

    @property
    def name(self) -> str:
        """Return the name of the class of the module."""
        return type(self.module).__name__

    def complete(self, anatomy: Anatomy) -> Anatomy:
        """Return the anatomy with the family that the tokens show.

        For a model with one sequence of tokens also with layout, readout and order.
        """
        if any(call.batch > self.trace.images for call in self.calls.values()):
            return self._complete_windowed(anatomy)
        reason = self._why_no_sequence()
        if reason:
            return replace(anatomy, unread=reason)
        sequence_modules = self._sequence_modules()
        first_module = sequence_modules[0]
        last_module = sequence_modules[-1]
        tokens = self.calls[first_module].queries
        order = self._order(first_module, tokens)
        if order.grid is None:
            return replace(anatomy, unread=order.reason, row_by_row=False)
        patch_size = self._patch_size(order.grid)
        reason = self._why_not_covered(order.grid, patch_size)
        if reason:
            return replace(anatomy, unread=reason, row_by_row=False)
        reordering = None
        if not order.is_canonical:
            reordering = self._reordering(order, tokens, first_module)
            if reordering is None:
                reason = (
                    f"tokens {list(order.special[:8])} do not depend on the image and are not "
                    "the first ones; put them first"
                )
                return replace(anatomy, unread=reason, row_by_row=False, special_first=False)

        names = list(self.calls)
        names_after = names[names.index(last_module) + 1 :]
        with reordered(self.module, reordering):
            unused = self._without_gradient(names_after)
            read = tokens_read(
                self.module, last_module, self.images, self.logits_of, len(order.special)
            )
        used_calls_after = [self.calls[name] for name in names_after if name not in unused]
        is_pooled = any(call.queries < call.keys for call in used_calls_after)
        layout = TokenLayout(order.grid, patch_size, self._prefix(order, read))
        return replace(
            anatomy,
            family="vit",
            layout=layout,
            readout=readout_of(layout, read, pooled=is_pooled),
            attention=tuple(part for part in anatomy.attention or () if part.module not in unused),
            unused=unused,
            reordering=reordering,
        )

    def _complete_windowed(self, anatomy: Anatomy) -> Anatomy:
        """Return the anatomy of a model that computes attention in parts of the image."""
        if any(has_windows(self.module, name) for name in self.calls):
            return replace(anatomy, family="windowed", readout="mean")
        return replace(
            anatomy, unread="its attention is in windows whose place in the image is not known"
        )

    def _sequence_modules(self) -> list[str]:
        """Return the modules with as many queries as keys, and the images as batch."""
        names = []
        for name, call in self.calls.items():
            if call.queries == call.keys and call.batch == self.trace.images:
                names.append(name)
        return names

    def _why_no_sequence(self) -> str:
        """Return why the model has no sequence of tokens of one length, "" if it has one."""
        names = self._sequence_modules()
        if not names:
            first = next(iter(self.calls.values()))
            return (
                "no attention layer has as many keys as queries (the first has "
                f"{first.queries} and {first.keys}): keys are pooled, or added to those of the "
                "tokens"
            )
        lengths = sorted({self.calls[name].queries for name in names})
        if len(lengths) != 1:
            return f"its attention layers have {lengths} tokens, not one number"
        for name, call in self.calls.items():
            if name not in names and call.queries > 1:
                return f"its attention layers have fewer keys than queries ({name})"
        return ""

    def _why_not_covered(self, grid: Grid, patch_size: tuple[int, int]) -> str:
        """Return why the patches are not those of the image alone, "" if they are."""
        height = int(self.images.shape[2])
        width = int(self.images.shape[3])
        covered = (grid[0] * patch_size[0], grid[1] * patch_size[1])
        if covered[0] <= height and covered[1] <= width:
            return ""
        return (
            f"its {grid[0]}x{grid[1]} patches of {patch_size[0]}x{patch_size[1]} px cover more "
            f"than the image of {height}x{width} px, which it pads; say image_size={covered}"
        )

    def _without_gradient(self, names: Sequence[str]) -> tuple[str, ...]:
        """Return the modules on which the logits do not depend."""
        unused = []
        for name in names:
            gradient = gradient_at(self.module, name, self.images, self.logits_of)
            if gradient is not None and not gradient.any():
                unused.append(name)
        return tuple(unused)

    def _prefix(self, order: TokenOrder, read: TokensRead | None) -> tuple[PrefixKind, ...]:
        """Return the kinds of the special tokens; read: what the classifier reads of them."""
        if self.hints.prefix is not None:
            return self.hints.prefix
        prefix = prefix_kinds(order.special, read)
        if "cls" in prefix:
            return prefix
        library_prefix = named_prefix(self.module)
        if library_prefix is not None and len(library_prefix) == len(prefix):
            return library_prefix  # although the classifier does not read it
        if prefix and has_named_cls(self.module):
            return ("cls", *prefix[1:])
        return prefix

    def _order(self, attention: str, tokens: int) -> TokenOrder:
        """Return the order that a forward pass shows, or the given one where it shows none.

        Raises UnsupportedError where the given order is not the one read.
        """
        read = read_order(self.module, attention, self.images)
        hints = self.hints
        hint_agrees_with_forward_pass = (
            read.grid is not None
            and hints.prefix is not None
            and len(read.special) == len(hints.prefix)
        )
        if hints.grid is None and (hints.prefix is None or hint_agrees_with_forward_pass):
            return read
        prefix, grid = self._prefix_and_grid_of_hints(tokens)
        if read.grid is not None and (len(read.special), read.grid) != (prefix, grid):
            raise UnsupportedError(
                f"expected {len(read.special)} special tokens next to patches of grid={read.grid}, "
                f"as a forward pass of {self.name} shows, found {prefix} and grid={grid}; leave "
                "grid= and prefix= out"
            )
        special = read.special if len(read.special) == prefix else tuple(range(prefix))
        if read.grid is None and read.contradicts(special, grid):
            raise UnsupportedError(
                f"expected patches row by row in grid={grid} after {prefix} special tokens, found "
                f"in a forward pass of {self.name} that {read.reason}"
            )
        return TokenOrder(special, grid)

    def _prefix_and_grid_of_hints(self, tokens: int) -> tuple[int, Grid]:
        """Return the number of special tokens and the grid, one of which the hints give.

        The other follows from the number of tokens; a grid is then taken to be square. Raises
        UnsupportedError if they do not add up to the tokens.
        """
        hints = self.hints
        if hints.prefix is not None:
            prefix = len(hints.prefix)
        else:
            assert hints.grid is not None
            prefix = tokens - hints.grid[0] * hints.grid[1]
        side = round(max(tokens - prefix, 0) ** 0.5)
        grid = hints.grid or (side, side)
        if prefix >= 0 and prefix + grid[0] * grid[1] == tokens:
            return prefix, grid
        if hints.grid is None:
            raise UnsupportedError(
                f"expected a square grid next to {prefix} special tokens, found "
                f"{tokens - prefix} patches in {self.name}; say grid=(rows, columns)"
            )
        raise UnsupportedError(
            f"expected {tokens} tokens, as {self.name} has, found grid={grid} and "
            f"{max(prefix, 0)} special tokens"
        )

    def _reordering(self, order: TokenOrder, tokens: int, attention: str) -> Reordering | None:
        """Return the reordering that puts special tokens first.

        It holds from the first module that takes all tokens to the last one that returns them.
        Returns None if there are no such modules, or if the logits would change.

        attention: an attention module inside the reordering.
        """
        shape = (self.trace.images, tokens)
        takes = []
        returns = []
        for call in self.trace.calls:
            if any(_is_sequence(value.shape, shape) for value in call.arguments.values()):
                takes.append(call)
            if _is_sequence(call.output or (), shape):
                returns.append(call)
        if not takes or not returns:
            return None
        patches = [position for position in range(tokens) if position not in order.special]
        entry = min(takes, key=lambda call: call.begin)
        reordering = Reordering(entry.module, returns[-1].module, (*order.special, *patches))
        if keeps_logits(self.module, reordering, attention, self.images, self.logits_of):
            return reordering
        return None

    def _patch_size(self, grid: Grid) -> tuple[int, int]:
        """Return the pixels from patch to patch.

        These are the stride of the convolution that cuts the patches, or else the image size
        divided by the grid.
        """
        size = (int(self.images.shape[2]), int(self.images.shape[3]))
        for layer in self.module.modules():
            if isinstance(layer, nn.Conv2d) and layer.in_channels == 3 and _cuts(layer, size, grid):
                return layer.stride[0], layer.stride[1]
        return size[0] // grid[0], size[1] // grid[1]


def _cuts(layer: nn.Conv2d, size: tuple[int, int], grid: Grid) -> bool:
    """Return True if a convolution cuts an image of this size into this grid.

    The image may be padded to whole patches.
    """
    padding = (0, 0) if isinstance(layer.padding, str) else layer.padding
    is_whole = True
    is_padded = layer.kernel_size == layer.stride
    for axis in (0, 1):
        kernel = layer.kernel_size[axis]
        stride = layer.stride[axis]
        room = size[axis] + 2 * padding[axis]
        is_whole &= (room - kernel) // stride + 1 == grid[axis]
        is_padded &= -(-size[axis] // stride) == grid[axis]
    return is_whole or is_padded


def _is_sequence(shape: tuple[int, ...], batch: tuple[int, int]) -> bool:
    return len(shape) == 3 and shape[:2] == batch
