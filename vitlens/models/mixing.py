"""Find modules that mix tokens although no attention was recognised in them.

Such a module shows that a model has attention that vitlens cannot read. Candidates are modules that
correspond to recognised attention; `_mixes_tokens` tries each of them.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn

from vitlens.devices import evaluating
from vitlens.models.hooks import Arguments, Key, as_call, first_tensor, watching

_CONTAINERS: Final = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
_CHANGE: Final = 1.0  # added to one number of the input


def unread_attention(
    module: nn.Module, attention: Mapping[str, str], images: Tensor
) -> tuple[str, ...]:
    """Return the modules that mix tokens although no attention was recognised in them.

    Only modules that correspond to recognised attention are tested: modules at the same place in
    other blocks, and modules of the same classes.

    images: normalised images; the first one is used.
    attention: the modules in which attention was recognised, each with its residual block, or ""
        if that is unknown.
    """
    candidates = dict.fromkeys(
        (*_siblings(module, tuple(attention)), *_of_the_same_classes(module, attention))
    )
    if not candidates:
        return ()
    recognised = [*attention, *_blocks(attention)]
    arguments: dict[str, Arguments] = {}

    def record(name: str, values: Arguments, _output: Any) -> None:
        arguments.setdefault(name, values)

    with evaluating(module), torch.no_grad(), watching(module, [*candidates, *recognised], record):
        module(images[:1])
    token_shapes = {_shape(arguments.get(name, {})) for name in recognised}
    classes = {type(module.get_submodule(name)) for name in recognised}
    unread: list[str] = []
    for name in candidates:
        part = module.get_submodule(name)
        values = arguments.get(name)
        if values is None or _overlaps(name, unread):
            continue
        shape = _shape(values)
        takes_these_tokens = len(shape) == 3 and shape in token_shapes
        is_similar = type(part) in classes or takes_these_tokens
        if is_similar and _mixes_tokens(part, values):
            unread.append(name)
    return tuple(unread)


def _blocks(attention: Mapping[str, str]) -> list[str]:
    return [block for block in attention.values() if block]


def _overlaps(name: str, modules: Collection[str]) -> bool:
    """Return True for one of these modules, for a part of one, and for a module that holds one."""
    return any(
        name == other or name.startswith(f"{other}.") or other.startswith(f"{name}.")
        for other in modules
    )


def _siblings(module: nn.Module, attention: Collection[str]) -> Iterator[str]:
    """Yield the modules at the same place in other members of a list, then these members.

    For "blocks.0.attn", these are "blocks.1.attn" and "blocks.1" unless attention was recognised in
    "blocks.1".
    """
    for name in attention:
        parts = name.split(".")
        for position in range(len(parts)):
            list_name = ".".join(parts[:position])
            members = module.get_submodule(list_name)
            if not isinstance(members, _CONTAINERS):
                continue
            path_in_member = ".".join(parts[position + 1 :])
            for number, member in members.named_children():
                member_name = f"{list_name}.{number}" if list_name else number
                if _overlaps(member_name, attention):
                    continue
                if path_in_member and path_in_member in dict(member.named_modules()):
                    yield f"{member_name}.{path_in_member}"
                yield member_name


def _of_the_same_classes(module: nn.Module, attention: Mapping[str, str]) -> Iterator[str]:
    """Yield other modules with the class of recognised attention, or of one of its blocks."""
    classes = {type(module.get_submodule(name)) for name in (*attention, *_blocks(attention))}
    classes.difference_update(_CONTAINERS)
    for name, part in module.named_modules():
        if name and type(part) in classes and not _overlaps(name, tuple(attention)):
            yield name


def _shape(values: Arguments) -> tuple[int, ...]:
    """Return the shape of the first tensor with three axes or more among a module's arguments."""
    for value in values.values():
        if isinstance(value, Tensor) and value.dim() >= 3:
            return tuple(value.shape)
    return ()


def _stream_key(values: Arguments) -> Key | None:
    """Return the first argument that is a sequence of tokens or a map."""
    for key, value in values.items():
        if isinstance(value, Tensor) and value.dim() in (3, 4):
            return key
    return None


def _mixes_tokens(module: nn.Module, values: Arguments) -> bool:
    """Return True if a change of one number of the input changes the output at other tokens.

    The first and the last number of the input are tried.

    values: the arguments of the module.
    """
    key = _stream_key(values)
    if key is None:
        return False
    try:
        before = _output(module, values)
        for corner in (0, -1):
            stream = values[key].clone()
            first_or_last_number = (corner,) * stream.dim()
            stream[first_or_last_number] += _CHANGE
            after = _output(module, {**values, key: stream})
            if before is None or after is None or before.shape != after.shape:
                return False
            if _reaches_others(before != after, corner):
                return True
    except (RuntimeError, TypeError, ValueError, IndexError):
        # a module may not run outside its model
        return False
    return False


def _output(module: nn.Module, values: Arguments) -> Tensor | None:
    args, kwargs = as_call(values)
    with evaluating(module), torch.no_grad():
        return first_tensor(module(*args, **kwargs))


def _reaches_others(changes: Tensor, corner: int) -> bool:
    """Return True if more has changed than the token at a corner.

    changes: a mask of the changed numbers, with channels last or first.
    corner: 0 for the first token of the first image, -1 for the last token of the last image.
    """
    elsewhere = changes.clone()
    # if they are (batch, .., channels): all axes but the last one
    elsewhere[(corner,) * (changes.dim() - 1)] = False
    if changes.dim() == 4:  # if they are (batch, channels, rows, columns)
        elsewhere[corner, :, corner, corner] = False
    return bool(elsewhere.any())
