"""Removal curves with accuracies that are planted."""

import torch

from vitlens.analysis.ablation.bench import Outcomes, Unit


def curve(*accuracies: float, n: int = 100) -> Outcomes:
    """A curve over as many heads as there are numbers but one; images fail from the last one on."""
    correct = torch.arange(n) < (torch.tensor(accuracies)[:, None] * n).round()
    units = tuple(Unit("head", 0, head) for head in range(len(accuracies) - 1))
    sets = tuple(units[:count] for count in range(len(accuracies)))
    none = torch.zeros(len(sets), n).double()
    return Outcomes(sets, "mean", torch.zeros(n).long(), none[0], correct[0], none, correct, 1.0)
