"""Pruning: a smaller model with some heads removed from its matrices."""

from collections.abc import Collection, Mapping
from copy import deepcopy
from dataclasses import replace

import torch
from torch import Tensor, nn

from vitlens.errors import InputError, UnsupportedError
from vitlens.models.anatomy import attention_modules, heads_of
from vitlens.models.assembly import Architecture, assemble
from vitlens.models.cutting import cut_heads, output_projection
from vitlens.models.model import Model

HeadMeans = Mapping[int, Tensor]  # layer -> (heads, head_dim)


def prune_heads(model: Model, heads: Mapping[int, Collection[int]], *, means: HeadMeans | None = None) -> Model:
    """A copy of the model without these heads: their rows of the joint projection, their columns of the output's.

    heads: by layer, both counted from 0. Its logits are those of the model with the heads set to zero; with means,
    of those layers' heads over tokens and images, (heads, head_dim) a layer, those with each head at its mean: that
    goes into the output projection's bias. A layer that loses all heads keeps its bias alone and is no attention layer
    any more: later ones count one less. It can be saved, loaded and pruned again; the original is left as it is.
    Raises InputError for a head that does not exist and a mean for each token (which no bias can hold),
    UnsupportedError for attention that cannot be cut (ours, timm's standard and torchvision's can).
    """
    names = list(attention_modules(model.module))
    chosen = {layer: sorted(set(some)) for layer, some in sorted(heads.items()) if some}
    _check(model, names, chosen)
    module = deepcopy(model.module)
    for layer, some in chosen.items():
        if means is not None:
            _fold(module.get_submodule(names[layer]), layer, some, means)
    cut_heads(module, {names[layer]: some for layer, some in chosen.items()})
    lost, every = sum(map(len, chosen.values())), sum(_count(model, name) for name in names)
    notes = (*model.provenance.notes, f"removed {lost} of {every} heads")
    made = assemble(
        module,
        _recorded(model, {names[layer]: some for layer, some in chosen.items()}),
        model.preprocessing,
        model.classes,
        model.alias,
        replace(model.provenance, notes=notes),
    )
    return made.to(model.device).train(model.training)


def _recorded(model: Model, removed: Mapping[str, list[int]]) -> Architecture:
    """The architecture with these heads gone as well, in the numbering of the model that nothing was taken from."""
    known = Architecture.from_json(model.architecture)
    pruned = dict(known.pruned)
    for name, heads in removed.items():
        gone = pruned.get(name, [])
        left = [head for head in range(_count(model, name) + len(gone)) if head not in gone]
        pruned[name] = sorted([*gone, *(left[head] for head in heads)])
    return replace(known, pruned=pruned)


def _check(model: Model, names: list[str], heads: Mapping[int, Collection[int]]) -> None:
    if not heads:
        raise InputError("expected at least one head to remove, found none; give {layer: heads}")
    for layer, some in heads.items():
        if not 0 <= layer < len(names):
            raise InputError(f"expected a layer from 0 to {len(names) - 1} of {model.alias}, found {layer}")
        output_projection(model.module.get_submodule(names[layer]))
        count = _count(model, names[layer])
        wrong = [head for head in some if not 0 <= head < count]
        if wrong:
            raise InputError(
                f"expected a head from 0 to {count - 1} in layer {layer} of {model.alias}, found {wrong[0]}"
            )


def _count(model: Model, name: str) -> int:
    return heads_of(model.module.get_submodule(name)) or 0


def _fold(attention: nn.Module, layer: int, heads: Collection[int], means: HeadMeans) -> None:
    """What the heads put out on average, through their columns of the output projection, into its bias."""
    _, projection = output_projection(attention)
    count = heads_of(attention) or 0
    shape = (count, projection.in_features // count)
    given = means.get(layer)
    if given is None or given.shape != shape:
        found = "none" if given is None else f"{tuple(given.shape)}"
        hint = "; a mean for each token cannot go into a bias: take .mean(1)" if given is not None else ""
        raise InputError(f"expected means (heads, head_dim) = {shape} for layer {layer}, found {found}{hint}")
    if projection.bias is None:
        raise UnsupportedError(
            f"expected an output projection with a bias at layer {layer}, found none; leave the means out"
        )
    chosen = torch.zeros(shape, dtype=torch.bool)
    chosen[list(heads)] = True
    only = torch.where(chosen, given.cpu(), 0.0).flatten().to(projection.weight)
    bias = projection.bias
    projection.bias = nn.Parameter((bias + projection.weight @ only).detach(), requires_grad=bias.requires_grad)
