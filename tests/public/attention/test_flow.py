"""Attention flow: the maximum flow of a model's network beside a linear program, and what it refuses."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.optimize import linprog

import vitlens
from vitlens.cli.main import run

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


def test_the_flow_of_a_model_is_that_of_a_linear_program(golden, places):
    """The capacities are the weights with the residual connection, 0.6 A + 0.4 I."""
    record = golden("every method").record
    maps = torch.tensor(record.maps.maps[:, [row.method for row in record.methods].index("flow")])
    model, digits = vitlens.load(str(places["vit"])), vitlens.load_data("digits", limit=len(record.maps.maps))
    layers, tokens = vitlens.attention(model, digits), model.layout.tokens
    assert maps.shape[1:] == (4, 4)
    for image in range(len(maps)):
        pipes = [0.6 * layer[image].double().mean(0).numpy() + 0.4 * np.eye(tokens) for layer in layers]
        targets = range(1 + image, tokens, 5)
        expected = [by_linear_program(np.eye(tokens)[0], pipes, target) for target in targets]
        found = maps[image].flatten()[[target - 1 for target in targets]]
        np.testing.assert_allclose(found.numpy(), expected, atol=PRECISION)
    assert maps.flatten(1).std(1).min() > 1e-4


@pytest.mark.parametrize(
    ("model", "found"),
    [("swin-micro --random-weights", "windows"), ("vit-micro --random-weights --image-size 64x80", "found 321")],
)
def test_windows_and_too_many_tokens_are_refused(model, found, capsys):
    assert run(["rollout", *model.split(), "--data", "digits", "--limit", "2", "--method", "flow"]) == 2
    assert found in capsys.readouterr().err
