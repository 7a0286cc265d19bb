"""What happens without scaling, positions and CLS, and the sequence-reversal check."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from vitlens.figures.inputs import as_array, as_image
from vitlens.figures.overlay import enlarged
from vitlens.figures.style import (
    BLUE,
    GREY,
    MAGNITUDE,
    SMALL,
    VERMILLION,
    WIDE,
    drawable,
    heading,
    sheet,
    shortened,
    styled,
)


@styled
def entropies(
    *,
    layers: Sequence[int],
    scaled: Sequence[float],
    unscaled: Sequence[float],
    marked: int,
    uniform: float,
    title: str,
) -> Figure:
    """The entropy of every head by layer, with and without scaling, nats; marked: the head that is walked through;
    uniform: the entropy of uniform attention."""
    figure = sheet(WIDE, 2.6)
    axes = figure.subplots()
    spread = [layer + offset for layer, offset in zip(layers, _offsets(layers), strict=True)]
    axes.vlines(spread, unscaled, scaled, color="#CCCCCC", linewidth=0.8)
    axes.plot(spread, scaled, "o", color=BLUE, markersize=4, label="as it is")
    axes.plot(spread, unscaled, "o", color=VERMILLION, markersize=4, label="not scaled")
    axes.plot([spread[marked]] * 2, [scaled[marked], unscaled[marked]], "o", markersize=9, markerfacecolor="none",
              markeredgecolor="black", linestyle="none", label="this head")  # fmt: skip
    axes.axhline(uniform, color=GREY, linewidth=0.8, linestyle="--", label="uniform")
    axes.set_ylim(0, 1.08 * uniform)
    axes.set_xticks(sorted(set(layers)))
    axes.set_xlabel("layer")
    axes.set_ylabel("entropy (nats)")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    heading(figure, title)
    return figure


@styled
def permuted(
    *, image: ArrayLike, order: Sequence[int], grid: tuple[int, int], captions: Sequence[str],
    differences: Sequence[tuple[str, float]], title: str,
) -> Figure:  # fmt: skip
    """An image and the same patches in another order, and how much the model's outputs differ from permuted ones.

    order: which patch stands at each place; captions: under each picture; differences: as shares of the largest value.
    """
    picture = as_image(image)
    figure = sheet(WIDE, 2.9)
    panels = figure.subplots(1, 3, width_ratios=[1, 1, 1.1])
    for axes, shown, caption in zip(panels, (picture, in_order(picture, order, grid)), captions, strict=False):
        axes.imshow(enlarged(shown))
        axes.set_xlabel(drawable(caption))
        axes.set_xticks([])
        axes.set_yticks([])
        axes.spines[:].set_visible(False)
    bars, floor = panels[2], 1e-9
    for index, (_, value) in enumerate(differences):
        bars.barh(index, max(value, floor), left=0, color=(BLUE, VERMILLION)[index % 2], height=0.55)
        bars.text(max(value, floor), index, f" {value:.1e}", va="center", fontsize=SMALL)
    bars.set_xscale("log")
    bars.set_xlim(floor, 1e3)
    bars.set_yticks(range(len(differences)), [name for name, _ in differences])
    bars.invert_yaxis()
    bars.set_xlabel("largest difference\n(share of the largest value)")
    heading(figure, title)
    return figure


def in_order(picture: np.ndarray, order: Sequence[int], grid: tuple[int, int]) -> np.ndarray:
    """An image (3, height, width) with its patches in another order; pixels that the patches do not cover are cut."""
    height, width = picture.shape[1] // grid[0], picture.shape[2] // grid[1]
    covered = picture[:, : grid[0] * height, : grid[1] * width]
    patches = covered.reshape(3, grid[0], height, grid[1], width).transpose(1, 3, 0, 2, 4).reshape(-1, 3, height, width)
    moved = patches[np.asarray(order)].reshape(*grid, 3, height, width)
    return np.asarray(moved.transpose(2, 0, 3, 1, 4).reshape(covered.shape))


@styled
def answers(*, names: Sequence[str], own: Sequence[float], predictions: Sequence[str], title: str) -> Figure:
    """The probability of the model's own prediction under each change, with what is predicted then."""
    figure = sheet(WIDE, 0.6 + 0.36 * len(names))
    axes = figure.subplots()
    colours = [BLUE if name == predictions[0] else VERMILLION for name in predictions]
    axes.barh(range(len(names)), [100 * share for share in own], color=colours, height=0.6)
    for index, (share, name) in enumerate(zip(own, predictions, strict=True)):
        axes.text(
            100 * share, index, f" {100 * share:.1f} %, predicts {shortened(name, 24)}", va="center", fontsize=SMALL
        )
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlim(0, 160)
    axes.set_xticks([0, 50, 100])
    axes.set_xlabel(f"probability of {shortened(predictions[0], 40)} (%)", loc="left")
    heading(figure, title)
    return figure


@dataclass(frozen=True)
class Trained:
    """One layer of the reversal check: its losses by step, and its weights (query, key) after training."""

    name: str
    losses: ArrayLike
    weights: ArrayLike


@styled
def reversal(*, layers: Sequence[Trained], floor: float, title: str) -> Figure:
    """The loss of each layer over the steps of its training, on a logarithmic axis, and its weights; floor: the least
    loss without positions."""
    figure = sheet(WIDE, 2.7)
    panels = figure.subplots(1, 1 + len(layers), width_ratios=[1.5, *[1] * len(layers)])
    curves = panels[0]
    for layer, colour in zip(layers, (BLUE, VERMILLION), strict=False):
        losses = as_array(layer.losses, name="losses", axes=("steps",))
        curves.plot(np.arange(1, len(losses) + 1), losses, color=colour, linewidth=1.2, label=layer.name)
    curves.axhline(floor, color=GREY, linewidth=0.8, linestyle="--", label=f"least without: {floor:.2f}")
    curves.axhline(0.01, color=GREY, linewidth=0.8, linestyle=":", label="0.01")
    curves.set_yscale("log")
    curves.set_xlabel("step")
    curves.set_ylabel("mean squared error")
    curves.set_ylim(top=200)  # room for the legend
    curves.legend(loc="upper right")
    for axes, layer in zip(panels[1:], layers, strict=True):
        weights = as_array(layer.weights, name="weights", axes=("query", "key"))
        image = axes.imshow(100 * weights, cmap=MAGNITUDE, vmin=0, vmax=100, interpolation="nearest")
        axes.set_title(layer.name)
        axes.set_xlabel("key")
    panels[1].set_ylabel("query")
    bar = figure.colorbar(image, ax=list(panels[1:]), shrink=0.7, pad=0.02)
    bar.set_label("weight (%)")
    bar.outline.set_visible(False)
    heading(figure, title)
    return figure


def _offsets(layers: Sequence[int]) -> list[float]:
    """Heads of a layer side by side."""
    counts: dict[int, int] = {}
    places = [counts.setdefault(layer, 0) for layer in layers]
    for index, layer in enumerate(layers):
        places[index] = counts[layer]
        counts[layer] += 1
    return [0.7 * (place / max(counts[layer] - 1, 1) - 0.5) for place, layer in zip(places, layers, strict=True)]
