"""Attention flow: maximum flow beside a linear program, its bounds, and what it refuses."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.optimize import linprog
from torch import Tensor

from tests.analysis.attention.ways import flow
from tests.lens.tiny import FAMILIES, images, ours, shared_model
from vitlens.analysis.attention.methods import maximum_flows, require_flow
from vitlens.errors import UnsupportedError
from vitlens.lens.capture import capture_attention
from vitlens.models.model import Model

PRECISION = 1e-5  # capacities are whole numbers of 6e-8, and a cut has at most some dozens of them


def by_linear_program(start: NDArray[np.float64], layers: list[NDArray[np.float64]], target: int) -> float:
    """The most that can arrive at a token of the input: one variable an edge, what enters a node leaves it."""
    tokens, depth = len(start), len(layers)
    edges = [(("source", 0), (depth, token), start[token]) for token in range(tokens)]
    edges += [
        ((layer + 1, query), (layer, key), weights[query, key])
        for layer, weights in enumerate(layers)
        for query in range(tokens)
        for key in range(tokens)
    ]
    inner = [(level, token) for level in range(1, depth + 1) for token in range(tokens)]
    inner += [(0, token) for token in range(tokens) if token != target]  # what goes there would be lost: not allowed
    kept = np.zeros((len(inner), len(edges)))
    gain = np.zeros(len(edges))
    for column, (head, tail, _) in enumerate(edges):
        for row, node in enumerate(inner):
            kept[row, column] = (tail == node) - (head == node)
        gain[column] = tail == (0, target)
    solved = linprog(-gain, A_eq=kept, b_eq=np.zeros(len(inner)), bounds=[(0, capacity) for *_, capacity in edges])
    assert solved.success
    return -float(solved.fun)


def random_network(seed: int, *, tokens: int = 4, depth: int = 3) -> tuple[NDArray[np.float64], list]:
    random = np.random.default_rng(seed)
    layers = [random.dirichlet(np.full(tokens, 0.4), size=tokens) for _ in range(depth)]
    return random.dirichlet(np.ones(tokens)), layers


@pytest.mark.parametrize("seed", range(4))
def test_equal_to_a_linear_program(seed):
    start, layers = random_network(seed)
    found = maximum_flows(start, layers, range(4))
    expected = [by_linear_program(start, layers, target) for target in range(4)]
    np.testing.assert_allclose(found, expected, atol=PRECISION)
    assert found.std() > 0.001
    assert (found[2:] == maximum_flows(start, layers, [2, 3])[2:]).all()
    assert (maximum_flows(start, layers, [2, 3])[:2] == 0).all()  # not asked for


def heads_mean(layer: Tensor) -> NDArray[np.float64]:
    return layer[0].double().mean(0).numpy()


READOUTS = {  # the row of the readout, of the last layer
    "cls": (ours, lambda _: np.eye(13)[0], 1, 0.5),
    "mean": (lambda: ours(pooling="mean"), lambda _: np.full(12, 1 / 12), 0, 0.1),
    "pooling query": (FAMILIES["siglip"], lambda last: heads_mean(last)[0], 0, 0.1),
}


@pytest.mark.parametrize("case", READOUTS)
def test_a_model_by_a_linear_program(case):
    make, row, prefix, alpha = READOUTS[case]
    model: Model = make()
    for parameter in model.module.parameters():
        parameter.mul_(2)  # weights that are not nearly even
    batch = images(model.input_size)[:1]
    layers = capture_attention(model, batch).layers
    tokens = model.layout.tokens
    pipes = [(1 - alpha) * heads_mean(layer) + alpha * np.eye(tokens) for layer in layers if layer.shape[2] > 1]
    start = row(layers[-1])
    targets = list(range(prefix, tokens))[::3]
    expected = [by_linear_program(start, pipes, target) for target in targets]
    found = flow(model, batch, alpha=alpha).flatten()[[target - prefix for target in targets]]
    np.testing.assert_allclose(found.numpy(), expected, atol=PRECISION)
    assert found.std() > 1e-4


def test_with_the_identity_alone_a_mean_stays_a_mean():
    torch.testing.assert_close(flow(ours(pooling="mean"), images((32, 48)), alpha=1.0), torch.full((2, 4, 3), 1 / 12))
    assert (flow(ours(), images((32, 48)), alpha=1.0) == 0).all()  # what stays on CLS is in no map


def test_256_tokens_are_not_too_many_and_windows_are():
    model = ours(size=(128, 256), pooling="mean", dim=4, depth=1, heads=1)
    require_flow(model)
    with pytest.raises(UnsupportedError, match="one sequence of tokens for attention flow, found windows in swin"):
        flow(shared_model("swin"), images())
