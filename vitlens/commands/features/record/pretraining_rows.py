"""The row of `vitlens features` on what each model was pretrained for."""

from dataclasses import dataclass

from vitlens.names import KnownObjective
from vitlens.records import UntrustedName


@dataclass(frozen=True)
class PretrainingRow:
    """The pretraining of one model. recipe: its name, data: what it saw, labels: of a fine-tuning afterwards, "" where
    not known or none; source: what tells the objective; parameters: their number; dim: of the last layer."""

    model: str
    objective: KnownObjective
    recipe: UntrustedName
    data: UntrustedName
    labels: UntrustedName
    source: str
    parameters: int
    dim: int

    @property
    def words(self) -> str:
        """The objective with its recipe: "self-supervised (DINOv2)"."""
        return f"{self.objective} ({self.recipe})" if self.recipe else self.objective
