"""The engine of attacks, which keeps the batch full with images that are still robust.

A job is an image at one epsilon in one restart. After a failure the next restart, then the next
larger epsilon, follows in the same slot; after a success, or the image's last job, the next image
takes the slot. So the model runs only on images that are still robust, and the result for an image
does not depend on the rest of the batch.

A minimum-norm attack stops a step beyond the decision boundary, so its perturbation is shortened
along the line to the clean image as far as the image stays adversarial (foolbox does the same for
each epsilon).

Gradients, with respect to pixels alone, may be computed in bf16; whether an image is adversarial is
always evaluated in fp32, on exactly its pixels.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import islice
from math import ceil

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

# called with the level at which the attack succeeded on a finished image (-1: robust)
OnDone = Callable[[int], object]
Points = Float[Tensor, "points 3 height width"]
SuccessTest = Callable[[Points, Int[Tensor, " points"]], Bool[Tensor, " points"]]

ROUNDS = 3  # of the line search
POINTS = 8  # on each line in a round: each round narrows the interval to 1/9, three to 1/729
_BF16_ERROR = 2.0**-6  # of the largest logit
_CPU_CHUNK = 32  # images per pass on a CPU, whose activations fit into its caches
# jobs that need no gradient get a separate pass if they are at least 1/4 of the batch
_SEPARATE = 4
_MULTIPLE = 8  # to which batches on a CPU are padded


@dataclass(frozen=True)
class AttackOutcome:
    """The outcome for each image, of all algorithms that have run so far.

    level: index of the epsilon at which the attack succeeded, -1 for an image that is robust or was
        not attacked.
    distance: the distance of the adversarial image, infinite without one.
    forwards, backwards: passes.
    silent: whether no gradient was other than exactly 0.
    adversarial: images by row.
    """

    level: Int[Tensor, " batch"]
    distance: Float[Tensor, " batch"]
    forwards: Int[Tensor, " batch"]
    backwards: Int[Tensor, " batch"]
    silent: Bool[Tensor, " batch"]
    adversarial: dict[int, Tensor]

    @property
    def zero_gradients(self) -> Bool[Tensor, " batch"]:
        """Return a mask of the images whose gradients were computed and all exactly 0."""
        return self.silent & (self.backwards > 0)


@dataclass(frozen=True)
class Evaluator:
    """A model and an algorithm, with which points are evaluated.

    precision: the precision of the passes with gradients.
    targeted: whether success means predicting the target (else: any wrong class).
    """

    model: Model
    algorithm: Algorithm
    precision: str
    targeted: bool

    def evaluate(self, points: Images, jobs: Jobs, last: Bool[Tensor, " batch"]) -> PointEvaluation:
        """Return the model's outputs on the points.

        last (on the CPU): jobs for which no gradient is needed.
        """
        chunk = _CPU_CHUNK if points.device.type == "cpu" else len(points)
        all_jobs = torch.ones_like(last)
        count = int(last.sum())
        groups = [(all_jobs, True)]  # the jobs of each pass, and whether it needs gradients
        if count == len(last) or not self.algorithm.objectives:
            groups = [(all_jobs, False)]
        elif count * _SEPARATE >= len(last):
            groups = [(last, False), (~last, True)]
        passes = []
        for mask, needs_gradients in groups:
            for rows in mask.nonzero()[:, 0].split(chunk):
                passes.append((rows, needs_gradients))
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
        order = torch.cat([rows for rows, _ in passes]).argsort().to(points.device)
        return PointEvaluation(
            torch.cat([part.logits for part in parts])[order],
            torch.cat([part.losses for part in parts])[order],
            torch.cat([part.gradients for part in parts], 1)[:, order],
            torch.cat([part.success for part in parts])[order],
        )

    def exact(self, points: Images) -> Logits:
        """Return the logits in the module's precision, without a graph, in the points' dtype."""
        with torch.no_grad(), quick_linear(points.device):
            logits: Tensor = self.model(_pad(points))
        return logits[: len(points)].to(points.dtype)

    def success(self, logits: Logits, jobs: Jobs) -> Bool[Tensor, " batch"]:
        """Return a mask of the points with these logits that are adversarial."""
        if self.targeted:
            return is_target(logits, jobs.targets)
        return is_misclassified(logits, jobs.labels)

    def _without_gradients(self, points: Images, jobs: Jobs) -> PointEvaluation:
        logits = self.exact(points)
        losses = self.algorithm.losses(logits, jobs)
        no_gradients = points.new_zeros(()).expand(losses.shape[1], *points.shape)
        return PointEvaluation(logits, losses, no_gradients, self.success(logits, jobs))

    def _with_gradients(
        self, points: Images, jobs: Jobs, last: Bool[Tensor, " batch"]
    ) -> PointEvaluation:
        """Return the outputs with gradients.

        After a pass in bf16, points that are nearly adversarial, or the last of their job, are
        evaluated again in fp32.
        """
        with autocast(points.device, self.precision):
            is_coarse = torch.is_autocast_enabled(points.device.type)
        alternative = f"attacks that need scores alone work ({without_gradients()})"
        with needing_gradients(self.model, instead=alternative):
            try:
                evaluation = self._differentiate(points, jobs, quick_linear(points.device))
            except CheckpointError:  # a checkpoint's second computation is not quick
                evaluation = self._differentiate(points, jobs, nullcontext())
        logits = evaluation.logits
        if not is_coarse:
            return evaluation
        slack = _BF16_ERROR * logits.abs().amax(1)
        lead = -margin(logits, jobs.targets) if self.targeted else margin(logits, jobs.labels)
        uncertain = ((lead < slack) | last).nonzero()[:, 0]
        if not len(uncertain):
            return evaluation
        logits = logits.index_copy(0, uncertain, self.exact(points[uncertain]))
        uncertain_success = self.success(logits, jobs)[uncertain]
        success = torch.zeros_like(evaluation.success).index_copy(0, uncertain, uncertain_success)
        return replace(evaluation, logits=logits, success=success)

    def _differentiate(
        self, points: Images, jobs: Jobs, quick: AbstractContextManager[None]
    ) -> PointEvaluation:
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
            logits, losses.detach(), torch.stack(gradients), self.success(logits, jobs)
        )


def _pad(points: Images) -> Float[Tensor, "padded 3 height width"]:
    """Return points padded on a CPU with copies of the last image to 1, 2, 4 or a multiple of 8.

    oneDNN caches code and memory for every shape, and a shrinking batch would produce all of them.
    """
    count = len(points)
    size = 1 << (count - 1).bit_length()
    if count > _MULTIPLE // 2:
        size = ceil(count / _MULTIPLE) * _MULTIPLE
    if points.device.type != "cpu" or size == count:
        return points
    return torch.cat((points, points[-1:].expand(size - count, -1, -1, -1)))


class Engine:
    """One attack without members, which runs over the images batch by batch.

    The jobs of an image are numbered by `stage` = level x jobs per level + restart x targets +
    target. A slot of the batch holds the row of an image and its current stage.

    outcome: the outcome of earlier attacks, to which this one adds: an image is attacked only below
        the level at which it is broken already. Raises as the attack's algorithm does.
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
        self.evaluator = Evaluator(model, self.algorithm, plan.precision, plan.targets is not None)
        self.outcome = outcome or nothing_yet(len(clean.labels))
        self.batch_size = plan.batch_size or fitting_batch(model)
        self.targets = 1
        if plan.targets is None:
            self.targets = max(1, min(attack.targets, clean.runners_up.shape[1]))
        self.jobs_per_level = self.targets
        if attack.random_start:
            self.jobs_per_level *= plan.restarts

    def run(self, on_done: OnDone = lambda _: None) -> AttackOutcome:
        """Run all jobs of all images. Raises NonFiniteError naming model and image."""
        level = self.outcome.level
        # number of levels to be tried, from the smallest
        self.limits: list[int] = torch.where(level < 0, len(self.plan.levels), level).tolist()
        attacked_rows = [
            row
            for row, is_correct in enumerate(self.clean.correct.tolist())
            if is_correct and self.limits[row]
        ]
        self.waiting = iter(attacked_rows)
        self.on_done = on_done
        # of each slot: the row of its image, the stage of its job, the queries of the job so far
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
        over = state.get("over", torch.zeros_like(evaluation.success))
        steepest = torch.zeros_like(nearest)
        if evaluation.losses.shape[1]:
            steepest = evaluation.gradients.detach().abs().amax((0, 2, 3, 4))
        is_finite = evaluation.logits.isfinite().all(1)
        # copied to the host in one transfer
        columns = (nearest, evaluation.success, over, is_finite, steepest)
        on_host = torch.stack([column.to(nearest.dtype) for column in columns]).cpu()
        distance, success, over, is_finite, steepest = on_host
        self._count(last, is_finite, steepest)
        ended = over.bool() | last
        if self.is_minimum_norm:
            success = distance.isfinite() & ended
        else:
            success = success.bool()
            ended |= success
        self.queries += 1
        jobs = replace(jobs, queries=jobs.queries + 1)
        hits = success.nonzero()[:, 0]
        if len(hits):
            if self.is_minimum_norm:
                points, distance = self._shorten(hits, jobs, state["best"], distance)
            rows = torch.tensor(self.rows)[hits]
            self.outcome.level[rows] = torch.tensor(self.stages)[hits] // self.jobs_per_level
            self.outcome.distance[rows] = distance[hits].float()
            if self.plan.keep:
                adversarial = points[hits.to(points.device)].to(self.clean.images.device)
                self.outcome.adversarial.update(zip(rows.tolist(), adversarial))
        return self._refill(ended.nonzero()[:, 0].tolist(), success, jobs, state)

    def _count(self, last: Bool[Tensor, " batch"], finite: Tensor, steepest: Tensor) -> None:
        """Count each image's passes, and record if all its gradients were 0.

        Raises NonFiniteError, naming model and image.
        """
        for is_finite, name in ((finite.bool(), "logits"), (steepest.isfinite(), "gradients")):
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
        self.outcome.silent[rows] &= last | (steepest == 0)

    def _shorten(
        self, hits: Int[Tensor, " hits"], jobs: Jobs, adversarial: Tensor, distance: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the adversarial images and their distances, with these slots shortened.

        They are shortened by the line search.
        """
        slots = hits.to(adversarial.device)
        hit_jobs = jobs.select(slots)

        def is_adversarial(points: Points, rows: Int[Tensor, " points"]) -> Bool[Tensor, " points"]:
            return self.evaluator.success(self.evaluator.exact(points), hit_jobs.select(rows))

        nearer = line_search(
            is_adversarial, hit_jobs.clean, adversarial[slots], batch_size=self.batch_size
        )
        self.outcome.forwards[torch.tensor(self.rows)[hits]] += ROUNDS * POINTS
        lengths = self.algorithm.norm.length(nearer - hit_jobs.clean).to(distance)
        return adversarial.index_copy(0, slots, nearer), distance.index_copy(0, hits, lengths)

    def _refill(
        self, slots: Sequence[int], success: Tensor, jobs: Jobs, state: State
    ) -> tuple[Jobs, State]:
        """Fill the slots of ended jobs with the same image's next job, or with the next image."""
        filled = []
        for slot in slots:
            row = self.rows[slot]
            self.stages[slot] = self._next(row, self.stages[slot], bool(success[slot]))
            if self.stages[slot] < 0:
                self.on_done(int(self.outcome.level[row]))
                self.rows[slot] = next(self.waiting, -1)
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
        """Return an image's first stage: at the smallest epsilon, or, downwards, at the largest."""
        if self.plan.downwards and row >= 0:
            return (self.limits[row] - 1) * self.jobs_per_level
        return 0

    def _next(self, row: int, stage: int, success: bool) -> int:
        """Return the next stage of an image; negative: none."""
        level = stage // self.jobs_per_level
        if success:
            return (level - 1) * self.jobs_per_level if self.plan.downwards else -1
        levels = level + 1 if self.plan.downwards else self.limits[row]
        next_stage = stage + 1
        return next_stage if next_stage < levels * self.jobs_per_level else -1

    def _jobs(self, rows: list[int], stages: list[int]) -> Jobs:
        """Return the jobs of these images at these stages."""
        plan = self.plan
        clean = self.clean
        device = self.model.device
        row = torch.tensor(rows, dtype=torch.int64)
        stage = torch.tensor(stages, dtype=torch.int64)
        ranks = stage % self.jobs_per_level % self.targets
        restarts = stage % self.jobs_per_level // self.targets
        runners_up = clean.runners_up[row]
        if plan.targets is None:
            targets = runners_up.gather(1, ranks[:, None])[:, 0]
        else:
            targets = plan.targets[row]
        level = stage // self.jobs_per_level
        epsilon = torch.tensor(plan.levels, dtype=clean.images.dtype)[level]
        return Jobs(
            rows=row.to(device),
            keys=keys(plan.seed, clean.indices[row], restarts, ranks).to(device),
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

    An image is attacked only at the epsilons at which it is still robust. advance: called with the
    number of images just finished, all of them in sum.
    """
    outcome = nothing_yet(len(clean.labels))
    engines = [Engine(model, clean, part, plan, outcome) for part in attack.parts]
    advance(int((~clean.correct).sum()) if plan.levels else len(clean.labels))
    # an image that is broken at the smallest epsilon is not attacked again
    for engine in engines[:-1]:
        engine.run(lambda level: advance(1) if level == 0 else None)
    return engines[-1].run(lambda _: advance(1))


def nothing_yet(count: int) -> AttackOutcome:
    """Return the outcome before any attack."""
    zero = torch.zeros(count, dtype=torch.int64)
    distance = torch.full((count,), torch.inf)
    silent = torch.ones(count, dtype=torch.bool)
    return AttackOutcome(zero - 1, distance, zero.clone(), zero.clone(), silent, {})


def line_search(
    is_adversarial: SuccessTest, clean: Images, adversarial: Images, *, batch_size: int
) -> Images:
    """Return the nearest adversarial images on the lines from clean to adversarial images.

    They are found by a grid search.

    is_adversarial: (points, rows of their images) -> mask.
    batch_size: points per call.

    If no nearer point is adversarial, the adversarial image is returned unchanged, bit for bit.
    """
    change = adversarial - clean
    rows = torch.arange(len(clean), device=clean.device)

    def points_at(rows: Int[Tensor, " points"], shares: Float[Tensor, " points"]) -> Points:
        """Return the points at these shares of the lines; those tested and those returned alike."""
        points: Points = (clean[rows] + per_pixel(shares) * change[rows]).clamp(0, 1)
        return points

    ends = torch.tensor([0.0, 1.0], dtype=clean.dtype, device=clean.device).repeat(len(clean), 1)
    steps = torch.arange(1, POINTS + 1, device=ends.device, dtype=ends.dtype) / (POINTS + 1)
    for _ in range(ROUNDS):
        between = ends[:, :1] + (ends[:, 1:] - ends[:, :1]) * steps
        inner_shares = between.flatten()
        inner_rows = rows.repeat_interleave(POINTS)
        results = []
        for point_rows, point_shares in zip(
            inner_rows.split(batch_size), inner_shares.split(batch_size)
        ):
            results.append(is_adversarial(points_at(point_rows, point_shares), point_rows))
        success = torch.cat(results)
        far_end = torch.ones_like(success[: len(rows), None])  # which is adversarial
        along_line = torch.cat((success.view(-1, POINTS), far_end), 1)
        # argmax returns the first of equal values
        first = along_line.to(torch.uint8).argmax(1, keepdim=True)
        shares = torch.cat((ends[:, :1], between, ends[:, 1:]), 1)
        ends = shares.gather(1, torch.cat((first, first + 1), 1))
    return torch.where(per_pixel(ends[:, 1]) < 1, points_at(rows, ends[:, 1]), adversarial)
