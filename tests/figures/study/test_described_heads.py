import numpy as np
import pytest

from tests.figures.reading import cut_off, texts
from vitlens.errors import InputError
from vitlens.figures.study.described_heads import DescribedHead, described_heads, layers_on_a_page
from vitlens.figures.style import TALL

NUMBERS = (("mean +0.12", True), ("res. +0.31", False), ("object 34 %", False))


def heads(layers, across, label="similar-content"):
    maps = np.random.default_rng(0).random((layers, across, 7, 7))
    return {
        (layer, head): DescribedHead(maps[layer, head], label, NUMBERS)
        for layer in range(layers)
        for head in range(across)
    }


@pytest.mark.parametrize("across", [1, pytest.param(4, marks=pytest.mark.slow), 12])
def test_maps_and_numbers_of_every_head_on_a_page(across):
    layers = layers_on_a_page(across)
    figure = described_heads(heads=heads(layers, across), image=np.full((3, 8, 8), 0.5), title="Heads")
    drawn = [axes for axes in figure.axes if axes.images]
    assert len(drawn) == layers * across + 1
    assert sum(text == "mean +0.12" for text in texts(figure)) == layers * across
    assert figure.get_figheight() <= TALL
    assert not cut_off(figure)


def test_layers_keep_their_numbers_and_missing_heads_stay_empty():
    some = {(2, 0): DescribedHead(None, "dead", ()), (5, 2): DescribedHead(np.eye(3), "object", NUMBERS)}
    figure = described_heads(heads=some, title="Two heads")
    assert {"L2", "L5", "H0", "H1", "H2", "dead"} <= set(texts(figure))
    assert len([axes for axes in figure.axes if axes.images]) == 1
    with pytest.raises(InputError, match="at least one head"):
        described_heads(heads={}, title="none")
