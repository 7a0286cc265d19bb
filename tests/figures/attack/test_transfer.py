"""The matrix of which model's images fool which."""

import numpy as np
import pytest

from tests.figures.reading import cut_off, overlapping, texts
from vitlens.errors import InputError
from vitlens.figures.attack.transfer import transfer_matrix


def test_transfer_writes_every_rate():
    figure = transfer_matrix(
        rates=[[1, 0.25], [np.nan, 1]], clean=[0.9, 0.5], counts=[[9, 8], [0, 7]], names=["vit", "cnn"], title="who"
    )
    assert {"25 %\nof 8", "100 %\nof 9", "100 %\nof 7"} <= set(texts(figure))
    assert "nan" not in " ".join(texts(figure))
    assert any("clean 90 %" in text for text in texts(figure))
    assert not cut_off(figure)
    assert not overlapping(figure)
    with pytest.raises(InputError, match=r"rates of shape \(1, 1\)"):
        transfer_matrix(rates=[[1, 0.25], [0.5, 1]], clean=[0.9], counts=[[1, 1], [1, 1]], names=["vit"], title="who")
    with pytest.raises(InputError, match=r"counts of shape \(1, 1\)"):
        transfer_matrix(rates=[[1]], clean=[0.9], counts=[[1, 2]], names=["vit"], title="who")
