"""The tokens of a module with attention: their order, the layout of the patches, and the readout.

They are read from forward passes, as the rest of its anatomy is in `structure`.
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
    trace: of a forward pass of these images.
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

    def added_to(self, anatomy: Anatomy) -> Anatomy:
        """Return the anatomy with the family that the tokens show.

        For a model with one sequence of tokens also with layout, readout and order.
        """
        module = self.module
        images = self.images
        calls = self.calls
        unpooled = []
        for name, call in calls.items():
            if call.queries == call.keys and call.batch == self.trace.images:
                unpooled.append(name)
        if any(call.batch > self.trace.images for call in calls.values()):
            if any(has_windows(module, name) for name in calls):
                return replace(anatomy, family="windowed", readout="mean")
            return replace(
                anatomy, unread="its attention is in windows whose place in the image is not known"
            )
        lengths = sorted({calls[name].queries for name in unpooled})
        pooled = [name for name, call in calls.items() if name not in unpooled and call.queries > 1]
        if not lengths:
            first = next(iter(calls.values()))
            reason = (
                "no attention layer has as many keys as queries (the first has "
                f"{first.queries} and {first.keys})"
            )
            return replace(
                anatomy, unread=f"{reason}: keys are pooled, or added to those of the tokens"
            )
        if len(lengths) != 1:
            return replace(
                anatomy, unread=f"its attention layers have {lengths} tokens, not one number"
            )
        if pooled:
            return replace(
                anatomy, unread=f"its attention layers have fewer keys than queries ({pooled[0]})"
            )
        order = self._order(unpooled[0], lengths[0])
        if order.grid is None:
            return replace(anatomy, unread=order.reason, row_by_row=False)
        height = int(images.shape[2])
        width = int(images.shape[3])
        patch_size = self._patch_size(order.grid)
        covered = (order.grid[0] * patch_size[0], order.grid[1] * patch_size[1])
        if covered[0] > height or covered[1] > width:
            reason = (
                f"its {order.grid[0]}x{order.grid[1]} patches of {patch_size[0]}x{patch_size[1]} "
                f"px cover more than the image of {height}x{width} px, which it pads; say "
                f"image_size={covered}"
            )
            return replace(anatomy, unread=reason, row_by_row=False)
        reordering = None if order.is_canonical else self._reordering(order, lengths[0])
        if not order.is_canonical and (
            reordering is None
            or not keeps_logits(module, reordering, unpooled[0], images, self.logits_of)
        ):
            reason = (
                f"tokens {list(order.special[:8])} do not depend on the image and are not "
                "the first ones"
            )
            return replace(
                anatomy, unread=f"{reason}; put them first", row_by_row=False, special_first=False
            )
        names = list(calls)
        after = names[names.index(unpooled[-1]) + 1 :]
        with reordered(module, reordering):
            unused = self._without_gradient(after)
            read = tokens_read(module, unpooled[-1], images, self.logits_of, len(order.special))
        later = [calls[name] for name in after if name not in unused]
        layout = TokenLayout(order.grid, patch_size, self._prefix(order, read))
        return replace(
            anatomy,
            family="vit",
            layout=layout,
            readout=readout_of(
                layout, read, pooled=any(call.queries < call.keys for call in later)
            ),
            attention=tuple(part for part in anatomy.attention or () if part.module not in unused),
            unused=unused,
            reordering=reordering,
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
        agrees = (
            read.grid is not None
            and hints.prefix is not None
            and len(read.special) == len(hints.prefix)
        )
        if hints.grid is None and (hints.prefix is None or agrees):
            return read
        if hints.prefix is not None:
            prefix = len(hints.prefix)
        else:
            assert hints.grid is not None  # one of the two is given
            prefix = tokens - hints.grid[0] * hints.grid[1]
        side = round(max(tokens - prefix, 0) ** 0.5)
        grid = hints.grid or (side, side)
        if prefix < 0 or prefix + grid[0] * grid[1] != tokens:
            if hints.grid is None:
                raise UnsupportedError(
                    f"expected a square grid beside {prefix} special tokens, found "
                    f"{tokens - prefix} patches in {self.name}; say grid=(rows, columns)"
                )
            raise UnsupportedError(
                f"expected {tokens} tokens, as {self.name} has, found grid={grid} and "
                f"{max(prefix, 0)} special tokens"
            )
        if read.grid is not None and (len(read.special), read.grid) != (prefix, grid):
            raise UnsupportedError(
                f"expected {len(read.special)} special tokens beside patches of grid={read.grid}, "
                "as a forward "
                f"pass of {self.name} shows, found {prefix} and grid={grid}; leave grid= and "
                "prefix= out"
            )
        special = read.special if len(read.special) == prefix else tuple(range(prefix))
        if read.grid is None and read.contradicts(special, grid):
            raise UnsupportedError(
                f"expected patches row by row in grid={grid} after {prefix} special tokens, found "
                "in a forward pass of "
                f"{self.name} that {read.reason}"
            )
        return TokenOrder(special, grid)

    def _reordering(self, order: TokenOrder, tokens: int) -> Reordering | None:
        """Return the reordering that puts special tokens first.

        None where no module takes, or returns, all tokens. It holds from the first module that
        takes all tokens to the last one that returns them.
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
        return Reordering(entry.module, returns[-1].module, (*order.special, *patches))

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
