"""Rows about features; free of torch."""

from dataclasses import dataclass

from vitlens.record import OfModel, col
from vitlens.uncertainty import Estimate


@dataclass(frozen=True)
class TemplateRow(OfModel):
    """The zero-shot accuracy of a model with one template of prompts.

    The first row of a model is the ensemble of all templates.

    template: the template.
    accuracy: the accuracy with this template.
    gain: the accuracy minus that of the ensemble.
    p: the p-value of the gain by McNemar's exact test.
    p_holm: the p-value after correction for the number of templates.
    """

    template: str = col("template")
    accuracy: Estimate = col("accuracy", better="higher")
    gain: Estimate | None = col("minus the ensemble", default=None)
    p: float | None = col("p", default=None)
    p_holm: float | None = col("p (Holm)", default=None)
