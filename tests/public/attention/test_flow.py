"""Attention flow: the maximum flow of a model's network beside a linear program, and what it refuses."""

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.optimize import linprog

import vitlens
from tests.kit.commands import ran
from tests.kit.families import MADE
from vitlens.cli.main import run
from vitlens.models.sources.registry import SOURCES

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


READ = {  # the row of the last layer's weights that is read
    "mean": lambda _last, prefix: np.r_[np.zeros(prefix), np.full(16, 1 / 16)],
    "map-pooling": lambda last, _prefix: last[0],
    "cls": lambda last, _prefix: np.eye(len(last))[0],
}


@pytest.mark.parametrize("name", READ)
def test_the_flow_of_a_model_is_that_of_a_linear_program(name, golden, places, tmp_path, monkeypatch):
    """The capacities are the weights with the residual connection, 0.6 A + 0.4 I; also beside other methods."""
    monkeypatch.setitem(SOURCES, "made", MADE)
    named = str(places["vit"]) if name == "cls" else f"made:{name}"
    line = f"rollout {named} --data digits --limit 2 --method flow --alpha 0.4"
    record = golden("every method").record if name == "cls" else ran(tmp_path / "out", line)
    maps = record.maps.maps[:, [row.method for row in record.methods].index("flow")]
    model, digits = vitlens.load(named), vitlens.load_data("digits", limit=len(maps))
    layers, tokens, prefix = vitlens.attention(model, digits), model.layout.tokens, len(model.layout.prefix)
    for image, found in enumerate(maps):
        means = [layer[image].double().mean(0).numpy() for layer in layers]
        pipes = [0.6 * each + 0.4 * np.eye(tokens) for each in means if len(each) == tokens]
        targets = range(prefix + image, tokens, 5)
        expected = [by_linear_program(READ[name](means[-1], prefix), pipes, target) for target in targets]
        np.testing.assert_allclose(found.flatten()[[each - prefix for each in targets]], expected, atol=PRECISION)
    assert maps.reshape(len(maps), -1).std(1).min() > 1e-4


@pytest.mark.parametrize(
    ("model", "found"),
    [("swin-micro --random-weights", "windows"), ("vit-micro --random-weights --image-size 64", "found 257")],
)
def test_windows_and_too_many_tokens_are_refused(model, found, capsys):
    assert run(["rollout", *model.split(), "--data", "digits", "--limit", "2", "--method", "flow"]) == 2
    assert found in capsys.readouterr().err
