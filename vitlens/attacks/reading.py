"""One look at the model: logits of a batch, and gradients with respect to its pixels alone.

Gradients may be taken in bf16; whether an image is fooled is always judged in fp32, on exactly its pixels.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool
from torch import Tensor

from vitlens.attacks.jobs import Jobs, Machine, Seen
from vitlens.attacks.losses import fooled, margin, reached
from vitlens.attacks.quick import quick_gradients
from vitlens.devices import autocast, evaluating
from vitlens.errors import UnsupportedError
from vitlens.lens.onednn import quick_linear
from vitlens.models.specimen import Specimen
from vitlens.shapes import Images, Labels, Logits

_COARSE = 2.0**-6  # of the largest logit: what bf16 may be wrong by
_WORTH = 4  # jobs that need no gradient are run apart where they are at least this part of the batch


@contextmanager
def attacked(specimen: Specimen) -> Iterator[None]:
    """The specimen in evaluation mode with frozen parameters, so that a pass keeps nothing for their gradients.

    Modes and flags come back on exit.
    """
    flags = {name: parameter.requires_grad for name, parameter in specimen.named_parameters()}
    try:
        with evaluating(specimen):
            specimen.requires_grad_(False)
            yield
    finally:
        for name, parameter in specimen.named_parameters():
            parameter.requires_grad_(flags[name])


@dataclass(frozen=True)
class Reader:
    """Looks at the specimen for one machine.

    precision: of the passes with gradients; aimed: whether an image is done when it got its target (else when it is
    wrong).
    """

    specimen: Specimen
    machine: Machine
    precision: str = "fp32"
    aimed: bool = False

    def read(self, points: Images, jobs: Jobs, last: Bool[Tensor, " batch"]) -> Seen:
        """What the model says of the points; last (on the CPU): jobs for which no gradient is needed."""
        count = int(last.sum())
        if count == len(points) or not self.machine.objectives:
            return self._plain(points, jobs)
        if count * _WORTH < len(points):
            return self._traced(points, jobs, last.to(points.device))
        parts = [mask.nonzero()[:, 0].to(points.device) for mask in (last, ~last)]
        plain = self._plain(points[parts[0]], jobs.only(parts[0]))
        traced = self._traced(points[parts[1]], jobs.only(parts[1]), last.new_zeros(len(parts[1])).to(points.device))
        back = torch.cat(parts).argsort()
        return Seen(
            torch.cat((plain.logits, traced.logits))[back],
            torch.cat((plain.losses, traced.losses))[back],
            torch.cat((plain.gradients, traced.gradients), 1)[:, back],
            torch.cat((plain.won, traced.won))[back],
        )

    def exact(self, points: Images) -> Logits:
        """Logits in fp32, without a graph."""
        with torch.no_grad(), quick_linear(points.device):
            logits: Tensor = self.specimen(points)
        return logits

    def _plain(self, points: Images, jobs: Jobs) -> Seen:
        logits = self.exact(points)
        losses = self.machine.losses(logits, jobs)
        nothing = points.new_zeros(()).expand(losses.shape[1], *points.shape)
        return Seen(logits, losses, nothing, self._won(logits, jobs))

    def _traced(self, points: Images, jobs: Jobs, last: Bool[Tensor, " batch"]) -> Seen:
        """With gradients; where the pass was not in fp32, whatever might be won is judged again."""
        count = self.machine.objectives
        with torch.enable_grad(), autocast(points.device, self.precision), quick_gradients(points.device):
            coarse = torch.is_autocast_enabled(points.device.type)
            leaf = points.detach().requires_grad_()
            given = self.specimen(leaf)
        if not given.requires_grad:
            raise UnsupportedError(
                f"expected a gradient from {self.specimen.alias} with respect to the pixels, found none; "
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
