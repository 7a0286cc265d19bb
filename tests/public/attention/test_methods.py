"""Every attention method of the registry: settings, classes, refusals; and attention flow."""

import math
from itertools import product

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.optimize import linprog

import vitlens
from tests.kit.commands import ran
from tests.kit.families import MADE
from tests.kit.select import select, values_of
from tests.kit.tiny import images, ours, shared_model
from vitlens.analysis.attention.registry import ATTENTION_METHODS
from vitlens.errors import InputError, UnknownNameError
from vitlens.models.sources.registry import SOURCES

# which only the command line has
METHODS = [method for method in ATTENTION_METHODS if method != "flow"]


@pytest.mark.parametrize("name", ["rollout", "relevance"])
def test_a_method_has_the_defaults_of_its_function(name):
    batch = images((32, 48))
    torch.testing.assert_close(
        vitlens.explain(ours(), batch, method=name), getattr(vitlens, name)(ours(), batch)
    )


@pytest.mark.parametrize("method", METHODS)
def test_only_a_method_with_gradients_differs_by_class(method):
    one = vitlens.explain(ours(), images((32, 48)), method=method, targets=0)
    other = vitlens.explain(ours(), images((32, 48)), method=method, targets=3)
    assert torch.equal(one, other) is not ATTENTION_METHODS[method].gradients
    assert not one.requires_grad


@pytest.mark.parametrize("name", ["cait", "swin"])
def test_mixed_precision_changes_a_map_by_little(name):
    model = shared_model(name)
    batch = images(model.input_size)
    for method in METHODS:
        plain = vitlens.explain(model, batch, method=method, targets=1)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            maps = vitlens.explain(model, batch, method=method, targets=1)
        assert (maps - plain).abs().max() < 0.1 * plain.max(), method
        if (method, name) == ("rollout", "swin"):  # no prefix that keeps some of the mass
            torch.testing.assert_close(maps.sum((1, 2)), torch.ones(2), atol=1e-3, rtol=0)


WRONG = [  # before any work; others: tests/public/cli/test_refusals.py
    ({"method": "attention", "layer": -1}, InputError, "layer= from 0 to 1, found -1"),
    ({"method": "relevance", "start_layer": -1}, InputError, "start_layer= .* found -1"),
    ({"method": "gradient-rollout", "start_layer": 2}, InputError, "start_layer= .* found 2"),
    ({"method": "rollout", "readout": "clss"}, UnknownNameError, "did you mean 'cls'"),
    ({"method": "rollout", "discard": -0.1}, InputError, "discard="),
    ({"method": "rollout", "discard": math.nan}, InputError, "discard="),
    ({"method": "rollout", "alpha": -0.1}, InputError, "alpha="),
    ({"method": "rollout", "alpha": 1.1}, InputError, "alpha="),
    ({"method": "rollout", "alpha": math.nan}, InputError, "alpha="),
]


@pytest.mark.parametrize(("options", "error", "words"), WRONG)
def test_settings_out_of_their_range_are_refused(options, error, words, monkeypatch):
    # the tests' own check of types would be first
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)
    with pytest.raises(error, match=words):
        vitlens.explain(ours(), images((32, 48)), **options)


def test_several_methods_from_one_pass_are_each_alone_with_their_settings(golden, places):
    """`vitlens rollout` measures all of them at once."""
    record = golden("every method").record  # --target true --alpha 0.4 --layer 0
    model = vitlens.load(str(places["vit"]))
    digits = vitlens.load_data("digits", limit=len(record.maps.maps))
    settings = {
        "rollout": {"alpha": 0.4},
        "gradient-rollout": {"alpha": 0.4},
        "attention": {"layer": 0},
    }
    for at, row in enumerate(record.methods):
        if row.method != "flow":
            options = settings.get(row.method, {}) | (
                {} if row.fusion is None else {"fusion": row.fusion}
            )
            expected = vitlens.explain(model, digits, targets="label", method=row.method, **options)
            stored = torch.tensor(record.maps.maps[:, at])
            torch.testing.assert_close(stored, expected, atol=1e-6, rtol=1e-4, msg=row.method)
    assert values_of(select(record.methods, method="rollout"), "fusion") == [
        "mean",
        "max",
        "min",
    ]


PRECISION = 1e-5  # capacities are whole numbers of 6e-8, and a cut has at most some dozens of them


def by_linear_program(
    start: NDArray[np.float64], layers: list[NDArray[np.float64]], target: int
) -> float:
    """Return the largest flow that can arrive at a token of the input.

    Each edge has one variable, and what enters a node leaves it.
    """
    tokens = len(start)
    depth = len(layers)
    edges = [(("source", 0), (depth, token), start[token]) for token in range(tokens)]
    for layer, weights in enumerate(layers):
        for query, key in product(range(tokens), repeat=2):
            edges.append(((layer + 1, query), (layer, key), weights[query, key]))
    inner = list(product(range(1, depth + 1), range(tokens)))
    # what goes there would be lost: not allowed
    inner += [(0, token) for token in range(tokens) if token != target]
    conservation = []
    for node in inner:
        conservation.append([(tail == node) * 1.0 - (head == node) for head, tail, _ in edges])
    gain = np.array([tail == (0, target) for _, tail, _ in edges], dtype=float)
    solved = linprog(
        -gain,
        A_eq=conservation,
        b_eq=np.zeros(len(inner)),
        bounds=[(0, capacity) for *_, capacity in edges],
    )
    assert solved.success
    return -float(solved.fun)


READ = {  # the row of the last layer's weights that is read
    "mean": lambda _last, prefix: np.r_[np.zeros(prefix), np.full(16, 1 / 16)],
    "map-pooling": lambda last, _prefix: last[0],
    "cls": lambda last, _prefix: np.eye(len(last))[0],
}


@pytest.mark.parametrize("name", READ)
def test_the_flow_of_a_model_is_that_of_a_linear_program(
    name, golden, places, tmp_path, monkeypatch
):
    """The capacities are the weights with the residual connection, 0.6 A + 0.4 I; also with other
    methods.
    """
    monkeypatch.setitem(SOURCES, "made", MADE)
    model_name = str(places["vit"]) if name == "cls" else f"made:{name}"
    line = f"rollout {model_name} --data digits --limit 2 --method flow --alpha 0.4"
    record = golden("every method").record if name == "cls" else ran(tmp_path / "out", line)
    maps = record.maps.maps[:, values_of(record.methods, "method").index("flow")]
    model = vitlens.load(model_name)
    digits = vitlens.load_data("digits", limit=len(maps))
    layers = vitlens.attention(model, digits)
    tokens = model.layout.tokens
    prefix = len(model.layout.prefix)
    for image, heat_map in enumerate(maps):
        means = [layer[image].double().mean(0).numpy() for layer in layers]
        pipes = [0.6 * matrix + 0.4 * np.eye(tokens) for matrix in means if len(matrix) == tokens]
        targets = range(prefix + image, tokens, 5)
        expected = [
            by_linear_program(READ[name](means[-1], prefix), pipes, target) for target in targets
        ]
        np.testing.assert_allclose(
            heat_map.flatten()[[target - prefix for target in targets]], expected, atol=PRECISION
        )
    assert maps.reshape(len(maps), -1).std(1).min() > 1e-4
