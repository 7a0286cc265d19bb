"""The engine of attacks, which keeps the batch full with images that are still robust.

A job is an image at one epsilon, in one restart, towards one target class. A slot of the batch
holds one job. After a failure, the image's next job takes the slot: first the next target, then the
next restart, then the next larger epsilon. After a success, or the image's last job, the next image
takes the slot. So the model runs only on images that are still robust. The result for an image does
not depend on the rest of the batch.

A minimum-norm attack stops a step beyond the decision boundary. Its perturbation is then shortened
along the line to the clean image, as far as the image stays adversarial. Foolbox does the same for
each epsilon.

Gradients are computed for pixels only, and may be computed in bf16. Success is always evaluated in
fp32, on exactly the pixels of the result.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import islice
from math import ceil
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.utils.checkpoint import CheckpointError

from vitlens.attacks.algorithm import Algorithm, Jobs, PointEvaluation, State, algorithm_of
from vitlens.attacks.losses import is_misclassified, is_target, margin
from vitlens.attacks.norms import per_pixel
from vitlens.attacks.plan import AttackPlan, CleanImages, fitting_batch, frozen
from vitlens.attacks.registry import Attack, without_gradients
from vitlens.data.draws import keys
from vitlens.devices import autocast
from vitlens.errors import NonFiniteError, argument
from vitlens.lens.differentiable import needing_gradients
from vitlens.lens.quick_passes import quick_linear
from vitlens.models.model import Model
from vitlens.shapes import Images, Logits

# called for a finished image, with the level at which the attack succeeded (-1: robust)
OnDone = Callable[[int], object]
Points = Float[Tensor, "points 3 height width"]
SuccessTest = Callable[[Points, Int[Tensor, " points"]], Bool[Tensor, " points"]]

ROUNDS = 3  # of the line search
POINTS = 8  # on each line in a round; a round narrows the interval to 1/9, three rounds to 1/729
_BF16_ERROR = 2.0**-6  # error of a logit after a pass in bf16, as a part of the largest logit
_CPU_CHUNK = 32  # images per pass on a CPU; more activations would not fit into its caches
# jobs that need no gradient get a separate pass if they are at least 1/4 of the batch
_SEPARATE = 4
_MULTIPLE = 8  # batches on a CPU are padded to a multiple of this number


@dataclass(frozen=True)
class AttackOutcome:
    """The outcome for each image, of all algorithms that have run so far.

    level_index: the index, in `AttackPlan.levels`, of the epsilon at which the attack succeeded. -1
        for an image that is robust or was not attacked.
    distance: the length of the perturbation, infinite without an adversarial image.
    forwards, backwards: the numbers of passes through the model.
    silent: True if all gradients so far were exactly 0.
    adversarial: the adversarial images by index of the image.
    """

    level_index: Int[Tensor, " batch"]
    distance: Float[Tensor, " batch"]
    forwards: Int[Tensor, " batch"]
    backwards: Int[Tensor, " batch"]
    silent: Bool[Tensor, " batch"]
    adversarial: dict[int, Tensor]

    @property
    def zero_gradients(self) -> Bool[Tensor, " batch"]:
        """Return True for images with gradients that were computed and were all exactly 0."""
        return self.silent & (self.backwards > 0)


class _Pass(NamedTuple):
    """One pass of the model on some jobs of a batch.

    rows: the rows of the jobs in the batch, on the CPU.
    """

    rows: Int[Tensor, " rows"]
    needs_gradients: bool


@dataclass(frozen=True)
class Evaluator:
    """Evaluates points with a model, for an algorithm.

    model: the model under attack.
    algorithm: the algorithm, which defines the losses.
    precision: the precision of passes with gradients.
    targeted: True if success means that the target is predicted, False if any wrong class will do.
    """

    model: Model
    algorithm: Algorithm
    precision: str
    targeted: bool

    def evaluate(self, points: Images, jobs: Jobs, last: Bool[Tensor, " batch"]) -> PointEvaluation:
        """Return the model's outputs on the points.

        last: True for jobs in their last query, which need no gradient. It is on the CPU.
        """
        passes = self._passes(last, points.device)
        parts = []
        for rows, needs_gradients in passes:
            slots = rows.to(points.device)
            pass_points = points
            pass_jobs = jobs
            if len(passes) > 1:
                pass_points = points[slots]
                pass_jobs = jobs.select(slots)
            if needs_gradients:
                is_last = last[rows].to(points.device)
                parts.append(self._with_gradients(pass_points, pass_jobs, is_last))
            else:
                parts.append(self._without_gradients(pass_points, pass_jobs))
        if len(parts) == 1:
            return parts[0]
        # back into the order of the batch
        order = torch.cat([rows for rows, _ in passes]).argsort().to(points.device)
        return PointEvaluation(
            logits=torch.cat([part.logits for part in parts])[order],
            losses=torch.cat([part.losses for part in parts])[order],
            gradients=torch.cat([part.gradients for part in parts], 1)[:, order],
            success=torch.cat([part.success for part in parts])[order],
        )

    def _passes(self, last: Bool[Tensor, " batch"], device: torch.device) -> list[_Pass]:
        """Return the passes in which a batch is evaluated."""
        all_rows = torch.arange(len(last))
        without_gradient = int(last.sum())
        if without_gradient == len(last) or not self.algorithm.objectives:
            groups = [_Pass(all_rows, needs_gradients=False)]
        elif without_gradient * _SEPARATE >= len(last):
            groups = [
                _Pass(all_rows[last], needs_gradients=False),
                _Pass(all_rows[~last], needs_gradients=True),
            ]
        else:
            groups = [_Pass(all_rows, needs_gradients=True)]
        chunk = _CPU_CHUNK if device.type == "cpu" else len(last)
        passes = []
        for group in groups:
            for rows in group.rows.split(chunk):
                passes.append(_Pass(rows, group.needs_gradients))
        return passes

    def exact(self, points: Images) -> Logits:
        """Return the logits in the module's precision, without a graph, in the points' dtype."""
        with torch.no_grad(), quick_linear(points.device):
            logits: Tensor = self.model(_pad(points))
        return logits[: len(points)].to(points.dtype)

    def success(self, logits: Logits, jobs: Jobs) -> Bool[Tensor, " batch"]:
        """Return True for points that are adversarial, by their logits."""
        if self.targeted:
            return is_target(logits, jobs.targets)
        return is_misclassified(logits, jobs.labels)

    def _without_gradients(self, points: Images, jobs: Jobs) -> PointEvaluation:
        logits = self.exact(points)
        losses = self.algorithm.losses(logits, jobs)
        no_gradients = points.new_zeros(()).expand(losses.shape[1], *points.shape)  # no memory
        return PointEvaluation(logits, losses, no_gradients, self.success(logits, jobs))

    def _with_gradients(
        self, points: Images, jobs: Jobs, last: Bool[Tensor, " batch"]
    ) -> PointEvaluation:
        """Return the outputs with gradients.

        last: True for jobs in their last query.
        """
        with autocast(points.device, self.precision):
            is_coarse = torch.is_autocast_enabled(points.device.type)
        alternative = f"attacks that need only scores work ({without_gradients()})"
        with needing_gradients(self.model, instead=alternative):
            try:
                evaluation = self._differentiate(points, jobs, quick_linear(points.device))
            except CheckpointError:
                # gradient checkpointing computes layers again outside quick_linear
                evaluation = self._differentiate(points, jobs, nullcontext())
        if is_coarse:
            return self._refine(evaluation, points, jobs, last)
        return evaluation

    def _refine(
        self, coarse: PointEvaluation, points: Images, jobs: Jobs, last: Bool[Tensor, " batch"]
    ) -> PointEvaluation:
        """Evaluate again in fp32 after a pass in bf16.

        Only points that may be adversarial are evaluated, and the last ones of their job.
        """
        logits = coarse.logits
        error = _BF16_ERROR * logits.abs().amax(1)
        # by how much the attack fails: negative if it succeeds
        if self.targeted:
            lead = -margin(logits, jobs.targets)
        else:
            lead = margin(logits, jobs.labels)
        uncertain = ((lead < error) | last).nonzero()[:, 0]
        if not len(uncertain):
            return coarse
        logits = logits.index_copy(0, uncertain, self.exact(points[uncertain]))
        uncertain_success = self.success(logits, jobs)[uncertain]
        success = torch.zeros_like(coarse.success).index_copy(0, uncertain, uncertain_success)
        return replace(coarse, logits=logits, success=success)

    def _differentiate(
        self, points: Images, jobs: Jobs, quick: AbstractContextManager[None]
    ) -> PointEvaluation:
        """Return the outputs with gradients, all from one pass.

        quick: a context of faster passes.
        """
        count = self.algorithm.objectives
        with torch.enable_grad(), autocast(points.device, self.precision), quick:
            leaf = points.detach().requires_grad_()
            outputs = self.model(_pad(leaf))[: len(leaf)]
        with torch.enable_grad():
            logits = outputs.to(points.dtype)
            losses = self.algorithm.losses(logits, jobs)
            gradients = []
            for index in range(count):
                is_last = index + 1 == count
                loss = losses[:, index].sum()
                (gradient,) = torch.autograd.grad(loss, leaf, retain_graph=not is_last)
                gradients.append(gradient)
        logits = logits.detach()
        return PointEvaluation(
            logits=logits,
            losses=losses.detach(),
            gradients=torch.stack(gradients),
            success=self.success(logits, jobs),
        )


def _pad(points: Images) -> Float[Tensor, "padded 3 height width"]:
    """Return points padded on a CPU with copies of the last image to 1, 2, 4 or a multiple of 8.

    oneDNN caches code and memory for every shape, and a shrinking batch would produce all of them.
    """
    count = len(points)
    size = 1 << (count - 1).bit_length()  # the next power of 2
    if count > _MULTIPLE // 2:
        size = ceil(count / _MULTIPLE) * _MULTIPLE
    if points.device.type != "cpu" or size == count:
        return points
    copies = points[-1:].expand(size - count, -1, -1, -1)
    return torch.cat((points, copies))


class Engine:
    """One attack without members, which runs over the images batch by batch.

    The jobs of an image are numbered in their order by a stage:
    stage = level x jobs per level + restart x targets + target.
    A slot of the batch holds the index of an image (its row) and its current stage.

    `run` sets the attributes that change: limits, waiting, rows, stages and queries. A round
    (`_round`) evaluates the batch once, records successes and puts new jobs into ended slots.

    outcome: the outcome of earlier attacks, to which this one adds. An image is attacked only below
        the level at which it is already broken.

    Raises the errors of the attack's algorithm.
    """

    def __init__(
        self,
        model: Model,
        clean: CleanImages,
        attack: Attack,
        plan: AttackPlan,
        outcome: AttackOutcome | None = None,
    ) -> None:
        self.model = model
        self.clean = clean
        self.plan = plan
        self.is_minimum_norm = attack.kind == "minimum"
        self.algorithm = algorithm_of(attack, plan.setting(attack, model, clean))
        self.evaluator = Evaluator(
            model, self.algorithm, plan.precision, targeted=plan.targets is not None
        )
        self.outcome = outcome or nothing_yet(len(clean.labels))
        self.batch_size = plan.batch_size or fitting_batch(model)
        self.targets = 1
        if plan.targets is None:
            self.targets = max(1, min(attack.targets, clean.runners_up.shape[1]))
        self.jobs_per_level = self.targets
        if attack.random_start:
            self.jobs_per_level *= plan.restarts

    def run(self, on_done: OnDone = lambda _: None) -> AttackOutcome:
        """Run all jobs of all images.

        on_done: called for each finished image, with its level.

        Raises NonFiniteError, with the names of model and image.
        """
        level = self.outcome.level_index
        # the number of levels to be tried for each image, from the smallest
        self.limits: list[int] = torch.where(level < 0, len(self.plan.levels), level).tolist()
        attacked_rows = [
            row
            for row, is_correct in enumerate(self.clean.correct.tolist())
            if is_correct and self.limits[row]
        ]
        self.waiting = iter(attacked_rows)
        self.on_done = on_done
        # for each slot: the row of its image, the stage of its job, the queries of the job so far
        self.rows = list(islice(self.waiting, self.batch_size))
        self.stages = [self._first(row) for row in self.rows]
        self.queries = torch.zeros(len(self.rows), dtype=torch.int64)
        with frozen(self.model), torch.no_grad():
            jobs = self._jobs(self.rows, self.stages)
            state = self.algorithm.start(jobs) if self.rows else {}
            while self.rows:
                jobs, state = self._round(jobs, state)
        return self.outcome

    def _round(self, jobs: Jobs, state: State) -> tuple[Jobs, State]:
        """Query the model for the whole batch; return the jobs and the state of the next round."""
        last = self.queries == self.algorithm.queries - 1
        points = state["points"]
        evaluation = self.evaluator.evaluate(points, jobs, last)
        state = self.algorithm.step(jobs, state, evaluation)
        if self.is_minimum_norm:
            nearest = state["nearest"]
        else:
            nearest = self.algorithm.norm.length(points - jobs.clean)
        is_over = state.get("over", torch.zeros_like(evaluation.success))
        largest_gradient = torch.zeros_like(nearest)  # at any pixel
        if evaluation.losses.shape[1]:
            largest_gradient = evaluation.gradients.detach().abs().amax((0, 2, 3, 4))
        is_finite = evaluation.logits.isfinite().all(1)
        # One transfer to the host, because each waits for the device. All columns become numbers of
        # one type: 0 and 1 for masks.
        columns = (nearest, evaluation.success, is_over, is_finite, largest_gradient)
        on_host = torch.stack([column.to(nearest.dtype) for column in columns]).cpu()
        # the same columns in the same order, now on the CPU
        distance, adversarial, over, finite, largest_on_host = on_host
        self._count(last, finite.bool(), largest_on_host)
        ended = over.bool() | last
        # A search for the smallest perturbation goes on after its first adversarial image. With any
        # other attack, the job ends.
        if self.is_minimum_norm:
            success = distance.isfinite() & ended
        else:
            success = adversarial.bool()
            ended |= success
        self.queries += 1
        jobs = replace(jobs, queries=jobs.queries + 1)
        slots = success.nonzero()[:, 0]
        if len(slots):
            if self.is_minimum_norm:
                points, distance = self._shorten(slots, jobs, state["best"], distance)
            self._record(slots, points, distance)
        return self._refill(ended.nonzero()[:, 0].tolist(), success, jobs, state)

    def _record(self, slots: Int[Tensor, " slots"], points: Images, distance: Tensor) -> None:
        """Record the success of the jobs in these slots of the batch."""
        rows = torch.tensor(self.rows)[slots]
        self.outcome.level_index[rows] = torch.tensor(self.stages)[slots] // self.jobs_per_level
        self.outcome.distance[rows] = distance[slots].float()
        if self.plan.keep:
            adversarial = points[slots.to(points.device)].to(self.clean.images.device)
            self.outcome.adversarial.update(zip(rows.tolist(), adversarial))

    def _count(
        self, last: Bool[Tensor, " batch"], finite: Bool[Tensor, " batch"], largest_gradient: Tensor
    ) -> None:
        """Count each image's passes, and record if all its gradients were 0.

        finite: True if the logits are finite.
        largest_gradient: the largest gradient at any pixel.

        Raises NonFiniteError, with the names of model and image.
        """
        has_finite_gradient = largest_gradient.isfinite()
        for is_finite, name in ((finite, "logits"), (has_finite_gradient, "gradients")):
            if not is_finite.all():
                row = self.rows[int((~is_finite).nonzero()[0])]
                raise NonFiniteError(
                    f"expected finite {name}, found NaN or infinity from {self.model.alias} on "
                    f"image {int(self.clean.indices[row])} under attack; try "
                    f"{argument('precision', 'fp32')}, or an attack without gradients "
                    f"({without_gradients()})"
                )
        rows = torch.tensor(self.rows)
        self.outcome.forwards[rows] += 1
        self.outcome.backwards[rows] += self.algorithm.objectives * (~last)
        self.outcome.silent[rows] &= last | (largest_gradient == 0)

    def _shorten(
        self, slots: Int[Tensor, " slots"], jobs: Jobs, adversarial: Tensor, distance: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return adversarial images and distances, with the perturbations in these slots shortened.

        slots, distance: on the CPU.
        """
        device_slots = slots.to(adversarial.device)
        slot_jobs = jobs.select(device_slots)

        def is_adversarial(points: Points, rows: Int[Tensor, " points"]) -> Bool[Tensor, " points"]:
            return self.evaluator.success(self.evaluator.exact(points), slot_jobs.select(rows))

        nearer = line_search(
            is_adversarial, slot_jobs.clean, adversarial[device_slots], batch_size=self.batch_size
        )
        self.outcome.forwards[torch.tensor(self.rows)[slots]] += ROUNDS * POINTS
        lengths = self.algorithm.norm.length(nearer - slot_jobs.clean).to(distance)
        shortened = adversarial.index_copy(0, device_slots, nearer)
        return shortened, distance.index_copy(0, slots, lengths)

    def _refill(
        self, slots: Sequence[int], success: Tensor, jobs: Jobs, state: State
    ) -> tuple[Jobs, State]:
        """Fill the slots of ended jobs with the same image's next job, or with the next image.

        If no image is left for a slot, its row is removed from the batch.
        """
        filled = []  # slots with a new job
        for slot in slots:
            row = self.rows[slot]
            self.stages[slot] = self._next(row, self.stages[slot], bool(success[slot]))
            if self.stages[slot] < 0:
                self.on_done(int(self.outcome.level_index[row]))
                self.rows[slot] = next(self.waiting, -1)  # -1: no image is left
                self.stages[slot] = self._first(self.rows[slot])
            if self.rows[slot] >= 0:
                filled.append(slot)
        if filled:
            rows = [self.rows[slot] for slot in filled]
            stages = [self.stages[slot] for slot in filled]
            new_jobs = self._jobs(rows, stages)
            indices = torch.tensor(filled, device=new_jobs.rows.device)
            start = self.algorithm.start(new_jobs)
            self.queries[filled] = 0
            jobs = jobs.replaced(indices, new_jobs)
            state = {name: state[name].index_copy(0, indices, new) for name, new in start.items()}
        if len(filled) < len(slots):
            occupied = [slot for slot, row in enumerate(self.rows) if row >= 0]
            self.rows = [self.rows[slot] for slot in occupied]
            self.stages = [self.stages[slot] for slot in occupied]
            self.queries = self.queries[occupied]
            indices = torch.tensor(occupied, dtype=torch.int64, device=jobs.rows.device)
            jobs = jobs.select(indices)
            state = {name: value[indices] for name, value in state.items()}
        return jobs, state

    def _first(self, row: int) -> int:
        """Return an image's first stage, at the smallest epsilon (downwards: at the largest)."""
        if self.plan.downwards and row >= 0:
            return (self.limits[row] - 1) * self.jobs_per_level
        return 0

    def _next(self, row: int, stage: int, success: bool) -> int:
        """Return the next stage of an image, a negative number if there is none.

        After a success, the image is finished (downwards: the next smaller epsilon follows). After
        a failure, the next job follows (downwards: only at the same epsilon).

        So upwards the stages run from 0 to that before limit x jobs per level. Downwards they are
        those of the largest level, then, only after a success, those of the next smaller one.
        """
        level = stage // self.jobs_per_level
        if success and self.plan.downwards:
            return (level - 1) * self.jobs_per_level  # negative below the smallest epsilon
        if success:
            return -1
        end_level = level + 1 if self.plan.downwards else self.limits[row]
        end_stage = end_level * self.jobs_per_level
        if stage + 1 == end_stage:
            return -1
        return stage + 1

    def _jobs(self, rows: list[int], stages: list[int]) -> Jobs:
        """Return the jobs of these images at these stages."""
        plan = self.plan
        clean = self.clean
        device = self.model.device
        row = torch.tensor(rows, dtype=torch.int64)
        stage = torch.tensor(stages, dtype=torch.int64)
        # the inverse of stage = level x jobs per level + restart x targets + target
        level = stage // self.jobs_per_level
        job_of_level = stage % self.jobs_per_level
        restarts = job_of_level // self.targets
        target_ranks = job_of_level % self.targets
        runners_up = clean.runners_up[row]
        if plan.targets is None:
            targets = runners_up.gather(1, target_ranks[:, None])[:, 0]
        else:
            targets = plan.targets[row]
        epsilon = torch.tensor(plan.levels, dtype=clean.images.dtype)[level]
        return Jobs(
            rows=row.to(device),
            keys=keys(plan.seed, clean.indices[row], restarts, target_ranks).to(device),
            clean=clean.images[row.to(clean.images.device)].to(device),
            labels=clean.labels[row].to(device),
            runners_up=runners_up.to(device),
            targets=targets.to(device),
            restarts=restarts.to(device),
            epsilon=epsilon.to(device),
            queries=torch.zeros_like(row).to(device),
        )


def worst_case(
    model: Model,
    clean: CleanImages,
    attack: Attack,
    plan: AttackPlan,
    *,
    advance: Callable[[int], object] = lambda _: None,
) -> AttackOutcome:
    """Return the outcome of the attack, or of its members in turn.

    An image is attacked only at the epsilons at which it is still robust.

    advance: called with the number of images just finished. The numbers add up to all images.
    """
    outcome = nothing_yet(len(clean.labels))
    # all are built before one runs, so that a member that cannot attack this model raises at once
    engines = [Engine(model, clean, part, plan, outcome) for part in attack.parts]
    if plan.levels:
        advance(int((~clean.correct).sum()))  # misclassified images are not attacked
    else:
        advance(len(clean.labels))

    def advance_if_finished(level: int) -> None:
        # the members that follow do not attack an image that is broken at the smallest epsilon
        if level == 0:
            advance(1)

    # the last member finishes all images that no member before it has finished
    for engine in engines[:-1]:
        engine.run(advance_if_finished)
    return engines[-1].run(lambda _: advance(1))


def nothing_yet(count: int) -> AttackOutcome:
    """Return the outcome before any attack."""
    return AttackOutcome(
        level_index=torch.full((count,), -1),
        distance=torch.full((count,), torch.inf),
        forwards=torch.zeros(count, dtype=torch.int64),
        backwards=torch.zeros(count, dtype=torch.int64),
        silent=torch.ones(count, dtype=torch.bool),
        adversarial={},
    )


def line_search(
    is_adversarial: SuccessTest, clean: Images, adversarial: Images, *, batch_size: int
) -> Images:
    """Return the nearest adversarial images on the lines from clean to adversarial images.

    They are found by a grid search: each round tests POINTS points between two ends of the line,
    and keeps the interval that ends at the first adversarial one. If no nearer point is
    adversarial, the adversarial image is returned unchanged, bit for bit.

    is_adversarial: takes points and the rows of their images, and returns a mask.
    batch_size: the number of points per call of it.
    """
    change = adversarial - clean
    rows = torch.arange(len(clean), device=clean.device)

    def points_at(rows: Int[Tensor, " points"], shares: Float[Tensor, " points"]) -> Points:
        """Return the points at these shares of the lines; 0 is the clean image.

        Tested and returned points come from this function, so they are equal bit for bit.
        """
        points: Points = (clean[rows] + per_pixel(shares) * change[rows]).clamp(0, 1)
        return points

    # (images, 2): the shares of the line between which the search goes on
    ends = torch.tensor([0.0, 1.0], dtype=clean.dtype, device=clean.device).repeat(len(clean), 1)
    steps = torch.arange(1, POINTS + 1, device=ends.device, dtype=ends.dtype) / (POINTS + 1)
    for _ in range(ROUNDS):
        between = ends[:, :1] + (ends[:, 1:] - ends[:, :1]) * steps  # (images, POINTS)
        inner_shares = between.flatten()
        inner_rows = rows.repeat_interleave(POINTS)
        results = []
        for point_rows, point_shares in zip(
            inner_rows.split(batch_size), inner_shares.split(batch_size)
        ):
            results.append(is_adversarial(points_at(point_rows, point_shares), point_rows))
        success = torch.cat(results)
        far_end = torch.ones_like(rows, dtype=torch.bool)[:, None]  # always adversarial
        along_line = torch.cat((success.view(-1, POINTS), far_end), 1)  # (images, POINTS + 1)
        # argmax returns the first of equal values: the nearest adversarial point
        first = along_line.to(torch.uint8).argmax(1, keepdim=True)
        # Shares start at the near end, which `along_line` lacks: share `first + 1` is the
        # adversarial point, and share `first` the one before.
        shares = torch.cat((ends[:, :1], between, ends[:, 1:]), 1)
        ends = shares.gather(1, torch.cat((first, first + 1), 1))
    nearest = ends[:, 1]
    return torch.where(per_pixel(nearest) < 1, points_at(rows, nearest), adversarial)
