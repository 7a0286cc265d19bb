"""Numbers of layers: a layer has the number of its block in the model's list of blocks.

A block without attention (an MLP, a convolution, an identity) has a number, too, and no heads. If
one block holds several attention layers, each of them takes a number.

The public functions number the layers of an anatomy, and put numbers into words. The private ones
find the blocks without attention.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from torch import nn

if TYPE_CHECKING:
    from vitlens.models.anatomy import Anatomy

_LISTS: Final = (nn.ModuleList, nn.Sequential)
_LIBRARIES: Final = ("torch.nn.", "torchvision.ops.")
_Order = Mapping[str, int]  # the position of each module in the module tree


def with_blocks_without_attention(
    module: nn.Module, anatomy: "Anatomy", is_block: Callable[[str], bool]
) -> "Anatomy":
    """Return the anatomy with the blocks that have no attention.

    They count in the numbers of layers.

    is_block: a function that returns whether a member of a list of blocks, by its name, is a block.
        It is not called for members between two blocks with attention.
    """
    members = _blocks_without_attention(module, anatomy, is_block)
    order = _order(module)
    blocks = list(anatomy.blocks)
    if blocks:
        for name in members:
            # the members of a ModuleList are called, not the list
            if not isinstance(module.get_submodule(name), nn.ModuleList):
                blocks.append(name)
    if len(blocks) > len(anatomy.blocks):
        blocks.sort(key=order.__getitem__)
    return with_numbers(module, replace(anatomy, blocks=tuple(blocks)), members)


def with_numbers(
    module: nn.Module, anatomy: "Anatomy", without_attention: tuple[str, ...]
) -> "Anatomy":
    """Return the anatomy with the number of blocks without attention before each attention module.

    without_attention: the names of these blocks.
    """
    if not without_attention:
        return anatomy
    order = _order(module)
    parts = []
    for part in anatomy.attention or ():
        before = sum(order[name] < order[part.module] for name in without_attention)
        parts.append(replace(part, blocks_before=before))
    return replace(anatomy, attention=tuple(parts), without_attention=without_attention)


def numbers_text(numbers: Sequence[int], joined_by: str = "or") -> str:
    """Return the numbers of layers in words: "from 0 to 5", or "0, 2 or 4" if some are missing.

    joined_by: the word before the last number.
    """
    first = numbers[0]
    if len(numbers) == 1:
        return str(first)
    if list(numbers) == list(range(first, first + len(numbers))):
        return f"from {first} to {numbers[-1]}"
    return f"{', '.join(map(str, numbers[:-1]))} {joined_by} {numbers[-1]}"


def is_sparse(numbers: Sequence[int]) -> bool:
    """Return True if some number before the last one is that of a block without attention."""
    return list(numbers) != list(range(len(numbers)))


def no_layer(numbers: Sequence[int], number: int, alias: str, option: str = "a layer") -> str:
    """Return the message that refuses the number of a layer.

    numbers: the numbers of the layers with attention, in order.
    option: how the message names the number.
    """
    if not is_sparse(numbers):
        return f"expected {option} {numbers_text(numbers)}, found {number}"
    return (
        f"expected {option} {numbers_text(numbers)} (the blocks of {alias} with attention), "
        f"found {number}"
    )


def numbering_note(anatomy: "Anatomy") -> str:
    """Return a note that names the layers with attention, or "" if all blocks have attention."""
    if not anatomy.without_attention:
        return ""
    numbers = [*anatomy.attention_by_layer]
    count = len(anatomy.without_attention)
    blocks = "1 block has" if count == 1 else f"{count} blocks have"
    with_attention = numbers_text(numbers, joined_by="and")
    return (
        f"{blocks} no attention; layers are numbered by their blocks, those with attention are "
        f"{with_attention}"
    )


def _blocks_without_attention(
    module: nn.Module, anatomy: "Anatomy", is_block: Callable[[str], bool]
) -> tuple[str, ...]:
    """Return the members of the lists of blocks that have no attention, in module order."""
    order = _order(module)
    with_attention = tuple(_unit(name, anatomy.blocks) for name in anatomy.attention_modules)
    members, members_with_attention = _list_members(with_attention, order)
    candidates = []
    for name in members:
        if not _overlaps(name, with_attention) and _is_unit(module, name):
            candidates.append(name)
    innermost = [name for name in candidates if not _holds(name, candidates)]
    if not innermost:
        return ()
    # first the members that are known to be blocks, then all others with the class of a block
    block_classes = {type(module.get_submodule(name)) for name in members_with_attention}
    blocks = []
    for name in innermost:
        if _is_between(name, members_with_attention, order) or is_block(name):
            blocks.append(name)
            block_classes.add(type(module.get_submodule(name)))
    block_classes.difference_update(_LISTS)
    of_block_class = [
        name for name in innermost if type(module.get_submodule(name)) in block_classes
    ]
    return tuple(sorted({*blocks, *of_block_class}, key=order.__getitem__))


def _list_members(with_attention: Sequence[str], order: _Order) -> tuple[list[str], list[str]]:
    """Return the members of the lists of blocks, and those of them that have attention.

    The lists are those of the blocks with attention, whose names are given.
    """
    members: dict[str, None] = {}  # without repetition
    members_with_attention: list[str] = []
    for names in _groups(with_attention):
        pattern, depth = _list_pattern(names)
        if pattern is None:
            continue
        members_with_attention += [".".join(name.split(".")[:depth]) for name in names]
        members.update(dict.fromkeys(name for name in order if pattern.fullmatch(name)))
    return list(members), members_with_attention


def _order(module: nn.Module) -> _Order:
    return {name: position for position, (name, _) in enumerate(module.named_modules())}


def _unit(attention: str, blocks: Sequence[str]) -> str:
    """Return the innermost block of an attention module, or the module itself without a block."""
    around = [block for block in blocks if attention == block or attention.startswith(f"{block}.")]
    return max(around, key=len, default=attention)


def _groups(names: Sequence[str]) -> list[list[str]]:
    """Return the names in groups; names of one group differ only in their numbers."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(re.sub(r"\d+", "0", name), []).append(name)
    return list(groups.values())


def _list_pattern(names: Sequence[str]) -> tuple[re.Pattern[str] | None, int]:
    """Return a pattern for the members of a list of blocks, and the number of parts in their names.

    For "blocks.0.attn" and "blocks.1.attn", they are "blocks.NUMBER" and 2. The pattern is None if
    the names have no number. The last number is that of the block, with one exception: in
    "layers.0.1" and "layers.2.1", it is the same in all names and follows another number. Attention
    and MLP of a block are then a list of two, and the number before it is that of the block.

    names: the names of one group.
    """
    parts_by_name = [name.split(".") for name in names]
    first_parts = parts_by_name[0]
    # the positions of the parts with a number
    numbered = [position for position, part in enumerate(first_parts) if re.search(r"\d", part)]
    # while the last number directly follows another one: "layers.0.1", not "layers.0.attn.1"
    while len(numbered) > 1 and numbered[-2] == numbered[-1] - 1:
        last_numbers = {parts[numbered[-1]] for parts in parts_by_name}
        if len(last_numbers) > 1 or len(names) == 1:
            break
        numbered.pop()
    if not numbered:
        return None, 0
    depth = numbered[-1] + 1
    words = [re.sub(r"\d+", r"\\d+", re.escape(word)) for word in first_parts[:depth]]
    return re.compile(r"\.".join(words)), depth


def _overlaps(name: str, units: Sequence[str]) -> bool:
    """Return True for one of these modules, for a part of one, and for a module that holds one."""
    return any(
        name == unit or name.startswith(f"{unit}.") or unit.startswith(f"{name}.") for unit in units
    )


def _holds(name: str, names: Sequence[str]) -> bool:
    return any(other.startswith(f"{name}.") for other in names)


def _is_unit(module: nn.Module, name: str) -> bool:
    """Return True unless a member of a list is a plain layer or a list of plain layers.

    An identity may stand in a block's place.
    """
    member = module.get_submodule(name)
    if isinstance(member, _LISTS):  # weight matrices have two or more axes
        return any(parameter.dim() > 1 for parameter in member.parameters())
    return isinstance(member, nn.Identity) or not type(member).__module__.startswith(_LIBRARIES)


def _is_between(name: str, members_with_attention: Sequence[str], order: _Order) -> bool:
    """Return True if blocks with attention are before and after a member of their list."""
    list_name = name.rpartition(".")[0]
    positions = []
    for member in members_with_attention:
        if member.rpartition(".")[0] == list_name:
            positions.append(order[member])
    return bool(positions) and min(positions) < order[name] < max(positions)
