"""One query of the model: logits of a batch, and gradients with respect to its pixels alone.

Gradients may be taken in bf16; whether an image is adversarial is always judged in fp32, on exactly its pixels.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from vitlens.attacks.algorithm import Algorithm, Jobs, PointEvaluation
from vitlens.attacks.losses import fooled, margin, reached
from vitlens.attacks.quick import quick_convolutions, quick_gradients
from vitlens.attacks.registry import without_gradients
from vitlens.devices import autocast, evaluating
from vitlens.errors import UnsupportedError
from vitlens.lens.onednn import quick_linear
from vitlens.models.model import Model
from vitlens.shapes import Images, Labels, Logits

_COARSE = 2.0**-6  # of the largest logit: what bf16 may be wrong by
_CPU_BATCH = 32  # images in a pass on a CPU: the next layer still finds them in its caches
_APART = 4  # jobs that need no gradient are run apart where they are at least a fourth of the batch
_MULTIPLE = 8  # of which batches on a CPU are


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
class Evaluator:
    """Asks the model for one algorithm.

    precision: of the passes with gradients; targeted: whether success is to reach the target (else to be wrong).
    """

    model: Model
    algorithm: Algorithm
    precision: str = "fp32"
    targeted: bool = False

    def evaluate(self, points: Images, jobs: Jobs, last: Bool[Tensor, " batch"]) -> PointEvaluation:
        """What the model answers on the points; last (on the CPU): jobs for which no gradient is needed."""
        chunk = _CPU_BATCH if points.device.type == "cpu" else len(points)
        groups = [(mask.nonzero()[:, 0].split(chunk), traced) for mask, traced in self._groups(last)]
        parts = [(rows, traced) for chunks, traced in groups for rows in chunks]
        if len(parts) == 1:
            return self._asked(points, jobs, last.to(points.device), parts[0][1])
        parts_seen = []
        for rows, traced in parts:
            place = rows.to(points.device)
            parts_seen.append(self._asked(points[place], jobs.only(place), last[rows].to(points.device), traced))
        return _joined(parts_seen, torch.cat([rows for rows, _ in parts]).argsort().to(points.device))

    def _groups(self, last: Bool[Tensor, " batch"]) -> list[tuple[Bool[Tensor, " batch"], bool]]:
        """Which jobs go together, and whether for gradients."""
        everyone, count = torch.ones_like(last), int(last.sum())
        if count == len(last) or not self.algorithm.objectives:
            return [(everyone, False)]
        return [(everyone, True)] if count * _APART < len(last) else [(last, False), (~last, True)]

    def _asked(self, points: Images, jobs: Jobs, last: Bool[Tensor, " batch"], traced: bool) -> PointEvaluation:
        return self._traced(points, jobs, last) if traced else self._plain(points, jobs)

    def successful(self, points: Images, jobs: Jobs) -> Bool[Tensor, " batch"]:
        """Whether these points are a success, in fp32."""
        return self._success(self.exact(points), jobs)

    def exact(self, points: Images) -> Logits:
        """Logits in fp32, without a graph."""
        with torch.no_grad(), quick_linear(points.device):
            logits: Tensor = self.model(_padded(points))
        return logits[: len(points)]

    def _plain(self, points: Images, jobs: Jobs) -> PointEvaluation:
        logits = self.exact(points)
        losses = self.algorithm.losses(logits, jobs)
        nothing = points.new_zeros(()).expand(losses.shape[1], *points.shape)
        return PointEvaluation(logits, losses, nothing, self._success(logits, jobs))

    def _traced(self, points: Images, jobs: Jobs, last: Bool[Tensor, " batch"]) -> PointEvaluation:
        """With gradients; where the pass was not in fp32, whatever might be a success is judged again."""
        count = self.algorithm.objectives
        with torch.enable_grad(), autocast(points.device, self.precision), quick_gradients(points.device):
            coarse = torch.is_autocast_enabled(points.device.type)
            leaf = points.detach().requires_grad_()
            answered = self.model(_padded(leaf))[: len(leaf)]
        if not answered.requires_grad:
            raise UnsupportedError(
                f"expected a gradient from {self.model.alias} with respect to the pixels, found none; "
                f"try an attack that needs scores alone ({without_gradients()})"
            )
        with torch.enable_grad():
            logits = answered.to(points.dtype)
            losses = self.algorithm.losses(logits, jobs)
            each = [
                torch.autograd.grad(losses[:, index].sum(), leaf, retain_graph=index + 1 < count)[0]
                for index in range(count)
            ]
        gradients = each[0][None] if count == 1 else torch.stack(each)
        logits = logits.detach()
        seen = PointEvaluation(logits, losses.detach(), gradients, self._success(logits, jobs))
        return self._judged(seen, points, jobs, last) if coarse else seen

    def _judged(
        self, seen: PointEvaluation, points: Images, jobs: Jobs, last: Bool[Tensor, " batch"]
    ) -> PointEvaluation:
        """With the fp32 logits of the points that are near to a success, or are the last of their job."""
        slack = _COARSE * seen.logits.abs().amax(1)
        near = margin(seen.logits, self._classes(jobs)) * (-1 if self.targeted else 1) < slack
        doubtful = (near | last).nonzero()[:, 0]
        if not len(doubtful):
            return seen
        logits = seen.logits.index_copy(0, doubtful, self.exact(points[doubtful]))
        success = torch.zeros_like(seen.success).index_copy(0, doubtful, self._success(logits, jobs)[doubtful])
        return replace(seen, logits=logits, success=success)

    def _success(self, logits: Logits, jobs: Jobs) -> Bool[Tensor, " batch"]:
        return (reached if self.targeted else fooled)(logits, self._classes(jobs))

    def _classes(self, jobs: Jobs) -> Labels:
        return jobs.targets if self.targeted else jobs.labels


def _joined(parts: list[PointEvaluation], order: Int[Tensor, " batch"]) -> PointEvaluation:
    """The parts concatenated, in this order."""
    return PointEvaluation(
        torch.cat([part.logits for part in parts])[order],
        torch.cat([part.losses for part in parts])[order],
        torch.cat([part.gradients for part in parts], 1)[:, order],
        torch.cat([part.success for part in parts])[order],
    )


def _padded(points: Images) -> Float[Tensor, "padded 3 height width"]:
    """On a CPU, with images repeated until there are 1, 2, 4 or a multiple of 8.

    oneDNN keeps code and memory for every shape that it has met, and a batch that shrinks meets them all.
    """
    count = len(points)
    size = -(-count // _MULTIPLE) * _MULTIPLE if count > _MULTIPLE // 2 else 1 << (count - 1).bit_length()
    if points.device.type != "cpu" or size == count:
        return points
    return torch.cat((points, points[-1:].expand(size - count, -1, -1, -1)))
