"""Single images before and after an attack."""

import numpy as np
import pytest

from tests.figures.reading import cut_off, overlapping, texts
from vitlens.errors import InputError
from vitlens.figures.attack.examples import PredictedClass, amplification, attack_examples


def example(random: np.random.Generator, count: int, size: int = 16, *, maps: bool = True):
    clean = random.uniform(0.2, 0.8, (count, 3, size, size))
    adversarial = clean + random.choice([-1, 1], clean.shape) * 8 / 255
    shares = random.uniform(0, 1, (2, count, 4, 4))
    shares /= shares.sum((2, 3), keepdims=True)
    return attack_examples(
        clean=clean, adversarial=adversarial, maps_before=shares[0] if maps else None, maps_after=shares[1] if maps else
        None, before=[PredictedClass("golden retriever", 0.98)] * count, after=[PredictedClass("seven", 0.5)] * count,
        notes=["L∞ 8/255\nL2 2.1"] * count, title="vit before and after PGD L∞",
    )  # fmt: skip


@pytest.mark.parametrize(("count", "maps"), [(1, True), (5, True), (3, False)])
def test_examples_say_how_much_is_amplified(random, count, maps):
    figure = example(random, count, maps=maps)
    assert "perturbation × 10" in texts(figure)  # 8/255 x 10 stays within half the range
    assert not cut_off(figure)
    assert not overlapping(figure)
    assert len(figure.axes) == count * (6 if maps else 3) + (2 if maps else 0)


def test_the_perturbation_is_drawn_around_grey(random):
    figure = example(random, 1)
    shown = np.unique(np.round(np.asarray(figure.axes[1].images[0].get_array()), 3))
    assert shown.tolist() == pytest.approx([0.5 - 80 / 255, 0.5 + 80 / 255], abs=2e-3)
    assert amplification(np.array([0.001])) == 256
    assert amplification(np.array([0.9])) == 1
    assert amplification(np.zeros(3)) == 1


def test_examples_need_both_maps(random):
    clean = random.uniform(0, 1, (1, 3, 8, 8))
    said = [PredictedClass("a", 0.5)]
    with pytest.raises(InputError, match="maps before and after"):
        attack_examples(clean=clean, adversarial=clean, maps_before=np.ones((1, 2, 2)), before=said, after=said,
                        notes=[""], title="t")  # fmt: skip
    with pytest.raises(InputError, match="adversarial images of shape"):
        attack_examples(clean=clean, adversarial=clean[:, :, :4], before=said, after=said, notes=[""], title="t")
