"""What an attack changes by block and by layer."""

import numpy as np
import pytest

from tests.figures.reading import cut_off, overlapping, texts
from vitlens.errors import InputError
from vitlens.figures.attack.inside import LayerShift, attention_shifts, block_distances


def test_paths_and_shifts():
    rows = np.stack([np.linspace(1, 0.4, 6)] * 3)
    kinds = {"adversarial": rows, "noise": rows * 1.0, "another image": rows * 0.5}
    figure = block_distances(models={"vit": kinds, "cnn": {"adversarial": rows}}, title="paths")
    assert figure.axes[0].lines[0].get_xdata().tolist() == [0, 1, 2, 3, 4, 5]
    np.testing.assert_allclose(figure.axes[0].lines[0].get_ydata(), [1e-7, 0.12, 0.24, 0.36, 0.48, 0.6], atol=1e-7)
    assert figure.axes[0].get_yscale() == "log"
    assert {"adversarial", "noise", "another image"} <= set(texts(figure))
    assert not cut_off(figure)
    gapped = rows.copy()
    gapped[:, 2] = np.nan
    shift = LayerShift("entropy", "after − before (nats)", {"vit": rows, "swin": gapped})
    figure = attention_shifts(shifts=[shift, shift], title="shifts")
    assert not cut_off(figure)
    assert not overlapping(figure)
    with pytest.raises(InputError, match="at least one statistic"):
        attention_shifts(shifts=[], title="t")
    with pytest.raises(InputError, match="at least one model"):
        block_distances(models={}, title="t")
