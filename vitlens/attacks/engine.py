"""The engine: a batch that is always full, from which an image leaves as soon as it is fooled or given up.

A job is an image at one epsilon in one try. One that fails is followed by the next try, then by the next larger
epsilon, in the same slot; one that succeeds, or was the image's last, gives its slot to the next image. So the model
only ever looks at images that still stand, and what becomes of an image depends on nothing but itself.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from vitlens.attacks.clean import Clean
from vitlens.attacks.jobs import Jobs, Machine, Seen, State
from vitlens.attacks.line_search import LOOKS, POINTS, line_search
from vitlens.attacks.plan import Outcome, Plan
from vitlens.attacks.reading import Reader, attacked
from vitlens.data.draws import keys
from vitlens.errors import NonFiniteError
from vitlens.models.model import Model

Told = Callable[[int, int], object]  # row of an image that is done, and the level at which it broke (-1: it stands)


class Engine:
    """Runs one machine over the images, batch by batch."""

    def __init__(self, model: Model, clean: Clean, machine: Machine, plan: Plan, told: Told) -> None:
        self.model, self.clean, self.machine, self.plan, self.told = model, clean, machine, plan, told
        self.reader = Reader(model, machine, plan.precision, aimed=plan.targets is not None)
        count = len(clean.labels)
        self.aims = 1 if plan.targets is not None else max(1, min(machine.aims, clean.rivals.shape[1]))
        self.tries = self.aims * (plan.restarts if machine.random else 1)  # at each epsilon
        self.outcome = Outcome(
            torch.full((count,), -1),
            torch.full((count,), torch.inf),
            torch.zeros(count, dtype=torch.int64),
            torch.zeros(count, dtype=torch.int64),
            torch.ones(count, dtype=torch.bool),
            {},
        )
        self.waiting = self._queue()
        self.rows: list[int] = []  # of each slot: its image, how many jobs that had before, the reads of this job
        self.stages: list[int] = []
        self.reads = torch.zeros(0, dtype=torch.int64)

    def run(self) -> Outcome:
        """Every image to its end. Raises NonFiniteError naming model and image."""
        with attacked(self.model), torch.no_grad():
            self.rows = list(islice(self.waiting, self.plan.batch_size))
            self.stages = [self._first(row) for row in self.rows]
            self.reads = torch.zeros(len(self.rows), dtype=torch.int64)
            jobs = self._jobs(self.rows, self.stages)
            state = self.machine.start(jobs) if self.rows else {}
            while self.rows:
                jobs, state = self._round(jobs, state)
        self.outcome.silent.logical_and_(self.outcome.backwards > 0)
        return self.outcome

    def _queue(self) -> Iterator[int]:
        limits = self.plan.limits.tolist()
        return iter([row for row, correct in enumerate(self.clean.correct.tolist()) if correct and limits[row]])

    def _round(self, jobs: Jobs, state: State) -> tuple[Jobs, State]:
        """One look at the model, and what follows from it."""
        last = self.reads == self.machine.reads - 1
        seen = self.reader.read(state["points"], jobs, last)
        points = state["points"]
        state = self.machine.step(jobs, state, seen)
        ended, won, distance = self._told_by(seen, points, jobs, state, last)
        self.reads += 1
        jobs = replace(jobs, reads=jobs.reads + 1)
        slots = ended.nonzero()[:, 0].tolist()
        hits = [slot for slot in slots if won[slot]]
        if hits and self.machine.minimum:
            points, distance = self._drawn_in(hits, jobs, state["best"], distance)
        self._record(hits, distance, points)
        return self._follow(slots, won, jobs, state)

    def _told_by(
        self, seen: Seen, points: Tensor, jobs: Jobs, state: State, last: Bool[Tensor, " batch"]
    ) -> tuple[Bool[Tensor, " batch"], Bool[Tensor, " batch"], Float[Tensor, " batch"]]:
        """Which jobs end, which have won, and how far they went: all that the host must know, brought over at once."""
        nearest = state["nearest"] if self.machine.minimum else self.machine.norm.length(points - jobs.clean)
        steepest = (
            seen.gradients.detach().abs().amax((0, 2, 3, 4)) if seen.losses.shape[1] else torch.zeros_like(nearest)
        )
        over = state.get("over", torch.zeros_like(seen.won))
        packed = (nearest, seen.won, over, seen.logits.isfinite().all(1), steepest)
        distance, won, over, finite, steepest = torch.stack([part.to(nearest.dtype) for part in packed]).cpu()
        self._count(last, finite, steepest)
        if self.machine.minimum:
            ended = over.bool() | last
            return ended, distance.isfinite() & ended, distance
        return won.bool() | over.bool() | last, won.bool(), distance

    def _count(self, last: Bool[Tensor, " batch"], finite: Tensor, steepest: Tensor) -> None:
        """Passes and silence, image by image. Raises NonFiniteError."""
        for good, what in ((finite.bool(), "logits"), (steepest.isfinite(), "gradients")):
            if not good.all():
                row = self.rows[int((~good).nonzero()[0])]
                raise NonFiniteError(
                    f"expected finite {what}, found NaN or infinity from {self.model.alias} on image "
                    f"{int(self.clean.indices[row])} under attack; try --precision fp32, or square, which needs no "
                    "gradients"
                )
        rows = torch.tensor(self.rows)
        self.outcome.forwards[rows] += 1
        self.outcome.backwards[rows] += self.machine.objectives * (~last)
        self.outcome.silent[rows] &= last | (steepest == 0)

    def _drawn_in(self, hits: list[int], jobs: Jobs, found: Tensor, distance: Tensor) -> tuple[Tensor, Tensor]:
        """What was found in these slots, and how far it is, after a search along the line back to the clean image."""
        place = torch.tensor(hits, device=found.device)
        some = jobs.only(place)
        nearer = line_search(
            lambda points, which: self.reader.wins(points, some.only(which)), some.clean, found[place],
            batch_size=self.plan.batch_size,
        )  # fmt: skip
        self.outcome.forwards[torch.tensor([self.rows[slot] for slot in hits])] += LOOKS * POINTS
        lengths = self.machine.norm.length(nearer - some.clean).to(distance)
        return found.index_copy(0, place, nearer), distance.index_copy(0, place.cpu(), lengths)

    def _record(self, hits: list[int], distance: Tensor, images: Tensor) -> None:
        """Write down what broke."""
        if not hits:
            return
        rows = torch.tensor([self.rows[slot] for slot in hits])
        self.outcome.level[rows] = torch.tensor([self.stages[slot] // self.tries for slot in hits])
        self.outcome.distance[rows] = distance[hits].float()
        if self.plan.keep:
            self._keep(rows.tolist(), images[torch.tensor(hits, device=images.device)].to(self.clean.images.device))

    def _keep(self, rows: list[int], images: Tensor) -> None:
        found = self.outcome.found
        found.update(zip(rows, images))
        for row in sorted(found)[self.plan.keep :]:
            del found[row]

    def _follow(self, slots: list[int], won: Tensor, jobs: Jobs, state: State) -> tuple[Jobs, State]:
        """Fill the slots of the jobs that ended: with the same image's next job, or with the next image."""
        filled = []
        for slot in slots:
            row = self.rows[slot]
            self.stages[slot] = self._next(row, self.stages[slot], bool(won[slot]))
            if self.stages[slot] < 0:
                self.told(row, int(self.outcome.level[row]))
                self.rows[slot] = next(self.waiting, -1)
                self.stages[slot] = self._first(self.rows[slot])
            if self.rows[slot] >= 0:
                filled.append(slot)
        if filled:
            fresh = self._jobs([self.rows[slot] for slot in filled], [self.stages[slot] for slot in filled])
            place, start = torch.tensor(filled, device=fresh.rows.device), self.machine.start(fresh)
            self.reads[filled] = 0
            jobs = jobs.placed(place, fresh)
            state = {name: state[name].index_copy(0, place, new) for name, new in start.items()}
        if len(filled) < len(slots):
            left = [slot for slot, row in enumerate(self.rows) if row >= 0]
            jobs, state = self._shrink(left, jobs, state)
        return jobs, state

    def _first(self, row: int) -> int:
        """The stage an image begins with: its first try at its smallest epsilon, or at its largest."""
        return (int(self.plan.limits[row]) - 1) * self.tries if self.plan.downwards and row >= 0 else 0

    def _next(self, row: int, stage: int, won: bool) -> int:
        """The stage that follows; negative: none."""
        level, downwards = stage // self.tries, self.plan.downwards
        if won:
            return (level - 1) * self.tries if downwards else -1
        levels = level + 1 if downwards else int(self.plan.limits[row])
        return stage + 1 if stage + 1 < levels * self.tries else -1

    def _shrink(self, left: list[int], jobs: Jobs, state: State) -> tuple[Jobs, State]:
        self.rows, self.stages = [self.rows[slot] for slot in left], [self.stages[slot] for slot in left]
        self.reads = self.reads[left]
        place = torch.tensor(left, dtype=torch.int64, device=jobs.rows.device)
        return jobs.only(place), {name: value[place] for name, value in state.items()}

    def _jobs(self, rows: list[int], stages: list[int]) -> Jobs:
        """New jobs: the images, and what decides about them."""
        plan, clean, device = self.plan, self.clean, self.model.device
        row, stage = torch.tensor(rows, dtype=torch.int64), torch.tensor(stages, dtype=torch.int64)
        ranks, restarts = stage % self.tries % self.aims, stage % self.tries // self.aims
        rivals = clean.rivals[row]
        aims = rivals.gather(1, ranks[:, None])[:, 0] if plan.targets is None else plan.targets[row]
        levels = torch.tensor(plan.levels, dtype=clean.images.dtype)[stage // self.tries]
        parts = (
            row, keys(plan.seed, clean.indices[row], restarts, ranks), clean.images[row.to(clean.images.device)],
            clean.labels[row], rivals, aims, restarts, levels, torch.zeros_like(row),
        )  # fmt: skip
        return Jobs(*(part.to(device) for part in parts))
