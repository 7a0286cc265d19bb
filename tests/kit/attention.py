"""Attention methods as full matrices, written out from the papers."""

from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

import vitlens
from vitlens import Model
from vitlens.lens.libra import libra_gradients


def close(actual: Tensor, expected: Tensor, *, rtol: float = 1e-4) -> None:
    """Check that tensors are not empty and equal to rtol, near zero to that of the largest."""
    largest = expected.abs().max().item()
    assert largest > 0
    torch.testing.assert_close(actual, expected, atol=rtol * largest, rtol=rtol)


def explicit_gradients(
    model: Model, batch: Tensor, targets: Tensor | None = None, *, libra: bool = False
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the weights of every layer and ∂logit/∂weights, from products that autograd sees.

    libra: under LibraGrad's rules.
    """
    layers: list[Tensor] = []
    with libra_gradients(model) if libra else nullcontext():
        logits = vitlens.observe(
            model, batch, lambda call: layers.append(call.weights()), explicit=True
        )
        chosen = logits.argmax(-1) if targets is None else targets
        target_logits = [logits[image, int(chosen[image])] for image in range(len(logits))]
        gradients = torch.autograd.grad(torch.stack(target_logits).sum(), layers)
    return [weights.detach() for weights in layers], list(gradients)


def raising(weights: Tensor, gradient: Tensor) -> Tensor:
    """Return the mean over heads of (∂logit/∂A ⊙ A)⁺: Chefer 2021, equation 5.

    weights, gradient: (batch, heads, query, key). The result is (batch, query, key).
    """
    heads = []
    for head in range(weights.shape[1]):
        product = weights[:, head] * gradient[:, head]
        heads.append(torch.where(product > 0, product, 0.0))
    return torch.stack(heads).sum(0) / len(heads)


def raised(
    model: Model, batch: Tensor, targets: Tensor | None = None, *, libra: bool = False
) -> list[Tensor]:
    """Return Ā of every layer (batch, query, key)."""
    weights, gradients = explicit_gradients(model, batch, targets, libra=libra)
    return list(map(raising, weights, gradients))


def among_all(fused: Tensor, tokens: int) -> Tensor:
    """Return a layer (batch, query, key) as a square matrix over (reader, tokens).

    The reader, row and column 0, is a pooling query or a CLS that joins late.
    """
    full = fused.new_zeros(len(fused), tokens + 1, tokens + 1)
    if fused.shape[1] == tokens:  # all tokens attend to all tokens
        full[:, 1:, 1:] = fused
    elif fused.shape[2] == tokens:  # a pooling query attends to the tokens
        full[:, 0, 1:] = fused[:, 0]
    elif fused.shape[2] < tokens:  # a pooling query attends to the patches
        full[:, 0, -fused.shape[2] :] = fused[:, 0]
    else:  # a CLS attends to itself and to the tokens
        full[:, 0] = fused[:, 0]
    return full


def by_equation_six(layers: Sequence[Tensor], tokens: int) -> Tensor:
    """Compute R - I over (reader, tokens), by R ← R + Ā R from R = I."""
    eye = torch.eye(tokens + 1, dtype=layers[0].dtype)
    product = eye.expand(len(layers[0]), -1, -1)
    for fused in layers:
        product = product + among_all(fused, tokens) @ product
    return product - eye


def by_rollout(layers: Sequence[Tensor], tokens: int, alpha: float = 0.5) -> Tensor:
    """Compute R = Â_L ... Â_1 over (reader, tokens): Abnar & Zuidema 2020.

    Â has the rows of (1 - alpha) A + alpha I divided by their sums; a token that attends to nothing
    keeps its value.
    """
    eye = torch.eye(tokens + 1, dtype=layers[0].dtype)
    product = eye.expand(len(layers[0]), -1, -1)
    for fused in layers:
        mixed = (1 - alpha) * among_all(fused, tokens) + alpha * eye
        if fused.shape[1:] == (1, tokens):
            mixed[:, 0, 0] = 0  # a pooling query is no token: nothing of it is passed on
        mixed = torch.where(mixed.sum(-1, keepdim=True) > 0, mixed, eye)
        product = (mixed / mixed.sum(-1, keepdim=True)) @ product
    return product


def as_read(matrix: Tensor, row: list[float] | None, model: Model) -> Tensor:
    """Return the row of a matrix over (reader, tokens) that the classifier reads, as a map.

    row: the weight of each token for the classifier; None: the reader's row is read.
    """
    if row is None:
        tokens = matrix[:, 0, 1:]
    else:
        tokens = torch.tensor(row, dtype=matrix.dtype) @ matrix[:, 1:, 1:]
    patches = tokens[:, len(model.layout.prefix) :]
    return patches.unflatten(1, model.layout.grid)
