"""Zero-shot accuracy of a language-image model by template of its prompts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from matplotlib.figure import Figure

from vitlens.errors import InputError
from vitlens.figures.inputs import as_array
from vitlens.figures.style import GREY, SERIES, SMALL, WIDE, heading, sheet, shortened, styled

_MOST: Final = 30  # most legible templates


@dataclass(frozen=True)
class TemplateAccuracy:
    """A template's accuracy: value, low, high as fractions; differs: whether significantly from the ensemble."""

    template: str
    value: float
    low: float
    high: float
    differs: bool = False


@styled
def template_chart(
    *, ensemble: TemplateAccuracy, templates: Sequence[TemplateAccuracy], chance: float, title: str
) -> Figure:
    """Accuracy (%) of every template with its 95 % interval, in descending order, and of the ensemble (line and band).

    A filled dot differs significantly from the ensemble. Of more than 30 templates the 15 best and the
    15 worst are drawn, and the title says so. chance: fraction, dashed. Raises InputError for no template.
    """
    if not templates:
        raise InputError("expected at least one template, found none")
    order = sorted(templates, key=lambda template: -template.value)
    shown = order if len(order) <= _MOST else [*order[: _MOST // 2], *order[-(_MOST // 2) :]]
    numbers = 100 * as_array(
        [[template.value, template.low, template.high] for template in shown],
        name="accuracies",
        axes=("templates", "3"),
    )
    whole = 100 * as_array([ensemble.value, ensemble.low, ensemble.high], name="ensemble", axes=("3",))
    figure = sheet(WIDE * 0.85, 0.75 + 0.19 * len(shown))
    axes = figure.add_subplot()
    axes.axvspan(whole[1], whole[2], color=SERIES[1], alpha=0.15, linewidth=0)
    axes.axvline(whole[0], color=SERIES[1], linewidth=1.2, label=f"{ensemble.template}: {whole[0]:.1f} %")
    axes.axvline(100 * chance, color=GREY, linestyle="--", linewidth=0.8, label="chance")
    for place, (template, (value, low, high)) in enumerate(zip(shown, numbers, strict=True)):
        axes.plot([low, high], [place, place], color=SERIES[0], linewidth=1.1)
        fill = SERIES[0] if template.differs else "white"
        axes.plot([value], [place], "o", markersize=4.2, markeredgecolor=SERIES[0], markerfacecolor=fill)
    if len(shown) < len(order):
        axes.axhline(_MOST // 2 - 0.5, color=GREY, linewidth=0.6)
    axes.set_yticks(range(len(shown)), [shortened(template.template, 44) for template in shown], fontsize=SMALL)
    axes.set_ylim(len(shown) - 0.4, -0.6)
    low = min(float(np.min(numbers)), 100 * chance)
    axes.set_xlim(max(0.0, low - 4), min(100.0, float(max(np.max(numbers), whole[2])) + 4))
    axes.set_xlabel("accuracy (%), 95 % intervals; filled: differs from the ensemble")
    axes.grid(axis="x")
    figure.legend(loc="outside lower center", ncols=2)
    note = "" if len(shown) == len(order) else f" (best and worst {_MOST // 2} of {len(order)})"
    heading(figure, f"{title}{note}")
    return figure
