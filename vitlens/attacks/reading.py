"""One look at the model: logits of a batch, and gradients with respect to its pixels alone.

Gradients may be taken in bf16; whether an image is fooled is always judged in fp32, on exactly its pixels.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from vitlens.attacks.jobs import Jobs, Machine, Seen
from vitlens.attacks.losses import fooled, margin, reached
from vitlens.devices import autocast, evaluating
from vitlens.errors import UnsupportedError
from vitlens.lens.onednn import quick_convolutions, quick_linear
from vitlens.models.model import Model
from vitlens.shapes import Images, Labels, Logits

_COARSE = 2.0**-6  # of the largest logit: what bf16 may be wrong by
_EIGHT = 8
_QUICK = 32  # images in a pass on a CPU: the next layer still finds them in its caches
_WORTH = 4  # jobs that need no gradient are run apart where they are at least this part of the batch


@contextmanager
def attacked(model: Model) -> Iterator[None]:
    """The model in evaluation mode with frozen parameters, so that a pass keeps nothing for their gradients.

    Modes and flags come back on exit.
    """
    flags = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    try:
        with evaluating(model), quick_convolutions(model):
            model.requires_grad_(False)
            yield
    finally:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(flags[name])


@dataclass(frozen=True)
class Reader:
    """Looks at the model for one machine.

    precision: of the passes with gradients; aimed: whether an image is done when it got its target (else when it is
    wrong).
    """

    model: Model
    machine: Machine
    precision: str = "fp32"
    aimed: bool = False

    def read(self, points: Images, jobs: Jobs, last: Bool[Tensor, " batch"]) -> Seen:
        """What the model says of the points; last (on the CPU): jobs for which no gradient is needed."""
        chunk = _QUICK if points.device.type == "cpu" else len(points)
        groups = [(mask.nonzero()[:, 0].split(chunk), traced) for mask, traced in self._groups(last)]
        parts = [(rows, traced) for chunks, traced in groups for rows in chunks]
        if len(parts) == 1:
            return self._looked(points, jobs, last.to(points.device), parts[0][1])
        seen = []
        for rows, traced in parts:
            place = rows.to(points.device)
            seen.append(self._looked(points[place], jobs.only(place), last[rows].to(points.device), traced))
        return _joined(seen, torch.cat([rows for rows, _ in parts]).argsort().to(points.device))

    def _groups(self, last: Bool[Tensor, " batch"]) -> list[tuple[Bool[Tensor, " batch"], bool]]:
        """Which jobs go together, and whether for gradients."""
        everyone, count = torch.ones_like(last), int(last.sum())
        if count == len(last) or not self.machine.objectives:
            return [(everyone, False)]
        return [(everyone, True)] if count * _WORTH < len(last) else [(last, False), (~last, True)]

    def _looked(self, points: Images, jobs: Jobs, last: Bool[Tensor, " batch"], traced: bool) -> Seen:
        return self._traced(points, jobs, last) if traced else self._plain(points, jobs)

    def wins(self, points: Images, jobs: Jobs) -> Bool[Tensor, " batch"]:
        """Whether these points are what the attack is after, in fp32."""
        return self._won(self.exact(points), jobs)

    def exact(self, points: Images) -> Logits:
        """Logits in fp32, without a graph."""
        with torch.no_grad(), quick_linear(points.device):
            logits: Tensor = self.model(_in_eights(points))
        return logits[: len(points)]

    def _plain(self, points: Images, jobs: Jobs) -> Seen:
        logits = self.exact(points)
        losses = self.machine.losses(logits, jobs)
        nothing = points.new_zeros(()).expand(losses.shape[1], *points.shape)
        return Seen(logits, losses, nothing, self._won(logits, jobs))

    def _traced(self, points: Images, jobs: Jobs, last: Bool[Tensor, " batch"]) -> Seen:
        """With gradients; where the pass was not in fp32, whatever might be won is judged again."""
        count = self.machine.objectives
        with torch.enable_grad(), autocast(points.device, self.precision), quick_linear(points.device):
            coarse = torch.is_autocast_enabled(points.device.type)
            leaf = points.detach().requires_grad_()
            given = self.model(_in_eights(leaf))[: len(leaf)]
        if not given.requires_grad:
            raise UnsupportedError(
                f"expected a gradient from {self.model.alias} with respect to the pixels, found none; "
                "try an attack that needs scores alone (square, noise)"
            )
        with torch.enable_grad():
            logits = given.to(points.dtype)
            losses = self.machine.losses(logits, jobs)
            found = [
                torch.autograd.grad(losses[:, index].sum(), leaf, retain_graph=index + 1 < count)[0]
                for index in range(count)
            ]
        gradients = found[0][None] if count == 1 else torch.stack(found)
        logits = logits.detach()
        seen = Seen(logits, losses.detach(), gradients, self._won(logits, jobs))
        return self._judged(seen, points, jobs, last) if coarse else seen

    def _judged(self, seen: Seen, points: Images, jobs: Jobs, last: Bool[Tensor, " batch"]) -> Seen:
        """With the fp32 logits of those that are near to being won, or have their last look."""
        slack = _COARSE * seen.logits.abs().amax(1)
        near = margin(seen.logits, self._wanted(jobs)) * (-1 if self.aimed else 1) < slack
        doubtful = (near | last).nonzero()[:, 0]
        if not len(doubtful):
            return seen
        logits = seen.logits.index_copy(0, doubtful, self.exact(points[doubtful]))
        won = torch.zeros_like(seen.won).index_copy(0, doubtful, self._won(logits, jobs)[doubtful])
        return replace(seen, logits=logits, won=won)

    def _won(self, logits: Logits, jobs: Jobs) -> Bool[Tensor, " batch"]:
        return (reached if self.aimed else fooled)(logits, self._wanted(jobs))

    def _wanted(self, jobs: Jobs) -> Labels:
        return jobs.aims if self.aimed else jobs.labels


def _joined(parts: list[Seen], order: Int[Tensor, " batch"]) -> Seen:
    """The parts one behind another, in this order."""
    return Seen(
        torch.cat([part.logits for part in parts])[order],
        torch.cat([part.losses for part in parts])[order],
        torch.cat([part.gradients for part in parts], 1)[:, order],
        torch.cat([part.won for part in parts])[order],
    )


def _in_eights(points: Images) -> Float[Tensor, "padded 3 height width"]:
    """On a CPU, with images repeated until there are 1, 2, 4 or a multiple of 8.

    oneDNN keeps code and space for every shape that it has met, and a batch that runs out meets them all.
    """
    count = len(points)
    wanted = -(-count // _EIGHT) * _EIGHT if count > _EIGHT // 2 else 1 << (count - 1).bit_length()
    if points.device.type != "cpu" or wanted == count:
        return points
    return torch.cat((points, points[-1:].expand(wanted - count, -1, -1, -1)))
