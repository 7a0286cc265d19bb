"""Accuracy of each class under attack."""

import numpy as np
import pytest

from tests.figures.reading import cut_off
from vitlens.figures.attack.classes import ByClass, class_robustness


@pytest.mark.parametrize("count", [3, 40])
def test_classes(count):
    classes = [f"class number {i}" for i in range(count)]
    clean, robust = np.full((3, count), 0.9), np.stack([np.linspace(0.8, 0.1, count)] * 3)
    figure = class_robustness(models=[ByClass("vit", clean, robust), ByClass("cnn", clean, robust)],
                              classes=classes, title="by class")  # fmt: skip
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert labels[0] == f"class number {count - 1}"  # what loses most
    assert len(labels) == min(count, 30)
    assert not cut_off(figure)
