import numpy as np
import pytest

from tests.figures.reading import cut_off, overlapping, texts
from vitlens.errors import InputError
from vitlens.figures.attack import Distances, Panel, distance_histograms, robust_curves
from vitlens.figures.attack_classes import ByClass, class_robustness
from vitlens.figures.attack_examples import Before, amplification, attack_examples
from vitlens.figures.attack_inside import LayerShift, attention_shifts, parting_paths
from vitlens.figures.transfer import transfer_matrix

EPSILONS = (0.0, 1.0, 2.0, 4.0, 8.0)


def ends(start: float = 0.9, count: int = 5) -> np.ndarray:
    value = np.linspace(start, 0.0, count)
    return np.stack([value, (value - 0.05).clip(0), value + 0.05])


@pytest.mark.parametrize("count", [1, 2, 5])
def test_a_panel_an_attack_and_a_curve_a_model(count):
    panels = [
        Panel(f"attack {i}", "epsilon (1/255)", EPSILONS, {"vit": ends(), "cnn": ends(0.7)}) for i in range(count)
    ]
    figure = robust_curves(panels=panels, title="Accuracy under attack", chance=0.1)
    shown = [axes for axes in figure.axes if axes.get_visible()]
    assert len(shown) == count
    for axes in shown:
        assert axes.lines[0].get_xdata().tolist() == list(EPSILONS)
        assert axes.lines[0].get_ydata()[0] == pytest.approx(90)
        assert len(axes.collections) == 2
        assert axes.lines[0].get_color() != axes.lines[1].get_color()
    assert not cut_off(figure)
    assert not overlapping(figure)
    assert {"vit", "cnn", "attack 0", "accuracy (%)"} <= set(texts(figure))


def test_curves_must_fit_their_epsilons():
    with pytest.raises(InputError, match="accuracies of vit"):
        robust_curves(panels=[Panel("a", "e", (0.0, 1.0), {"vit": ends()})], title="t")
    with pytest.raises(InputError, match="at least one attack"):
        robust_curves(panels=[], title="t")


def test_histograms_count_all_images_that_were_right():
    found = [Distances("vit", [0.1, 0.2, 0.2, 0.4], 4, None), Distances("cnn", [0.1], 0, 0.1)]
    figure = distance_histograms(panels={"C&W": found}, axis={"C&W": "L2"}, title="distances")
    heights = figure.axes[0].patches[0].get_data().values
    assert heights.sum() == pytest.approx(50)  # half of those that were right survived
    assert not cut_off(figure)
    with pytest.raises(InputError, match="at least one image"):
        distance_histograms(panels={"C&W": [Distances("vit", [], 4, None)]}, axis={}, title="t")


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


def example(random: np.random.Generator, count: int, size: int = 16, *, maps: bool = True):
    clean = random.uniform(0.2, 0.8, (count, 3, size, size))
    adversarial = clean + random.choice([-1, 1], clean.shape) * 8 / 255
    shares = random.uniform(0, 1, (2, count, 4, 4))
    shares /= shares.sum((2, 3), keepdims=True)
    return attack_examples(
        clean=clean, adversarial=adversarial, maps_before=shares[0] if maps else None,
        maps_after=shares[1] if maps else None, before=[Before("golden retriever", 0.98)] * count,
        after=[Before("seven", 0.5)] * count, notes=["L∞ 8/255\nL2 2.1"] * count, title="vit before and after PGD L∞",
    )  # fmt: skip


@pytest.mark.parametrize(("count", "maps"), [(1, True), (2, True), (5, True), (3, False)])
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
    said = [Before("a", 0.5)]
    with pytest.raises(InputError, match="maps before and after"):
        attack_examples(clean=clean, adversarial=clean, maps_before=np.ones((1, 2, 2)), before=said, after=said,
                        notes=[""], title="t")  # fmt: skip
    with pytest.raises(InputError, match="adversarial images of shape"):
        attack_examples(clean=clean, adversarial=clean[:, :, :4], before=said, after=said, notes=[""], title="t")


def test_paths_and_shifts():
    rows = np.stack([np.linspace(1, 0.4, 6)] * 3)
    kinds = {"adversarial": rows, "noise": rows * 1.0, "another image": rows * 0.5}
    figure = parting_paths(models={"vit": kinds, "cnn": {"adversarial": rows}}, title="paths")
    assert figure.axes[0].lines[0].get_xdata().tolist() == [1, 2, 3, 4, 5, 6]
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
        parting_paths(models={}, title="t")
