"""Numbers of layers: a layer has the number of its block in the model's list of blocks.

A block without attention (an MLP, a convolution, an identity) has a number, too, and no heads.
Where one block holds several attention layers, each of them takes a number.
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
_Order = Mapping[str, int]  # of all modules, in the module tree


def with_blocks_without_attention(
    module: nn.Module, anatomy: "Anatomy", is_block: Callable[[str], bool]
) -> "Anatomy":
    """Return the anatomy with the blocks that have no attention, which count in the numbers of
    layers.

    is_block: whether a member of a list of blocks is itself a block, by its name; not asked for
    members between two blocks with attention.
    """
    members = _blocks_without_attention(module, anatomy, is_block)
    order = _order(module)
    called = [name for name in members if not isinstance(module.get_submodule(name), nn.ModuleList)]
    blocks = anatomy.blocks
    if blocks:
        blocks = tuple(sorted((*blocks, *called), key=order.__getitem__)) if called else blocks
    return with_numbers(module, replace(anatomy, blocks=blocks), members)


def with_numbers(
    module: nn.Module, anatomy: "Anatomy", without_attention: tuple[str, ...]
) -> "Anatomy":
    """Return the anatomy whose attention modules know how many blocks without attention are before
    them.
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
    """Return the numbers of layers in words: "from 0 to 5", or "0, 2 and 4" where some between them
    are missing.
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
    """Return the message that refuses a number of a layer; numbers: of the layers with attention,
    in order.
    """
    if not is_sparse(numbers):
        return f"expected {option} {numbers_text(numbers)}, found {number}"
    return (
        f"expected {option} {numbers_text(numbers)} (the blocks of {alias} with attention), "
        f"found {number}"
    )


def numbering_note(anatomy: "Anatomy") -> str:
    """Return a note that names the layers with attention where some blocks have none.

    Returns "" where all have some.
    """
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
    """Return the members of the lists of blocks that have no attention, in the order of the module
    tree.
    """
    order = _order(module)
    units = tuple(_unit(name, anatomy.blocks) for name in anatomy.attention_modules)
    candidates: dict[str, None] = {}
    members_with_attention: list[str] = []
    for names in _groups(units):
        pattern, depth = _list_pattern(names)
        if pattern is None:
            continue
        members_with_attention += [".".join(name.split(".")[:depth]) for name in names]
        candidates.update(dict.fromkeys(name for name in order if pattern.fullmatch(name)))
    candidates_left = [
        name for name in candidates if not _overlaps(name, units) and _is_unit(module, name)
    ]
    innermost = [name for name in candidates_left if not _holds(name, candidates_left)]
    if not innermost:
        return ()
    kinds = {type(module.get_submodule(name)) for name in members_with_attention}
    blocks = []
    for name in innermost:
        if _is_between(name, members_with_attention, order) or is_block(name):
            blocks.append(name)
            kinds.add(type(module.get_submodule(name)))
    kinds.difference_update(_LISTS)
    alike = [name for name in innermost if type(module.get_submodule(name)) in kinds]
    return tuple(sorted({*blocks, *alike}, key=order.__getitem__))


def _order(module: nn.Module) -> _Order:
    return {name: position for position, (name, _) in enumerate(module.named_modules())}


def _unit(attention: str, blocks: Sequence[str]) -> str:
    """Return the innermost block of an attention module, or the module itself where it is in
    none."""
    around = [block for block in blocks if attention == block or attention.startswith(f"{block}.")]
    return max(around, key=len, default=attention)


def _groups(names: Sequence[str]) -> list[list[str]]:
    """Return the names, grouped by what they are without their numbers."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(re.sub(r"\d+", "0", name), []).append(name)
    return list(groups.values())


def _list_pattern(names: Sequence[str]) -> tuple[re.Pattern[str] | None, int]:
    """Return the pattern of the members of a list of blocks, and the number of parts of their
    names.

    names: the names of one group. None where the names have no number. The last number is that of a
        block,
    unless it is the same in all of them and follows another number: attention and MLP of a block
    are then a list of two.
    """
    split = [name.split(".") for name in names]
    numbered = [column for column, word in enumerate(split[0]) if re.search(r"\d", word)]
    while len(numbered) > 1 and numbered[-2] == numbered[-1] - 1:
        if len({parts[numbered[-1]] for parts in split}) > 1 or len(names) == 1:
            break
        numbered.pop()
    if not numbered:
        return None, 0
    depth = numbered[-1] + 1
    words = [re.sub(r"\d+", r"\\d+", re.escape(word)) for word in split[0][:depth]]
    return re.compile(r"\.".join(words)), depth


def _overlaps(name: str, units: Sequence[str]) -> bool:
    """Return True for one of these modules, for a part of one, and for a module that holds one."""
    return any(
        name == unit or name.startswith(f"{unit}.") or unit.startswith(f"{name}.") for unit in units
    )


def _holds(name: str, names: Sequence[str]) -> bool:
    return any(other.startswith(f"{name}.") for other in names)


def _is_unit(module: nn.Module, name: str) -> bool:
    """Return False for a plain layer, such as a norm, and for a list of such layers without
    weights.

    An identity may stand in a block's place.
    """
    member = module.get_submodule(name)
    if isinstance(member, _LISTS):
        return any(parameter.dim() > 1 for parameter in member.parameters())
    return isinstance(member, nn.Identity) or not type(member).__module__.startswith(_LIBRARIES)


def _is_between(name: str, members: Sequence[str], order: _Order) -> bool:
    """Return True if blocks with attention are before and after a member of their list."""
    places = [
        order[member] for member in members if member.rpartition(".")[0] == name.rpartition(".")[0]
    ]
    return bool(places) and min(places) < order[name] < max(places)
