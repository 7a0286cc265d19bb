"""One query of the model: logits of a batch, and gradients with respect to its pixels alone.

Gradients may be computed in bf16; whether an image is adversarial is always evaluated in fp32, on exactly its pixels.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from vitlens.attacks.algorithm import Algorithm, Jobs, PointEvaluation
from vitlens.attacks.losses import is_misclassified, is_target, margin
from vitlens.attacks.registry import PRECISION, without_gradients
from vitlens.devices import autocast, evaluating
from vitlens.errors import UnsupportedError
from vitlens.lens.quick_passes import quick_convolutions, quick_linear
from vitlens.models.model import Model
from vitlens.shapes import Images, Logits

_BF16_ERROR = 2.0**-6  # of the largest logit
_CPU_BATCH = 32  # images per pass on a CPU, whose activations fit into its caches
_SEPARATE = 4  # jobs that need no gradient get a pass of their own where they are at least 1/4 of the batch
_MULTIPLE = 8  # to which batches on a CPU are padded


@contextmanager
def frozen(model: Model) -> Iterator[None]:
    """The model in evaluation mode with frozen parameters, so that no pass stores values for their gradients.

    Modes and flags are restored on exit.
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
    """Runs the model for one algorithm.

    precision: of the passes with gradients; targeted: whether success means predicting the target (else: any wrong
    class).
    """

    model: Model
    algorithm: Algorithm
    precision: str = PRECISION
    targeted: bool = False

    def evaluate(self, points: Images, jobs: Jobs, last: Bool[Tensor, " batch"]) -> PointEvaluation:
        """The model's outputs on the points; last (on the CPU): jobs for which no gradient is needed."""
        chunk = _CPU_BATCH if points.device.type == "cpu" else len(points)
        all_jobs, count = torch.ones_like(last), int(last.sum())
        groups = [(all_jobs, True)]  # the jobs of each pass, and whether it needs gradients
        if count == len(last) or not self.algorithm.objectives:
            groups = [(all_jobs, False)]
        elif count * _SEPARATE >= len(last):
            groups = [(last, False), (~last, True)]
        passes = [(rows, traced) for mask, traced in groups for rows in mask.nonzero()[:, 0].split(chunk)]
        parts = []
        for rows, traced in passes:
            slots = rows.to(points.device)
            own = (points, jobs) if len(passes) == 1 else (points[slots], jobs.select(slots))
            parts.append(self._traced(*own, last[rows].to(points.device)) if traced else self._plain(*own))
        if len(parts) == 1:
            return parts[0]
        order = torch.cat([rows for rows, _ in passes]).argsort().to(points.device)
        return PointEvaluation(
            torch.cat([part.logits for part in parts])[order], torch.cat([part.losses for part in parts])[order],
            torch.cat([part.gradients for part in parts], 1)[:, order],
            torch.cat([part.success for part in parts])[order],
        )  # fmt: skip

    def successful(self, points: Images, jobs: Jobs) -> Bool[Tensor, " batch"]:
        """Whether these points are adversarial, in fp32."""
        return self._success(self.exact(points), jobs)

    def exact(self, points: Images) -> Logits:
        """Logits in fp32, without a graph."""
        with torch.no_grad(), quick_linear(points.device):
            logits: Tensor = self.model(_padded(points))
        return logits[: len(points)]

    def _plain(self, points: Images, jobs: Jobs) -> PointEvaluation:
        logits = self.exact(points)
        losses = self.algorithm.losses(logits, jobs)
        no_gradients = points.new_zeros(()).expand(losses.shape[1], *points.shape)
        return PointEvaluation(logits, losses, no_gradients, self._success(logits, jobs))

    def _traced(self, points: Images, jobs: Jobs, last: Bool[Tensor, " batch"]) -> PointEvaluation:
        """With gradients; after a pass in bf16, points that might be adversarial are evaluated again in fp32."""
        count = self.algorithm.objectives
        with torch.enable_grad(), autocast(points.device, self.precision), quick_linear(points.device):
            coarse = torch.is_autocast_enabled(points.device.type)
            leaf = points.detach().requires_grad_()
            outputs = self.model(_padded(leaf))[: len(leaf)]
        if not outputs.requires_grad:
            raise UnsupportedError(
                f"expected a gradient from {self.model.alias} with respect to the pixels, found none; "
                f"try an attack that needs scores alone ({without_gradients()})"
            )
        with torch.enable_grad():
            logits = outputs.to(points.dtype)
            losses = self.algorithm.losses(logits, jobs)
            gradients_of = [
                torch.autograd.grad(losses[:, index].sum(), leaf, retain_graph=index + 1 < count)[0]
                for index in range(count)
            ]
        gradients = gradients_of[0][None] if count == 1 else torch.stack(gradients_of)
        logits = logits.detach()
        seen = PointEvaluation(logits, losses.detach(), gradients, self._success(logits, jobs))
        return self._verified(seen, points, jobs, last) if coarse else seen

    def _verified(
        self, seen: PointEvaluation, points: Images, jobs: Jobs, last: Bool[Tensor, " batch"]
    ) -> PointEvaluation:
        """With fp32 logits for the points that are nearly adversarial, or are the last of their job."""
        slack = _BF16_ERROR * seen.logits.abs().amax(1)
        lead = -margin(seen.logits, jobs.targets) if self.targeted else margin(seen.logits, jobs.labels)
        uncertain = ((lead < slack) | last).nonzero()[:, 0]
        if not len(uncertain):
            return seen
        logits = seen.logits.index_copy(0, uncertain, self.exact(points[uncertain]))
        success = torch.zeros_like(seen.success).index_copy(0, uncertain, self._success(logits, jobs)[uncertain])
        return replace(seen, logits=logits, success=success)

    def _success(self, logits: Logits, jobs: Jobs) -> Bool[Tensor, " batch"]:
        return is_target(logits, jobs.targets) if self.targeted else is_misclassified(logits, jobs.labels)


def _padded(points: Images) -> Float[Tensor, "padded 3 height width"]:
    """On a CPU, padded with copies of the last image to 1, 2, 4 or a multiple of 8.

    oneDNN caches code and memory for every shape, and a shrinking batch would produce all of them.
    """
    count = len(points)
    size = -(-count // _MULTIPLE) * _MULTIPLE if count > _MULTIPLE // 2 else 1 << (count - 1).bit_length()
    if points.device.type != "cpu" or size == count:
        return points
    return torch.cat((points, points[-1:].expand(size - count, -1, -1, -1)))
