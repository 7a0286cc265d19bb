"""The tokens of a module with attention: their order, the layout of the patches, and the readout.

Like the rest of the module's anatomy (see `structure`), they are read from forward passes.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from torch import Tensor, nn

from vitlens.errors import UnsupportedError
from vitlens.models.anatomy import Anatomy, StructureHints, has_named_cls, has_windows, named_prefix
from vitlens.models.attention_recording import AttentionRecorder, TracedAttention
from vitlens.models.bands import Grid
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

_LISTED: Final = 8  # special tokens in a message


@dataclass(frozen=True)
class TokenStructure:
    """The tokens of a module with attention.

    module: the module.
    images: noise images, as in `trace_anatomy`.
    logits_of: a function from the module's output to the logits, as in `trace_anatomy`.
    hints: the structure given by the user or the model source.
    trace: a recorded forward pass of these images.
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

        A model with one sequence of tokens also gets layout, readout and order. If they cannot be
        read, the anatomy says why (`unread`).
        """
        if self._has_several_calls_per_image():
            if any(has_windows(self.module, name) for name in self.calls):
                return replace(anatomy, family="windowed", readout="mean")
            return replace(
                anatomy, unread="its attention is in windows whose place in the image is not known"
            )
        reason = self._reason_no_single_sequence()
        if reason:
            return replace(anatomy, unread=reason)
        sequence_names = self._self_attention()
        tokens = self.calls[sequence_names[0]].queries
        order = self._order(sequence_names[0], tokens)
        if order.grid is None:
            return replace(anatomy, unread=order.reason, row_by_row=False)
        patch_size = self._patch_size(order.grid)
        reason = self._reason_patches_too_large(order.grid, patch_size)
        if reason:
            return replace(anatomy, unread=reason, row_by_row=False)
        reordering = None
        if not order.is_canonical:
            reordering = self._reordering(order, tokens, sequence_names[0])
            if reordering is None:
                reason = (
                    f"tokens {list(order.special[:_LISTED])} do not depend on the image and are "
                    "not the first ones; put them first"
                )
                return replace(anatomy, unread=reason, row_by_row=False, special_first=False)
        return self._with_tokens(anatomy, order, order.grid, patch_size, reordering)

    def _has_several_calls_per_image(self) -> bool:
        """Return True if attention is computed in windows: its batch is longer than the images."""
        return any(call.batch > self.trace.images for call in self.calls.values())

    def _self_attention(self) -> list[str]:
        """Return the modules with as many keys as queries: every token attends to every token."""
        names = []
        for name, call in self.calls.items():
            if call.queries == call.keys and call.batch == self.trace.images:
                names.append(name)
        return names

    def _reason_no_single_sequence(self) -> str:
        """Return why the module has no single sequence of tokens, or "" if it has one."""
        sequence_names = self._self_attention()
        lengths = sorted({self.calls[name].queries for name in sequence_names})
        if not lengths:
            first_call = next(iter(self.calls.values()))
            return (
                "no attention layer has as many keys as queries (the first has "
                f"{first_call.queries} and {first_call.keys}): keys are pooled, or added to those "
                "of the tokens"
            )
        if len(lengths) > 1:
            return f"its attention layers have {lengths} tokens, not one number"
        for name, call in self.calls.items():
            # a single query is CLS or attention pooling, which reads the sequence
            if name not in sequence_names and call.queries > 1:
                return f"its attention layers have fewer keys than queries ({name})"
        return ""

    def _reason_patches_too_large(self, grid: Grid, patch_size: tuple[int, int]) -> str:
        """Return why the patches cover more than the image, or "" if they do not."""
        height = int(self.images.shape[2])
        width = int(self.images.shape[3])
        covered = (grid[0] * patch_size[0], grid[1] * patch_size[1])
        if covered[0] <= height and covered[1] <= width:
            return ""
        return (
            f"its {grid[0]}x{grid[1]} patches of {patch_size[0]}x{patch_size[1]} px cover more "
            f"than the image of {height}x{width} px, which it pads; say image_size={covered}"
        )

    def _with_tokens(
        self,
        anatomy: Anatomy,
        order: TokenOrder,
        grid: Grid,
        patch_size: tuple[int, int],
        reordering: Reordering | None,
    ) -> Anatomy:
        """Return the anatomy of a ViT with this order of its tokens.

        reordering: puts special tokens first; None if they are already.
        """
        last_name = self._self_attention()[-1]
        names = list(self.calls)
        names_after = names[names.index(last_name) + 1 :]
        with reordered(self.module, reordering):
            unused = self._without_gradient(names_after)
            special_count = len(order.special)
            token_readout = tokens_read(
                self.module, last_name, self.images, self.logits_of, special_count
            )
        used_calls_after = [self.calls[name] for name in names_after if name not in unused]
        is_pooled = any(call.queries < call.keys for call in used_calls_after)
        layout = TokenLayout(grid, patch_size, self._prefix(order, token_readout))
        return replace(
            anatomy,
            family="vit",
            layout=layout,
            readout=readout_of(layout, token_readout, pooled=is_pooled),
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

    def _prefix(
        self, order: TokenOrder, token_readout: TokensRead | None
    ) -> tuple[PrefixKind, ...]:
        """Return the kinds of the special tokens.

        token_readout: the tokens that the classifier reads, or None if nothing shows them.
        """
        if self.hints.prefix is not None:
            return self.hints.prefix
        prefix = prefix_kinds(order.special, token_readout)
        if "cls" in prefix:
            return prefix
        # the classifier reads no special token, but a token may still be a CLS token by its name
        library_prefix = named_prefix(self.module)
        if library_prefix is not None and len(library_prefix) == len(prefix):
            return library_prefix
        if prefix and has_named_cls(self.module):
            return ("cls", *prefix[1:])
        return prefix

    def _order(self, attention: str, tokens: int) -> TokenOrder:
        """Return the order that a forward pass shows, or the hinted one if it shows none.

        Raises UnsupportedError if the hinted order is not the one that the pass shows.

        attention: the first attention module of the sequence.
        tokens: the number of tokens in the sequence.
        """
        seen_order = read_order(self.module, attention, self.images)
        if not self._needs_hints(seen_order):
            return seen_order
        special_count, grid = self._hinted_count_and_grid(tokens)
        seen_count = len(seen_order.special)
        is_other = (seen_count, seen_order.grid) != (special_count, grid)
        if seen_order.grid is not None and is_other:
            raise UnsupportedError(
                f"expected {seen_count} special tokens next to patches of grid={seen_order.grid}, "
                f"as a forward pass of {self.name} shows, found {special_count} and grid={grid}; "
                "leave grid= and prefix= out"
            )
        special = tuple(range(special_count))
        if seen_count == special_count:
            special = seen_order.special
        if seen_order.grid is None and seen_order.contradicts(special, grid):
            raise UnsupportedError(
                f"expected patches row by row in grid={grid} after {special_count} special "
                f"tokens, but a forward pass of {self.name} shows: {seen_order.reason}"
            )
        return TokenOrder(special, grid)

    def _needs_hints(self, seen_order: TokenOrder) -> bool:
        """Return True if hints say more about the order than the forward pass has shown."""
        prefix = self.hints.prefix
        if self.hints.grid is not None:
            return True
        if prefix is None:
            return False
        seen_count = len(seen_order.special)
        hint_agrees_with_pass = seen_order.grid is not None and seen_count == len(prefix)
        return not hint_agrees_with_pass

    def _hinted_count_and_grid(self, tokens: int) -> tuple[int, Grid]:
        """Return the number of special tokens and the grid of the patches, by the hints.

        One of the two may be missing: it follows from the number of tokens. Without a grid, the
        patches form a square. Raises UnsupportedError if the hints do not add up to the number of
        tokens.
        """
        hints = self.hints
        if hints.prefix is not None:
            special_count = len(hints.prefix)
        else:
            assert hints.grid is not None  # one of the two is given
            special_count = tokens - hints.grid[0] * hints.grid[1]
        if hints.grid is not None:
            grid = hints.grid
        else:
            side = round(max(tokens - special_count, 0) ** 0.5)
            grid = (side, side)
        if special_count >= 0 and special_count + grid[0] * grid[1] == tokens:
            return special_count, grid
        if hints.grid is None:
            raise UnsupportedError(
                f"expected a square grid next to {special_count} special tokens, found "
                f"{tokens - special_count} patches in {self.name}; say grid=(rows, columns)"
            )
        raise UnsupportedError(
            f"expected {tokens} tokens, as {self.name} has, found grid={grid} and "
            f"{max(special_count, 0)} special tokens"
        )

    def _reordering(self, order: TokenOrder, tokens: int, attention: str) -> Reordering | None:
        """Return the reordering that puts special tokens first, with equal logits.

        It holds from the first module that takes all tokens to the last one that returns them.
        Returns None if no module takes, or returns, all tokens, or if the logits would change.
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
        first_taking = min(takes, key=lambda call: call.begin)
        last_returning = returns[-1]  # calls are in the order of their ends
        reordering = Reordering(
            entry=first_taking.module,
            exit=last_returning.module,
            order=(*order.special, *patches),
        )
        if keeps_logits(self.module, reordering, attention, self.images, self.logits_of):
            return reordering
        return None

    def _patch_size(self, grid: Grid) -> tuple[int, int]:
        """Return the pixels from patch to patch.

        They are the stride of the convolution that cuts the patches. Without one, they are the
        image size divided by the grid.
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
    fits_without_padding = True
    fits_with_padding = layer.kernel_size == layer.stride
    for axis in (0, 1):
        kernel = layer.kernel_size[axis]
        stride = layer.stride[axis]
        room = size[axis] + 2 * padding[axis]
        whole_patches = (room - kernel) // stride + 1
        padded_patches = math.ceil(size[axis] / stride)
        fits_without_padding &= whole_patches == grid[axis]
        fits_with_padding &= padded_patches == grid[axis]
    return fits_without_padding or fits_with_padding


def _is_sequence(shape: tuple[int, ...], batch_and_tokens: tuple[int, int]) -> bool:
    return len(shape) == 3 and shape[:2] == batch_and_tokens
