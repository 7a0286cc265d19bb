"""Pruning: a smaller model, with some heads removed from its weight matrices."""

from collections.abc import Collection, Mapping
from copy import deepcopy
from dataclasses import replace

import torch
from torch import Tensor, nn

from vitlens.errors import InputError, UnsupportedError
from vitlens.models.assembly import Architecture
from vitlens.models.attention_parts import heads_of
from vitlens.models.cutting import UNCUT, cut_heads, output_projection
from vitlens.models.model import Model
from vitlens.models.rebuilding import with_module

HeadMeans = Mapping[int, Tensor]  # layer -> (heads, head_dim)


def prune_heads(model: Model, heads: Mapping[int, Collection[int]], *, means: HeadMeans | None = None) -> Model:
    """A copy of the model without these heads: without their rows of the qkv and columns of the output projection.

    heads: by layer, both counted from 0. The logits are those of the model with the heads set to zero; with means
    (each head's mean output over tokens and images, (heads, head_dim) by layer), those with each head at its mean,
    which is added to the output projection's bias. A layer without any heads left outputs its bias and no longer counts
    as an attention layer: later layers' numbers decrease by one. The copy can be saved, loaded and pruned again; the
    original is not changed. Raises InputError for a head that does not exist and for a mean per token (which a bias
    cannot hold), UnsupportedError for attention that cannot be cut (ours, timm's standard and torchvision's can).
    """
    names = list(model.anatomy.attention_modules)
    chosen = {layer: sorted(set(removed)) for layer, removed in sorted(heads.items()) if removed}
    _check(model, names, chosen)
    module = deepcopy(model.module)
    for layer, removed in chosen.items():
        if means is not None:
            _fold(module.get_submodule(names[layer]), layer, removed, means)
    by_module = {names[layer]: removed for layer, removed in chosen.items()}
    cut_heads(module, by_module)
    lost, every = sum(map(len, chosen.values())), sum(_count(model, name) for name in names)
    notes = (*model.provenance.notes, f"removed {lost} of {every} heads")
    provenance = replace(model.provenance, notes=notes)
    pruned = with_module(model, module, _recorded(model, by_module), model.classes, provenance)
    return pruned.train(model.training)


def _recorded(model: Model, removed: Mapping[str, list[int]]) -> Architecture:
    """The architecture with these heads removed as well, in the numbering of the whole model."""
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
    for layer, chosen in heads.items():
        if not 0 <= layer < len(names):
            raise InputError(f"expected a layer from 0 to {len(names) - 1} of {model.alias}, found {layer}")
        output_projection(model.module.get_submodule(names[layer]))
        if model.anatomy.family == "windowed":
            raise UnsupportedError(f"expected attention that can be cut, found the windows of {model.alias}; {UNCUT}")
        count = _count(model, names[layer])
        wrong = [head for head in chosen if not 0 <= head < count]
        if wrong:
            raise InputError(
                f"expected a head from 0 to {count - 1} in layer {layer} of {model.alias}, found {wrong[0]}"
            )


def _count(model: Model, name: str) -> int:
    return heads_of(model.module.get_submodule(name)) or 0


def _fold(attention: nn.Module, layer: int, heads: Collection[int], means: HeadMeans) -> None:
    """Add the heads' mean outputs, through their columns of the output projection, to its bias."""
    _, projection = output_projection(attention)
    count = heads_of(attention) or 0
    shape = (count, projection.in_features // count)
    layer_means = means.get(layer)
    if layer_means is None or layer_means.shape != shape:
        received = "none" if layer_means is None else f"{tuple(layer_means.shape)}"
        hint = "; a bias cannot hold a mean for each token: take .mean(1)" if layer_means is not None else ""
        raise InputError(f"expected means (heads, head_dim) = {shape} for layer {layer}, found {received}{hint}")
    if projection.bias is None:
        raise UnsupportedError(
            f"expected an output projection with a bias at layer {layer}, found none; leave the means out"
        )
    chosen = torch.zeros(shape, dtype=torch.bool)
    chosen[list(heads)] = True
    only = torch.where(chosen, layer_means.cpu(), 0.0).flatten().to(projection.weight)
    bias = projection.bias
    projection.bias = nn.Parameter((bias + projection.weight @ only).detach(), requires_grad=bias.requires_grad)
