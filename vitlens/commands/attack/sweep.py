"""Every attack of a run on every image of a model at every epsilon.

The images are attacked in parts. A part that is done is stored, so that a stopped run can resume.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitlens.arrays import Form
from vitlens.attacks.attack import AttackResult, attack, sweep
from vitlens.attacks.plan import AttackPlan, fitting_batch
from vitlens.attacks.registry import ATTACKS, Attack
from vitlens.attacks.robustness import Outcome
from vitlens.commands.attack.options import AttackOptions
from vitlens.commands.run.progress import Advance, ProgressStore
from vitlens.commands.run.resume import batch_digest
from vitlens.commands.run.run import Run
from vitlens.devices import evaluating
from vitlens.models.model import Model

# batches attacked and stored together: the attack refills its queue from all of them
PART_BATCHES = 4
# pixels of a part on a CPU (8 photographs of 224 px), few so that a stopped run loses little
_PART_PIXELS: Final = 400_000

Part = Mapping[str, NDArray[Any]]  # the stored result of one attack on some images


@dataclass(frozen=True)
class Victim:
    """A model that is attacked, with its images.

    labels: (n,), columns of the model's logits.
    outcomes: the outcomes of the attacks, by name; filled by `sweep_all`.
    """

    model: Model
    labels: Tensor
    run: Run[AttackOptions]
    store: ProgressStore
    outcomes: dict[str, Outcome] = field(default_factory=dict)

    @property
    def clean(self) -> Tensor:
        """Return which clean images the model classifies correctly, (n,)."""
        any_outcome = next(iter(self.outcomes.values()))  # `clean` does not depend on the attack
        return any_outcome.clean

    @property
    def batch_size(self) -> int:
        """Return the number of images in a batch."""
        return self.run.run_options.batch_size or fitting_batch(self.model)

    @property
    def part_size(self) -> int:
        """Return the number of images that are attacked, and stored, together."""
        size = PART_BATCHES * self.batch_size
        if self.model.device.type != "cpu":
            return size
        height, width = self.run.split.size
        return min(size, max(1, _PART_PIXELS // (height * width)))

    def images(self, indices: Tensor) -> Tensor:
        """Return the pixels of some images (n, 3, height, width) in [0, 1], on the CPU."""
        pixels = self.run.split.source.read(indices)
        return pixels.float().div_(255)

    def logits(self, images: Tensor) -> Tensor:
        """Return the model's logits for images in fp32, (n, classes), on the CPU."""
        parts = []
        with evaluating(self.model), torch.no_grad():
            for part in images.split(self.batch_size):
                logits = self.model(part.to(self.model.device))
                parts.append(logits.float().cpu())
        return torch.cat(parts)

    def steps_of(self, entry: Attack) -> int:
        """Return the number of steps of an attack; 1 for a single-step attack."""
        if not entry.steps:
            return 1
        return self.run.options.steps_for(entry.name) or entry.steps

    def settings(self, name: str) -> dict[str, Any]:
        """Return the settings of an attack other than its images and epsilons.

        `attack` and AttackPlan take them as keyword arguments.
        """
        options = self.run.options
        run = self.run.run_options
        return {
            "steps": options.steps_for(name),
            "restarts": options.restarts,
            "seed": run.seed,
            "batch_size": self.batch_size,
            "precision": run.precision,
            "side": options.patch_side,
            "aligned": not options.patch_anywhere,
            "stride": options.step,
        }

    def attempt(self, name: str) -> Callable[..., AttackResult]:
        """Return an attack on this model as a function of images, labels and epsilon.

        The patch attack ignores epsilon: the size of the patch bounds it. Further keyword arguments
        replace settings of the run.
        """

        def run_attack(
            images: Tensor, labels: Tensor, *, epsilon: float, **changes: Any
        ) -> AttackResult:
            settings = self.settings(name) | changes
            bound = epsilon if ATTACKS[name].takes_epsilon else None
            return attack(self.model, images, labels, method=name, epsilon=bound, **settings)

        return run_attack

    def sweep_epsilons(
        self,
        name: str,
        indices: Tensor,
        *,
        advance: Advance = lambda _: None,
        **changes: Any,
    ) -> Outcome:
        """Return the outcome of one attack on some images at all its epsilons.

        changes: settings of the plan that replace those of the run.
        """
        plan = AttackPlan(**(self.settings(name) | changes))
        return sweep(
            self.model,
            self.images(indices),
            self.labels[indices],
            plan,
            attack=name,
            epsilons=self.run.options.epsilons_of(name),
            indices=indices.tolist(),
            on_progress=advance,
        )


def sweep_all(victim: Victim) -> None:
    """Run every attack on all images; each process attacks its share of them."""
    run = victim.run
    names = run.options.attacks
    # indices of the images of this process
    share = torch.arange(run.processes.index, len(run.split), run.processes.count)
    title = f"attacking {victim.model.alias}"
    with run.progress(title, len(share) * len(names)) as advance:
        for name in names:
            parts = []
            for start in range(0, len(share), victim.part_size):
                indices = share[start : start + victim.part_size]
                parts.append(_sweep_part(victim, name, start, indices, advance))
            victim.outcomes[name] = _gather(victim, name, parts)


def _sweep_part(victim: Victim, name: str, start: int, indices: Tensor, advance: Advance) -> Part:
    """Return the result of one attack on some images, or its stored result from an interrupted run.

    start: the position of the first image in this process's share, which names the stored part.
    """
    key = f"{victim.model.alias}-{name}-{start}"
    digest = batch_digest(victim.images(indices), victim.labels[indices])
    stored = victim.store.recall(key, digest, _part_forms(len(indices)))
    if stored is not None:
        advance(len(indices))
        return stored
    outcome = victim.sweep_epsilons(
        name, indices, downwards=victim.run.options.downwards, advance=advance
    )
    counts = [outcome.forwards, outcome.backwards, outcome.seconds]
    part = {
        "clean": outcome.clean.cpu().numpy(),
        "broken_at": outcome.broken_at.cpu().double().numpy(),
        "distance": outcome.distance.cpu().double().numpy(),
        "silent": outcome.zero_gradients.cpu().numpy(),  # name in stored parts
        "epsilons": np.array(outcome.epsilons, np.float64),
        "counts": np.array(counts, np.float64),
    }
    victim.store.remember(key, digest, part)
    return part


def _part_forms(images: int) -> dict[str, Form]:
    """Return the forms of the arrays of a stored part."""
    by_image = Form("bf", (images,))
    return {
        "clean": by_image,
        "broken_at": by_image,
        "distance": by_image,
        "silent": by_image,
        "epsilons": Form("f", (None,)),
        "counts": Form("f", (3,)),
    }


def _gather(victim: Victim, name: str, parts: Sequence[Part]) -> Outcome:
    """Return the outcome of an attack on all images, in their order, from the parts of all
    processes.

    parts: those of this process.
    """
    processes = victim.run.processes

    def gather(key: str) -> Tensor:
        values = np.concatenate([part[key] for part in parts])
        return processes.gathered(torch.from_numpy(values))

    clean = gather("clean").bool()
    broken_at = gather("broken_at")
    distance = gather("distance")
    if ATTACKS[name].kind == "minimum":  # its distances are finer than the epsilons
        broken_at = torch.where(clean, distance, torch.zeros_like(broken_at))
    counts_of_process = sum(part["counts"] for part in parts)
    counts = processes.total(torch.from_numpy(counts_of_process))
    forwards, backwards, seconds = counts.tolist()
    return Outcome(
        name=ATTACKS[name].slug,
        alias=victim.model.alias,
        epsilons=tuple(parts[0]["epsilons"].tolist()),
        clean=clean,
        broken_at=broken_at,
        distance=distance,
        zero_gradients=gather("silent").bool(),
        forwards=int(forwards),
        backwards=int(backwards),
        seconds=seconds,
        groups=victim.run.split.groups,
    )
