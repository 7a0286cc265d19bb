"""Two models whose difference in robustness has a known cause.

Images are four grey quadrants, of which one is bright: the class. A fifth class has a constant
logit, and is what attacks turn predictions into.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import vitlens
from tests.kit.tiny import bare
from vitlens.analysis.failures.operations import frequency_bands
from vitlens.attacks.losses import margin
from vitlens.commands.attack.reasons import Target, explained_gap
from vitlens.commands.attack.record import CandidateRow, RobustnessGapRow

SIDE = 16
PATCH = (4, 4)
EPSILON = 0.025


@dataclass(frozen=True)
class Weakness:
    """How a model differs from one without a weakness.

    constant: logit of the fifth class.
    fine: by how much a pattern of high frequencies lowers all other logits.
    on_grid: the same for a pattern that lies in the patches of the grid.
    """

    constant: float = 2.0
    fine: float = 0.0
    on_grid: float = 0.0


class Quadrants(nn.Module):
    """Reads the brightest quadrant, and the patterns of its weakness."""

    def __init__(self, weakness: Weakness) -> None:
        super().__init__()
        self.weakness = weakness
        draws = torch.Generator().manual_seed(3)
        noise = torch.randn(1, 1, SIDE, SIDE, generator=draws)
        _, self.fine = frequency_bands(noise, cutoff=1.1)
        block = torch.randn(1, 1, *PATCH, generator=draws)
        self.block = block - block.mean()

    def forward(self, images: Tensor) -> Tensor:
        grey = images.mean(1, keepdim=True)
        half = SIDE // 2
        bright = nn.functional.avg_pool2d(grey, half).flatten(1)
        pattern = (grey * self.fine).mean((1, 2, 3))
        in_patches = nn.functional.conv2d(grey, self.block, stride=PATCH).mean((1, 2, 3))
        lost = self.weakness.fine * pattern + self.weakness.on_grid * in_patches
        logits = 40 * bright - lost[:, None]
        constant = torch.full_like(logits[:, :1], self.weakness.constant)
        return torch.cat([logits, constant], 1)


def quadrants(count: int = 60, *, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return images with labels."""
    draws = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 4
    bright = 0.05 * torch.rand(count, 4, generator=draws)
    bright[torch.arange(count), labels] = 0.125 + 0.05 * torch.rand(count, generator=draws)
    half = SIDE // 2
    by_quadrant = bright.unflatten(1, (2, 2))  # (images, rows, columns)
    planes = by_quadrant.repeat_interleave(half, 1).repeat_interleave(half, 2)
    return planes[:, None].expand(-1, 3, -1, -1).contiguous(), labels


def _target(alias: str, weakness: Weakness, images: Tensor, labels: Tensor) -> Target:
    model = bare(Quadrants(weakness), (SIDE, SIDE), alias=alias, classes=tuple("abcde"))

    def attacked(budget: float) -> vitlens.attacks.attack.AttackResult:  # type: ignore[name-defined]
        return vitlens.attack(model, images, labels, method="pgd", epsilon=budget)

    def robust_at(budgets: Tensor) -> Tensor:
        robust = torch.ones(len(images), dtype=torch.bool)
        for budget in budgets.unique().tolist():
            chosen = budgets == budget
            robust[chosen] = ~attacked(budget).success[chosen]
        return robust

    result = attacked(EPSILON)
    return Target(model, labels, images, result.images, EPSILON, robust_at)


def explained(
    strong: Weakness, weak: Weakness
) -> tuple[RobustnessGapRow, Mapping[str, CandidateRow]]:
    """Return the difference of two models, and its candidates by name."""
    images, labels = quadrants()
    targets = [
        _target("strong", strong, images, labels),
        _target("weak", weak, images, labels),
    ]
    for target in targets:
        assert bool((margin(target.logits(images), labels) > 0).all())
    gap, rows = explained_gap(targets, attack="PGD", patch=PATCH)
    return gap, {row.candidate: row for row in rows}
