"""Every attack on every image at every epsilon, in one process or several, resumable."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vitlens.analysis.robustness.curve import Outcome
from vitlens.archives import Form
from vitlens.attacks.attack import fitting_batch
from vitlens.attacks.registry import ATTACKS
from vitlens.attacks.sweep import Sweep, sweep
from vitlens.commands.attack.options import AttackOptions
from vitlens.commands.scaffold.digests import batch_digest
from vitlens.commands.scaffold.options import RunOptions
from vitlens.commands.scaffold.progress.bar import Advance, progress
from vitlens.commands.scaffold.progress.store import ProgressStore
from vitlens.data.split import Split
from vitlens.models.model import Model
from vitlens.processes import Processes

PART_BATCHES = 4  # batches that are attacked, and stored, together: the queue is refilled from all of them


@dataclass(frozen=True)
class ModelAttack:
    """One model with everything that its attacks need. labels: (n,), columns of the model's logits; run: the run
    options of this process."""

    model: Model
    split: Split
    labels: Tensor
    options: AttackOptions
    run: RunOptions
    processes: Processes
    store: ProgressStore

    @property
    def batch_size(self) -> int:
        """Images at a time."""
        return self.run.batch_size or fitting_batch(self.model)

    def images(self, indices: Tensor) -> Tensor:
        """The pixels of these images (n, 3, height, width) in [0, 1], on the CPU."""
        return self.split.source.read(indices).float().div_(255)


@dataclass(frozen=True)
class SweptAttack:
    """The results of one attack on one model, on all images.

    outcome: by epsilon; distance: (n,), of the smallest perturbation found, in the attack's norm; silent: (n,), where
    all gradients that the attack used were zero; forwards, backwards: images passed through the model; seconds: of all
    processes together.
    """

    attack: str
    outcome: Outcome
    distance: Tensor
    silent: Tensor
    forwards: int
    backwards: int
    seconds: float


def sweep_all(work: ModelAttack) -> list[SweptAttack]:
    """Every attack on all images, each process on its share, gathered in the order of the images."""
    share = torch.arange(work.processes.index, len(work.split), work.processes.count)
    names = work.options.attacks
    title = f"attacking {work.model.alias}"
    results = []
    with progress(title, len(share) * len(names), unit="images", quiet=work.run.quiet) as advance:
        for name in names:
            parts = []
            for start in range(0, len(share), PART_BATCHES * work.batch_size):
                indices = share[start : start + PART_BATCHES * work.batch_size]
                parts.append(_part(work, name, start, indices, advance))
            results.append(_gathered(work, name, parts))
    return results


def _part(work: ModelAttack, name: str, start: int, indices: Tensor, advance: Advance) -> dict[str, Tensor]:
    """One attack on some of the images, or its stored result from an earlier attempt."""
    key = f"{work.model.alias}-{name}-{start}"
    digest = batch_digest(work.images(indices), work.labels[indices])
    each = Form("bf", (len(indices),))
    forms = dict.fromkeys(("clean", "broken_at", "distance", "silent"), each)
    forms |= {"epsilons": Form("f", (None,)), "counts": Form("f", (3,))}
    stored = work.store.recall(key, digest, forms)
    if stored is not None:
        advance(len(indices))
        return {field: torch.from_numpy(np.asarray(values)) for field, values in stored.items()}
    result = attempted(work, name, indices, downwards=work.options.downwards, advance=advance)
    counts = (result.forwards[name], result.backwards[name], result.seconds[name])
    part = {
        "clean": result.clean.cpu(),
        "broken_at": result.broken_at[name].cpu().double(),
        "distance": result.distance[name].cpu().double(),
        "silent": result.zero_gradients[name].cpu(),
        "epsilons": torch.tensor(result.epsilons[name], dtype=torch.float64),
        "counts": torch.tensor(counts, dtype=torch.float64),
    }
    work.store.remember(key, digest, {field: values.numpy() for field, values in part.items()})
    return part


def attempted(
    work: ModelAttack,
    name: str,
    indices: Tensor,
    *,
    downwards: bool,
    steps: int | None = None,
    advance: Callable[[int], object] = lambda _: None,
) -> Sweep:
    """One attack on these images at all epsilons; steps: None for those of the options."""
    options, run = work.options, work.run
    return sweep(
        work.model, work.images(indices), work.labels[indices], attacks=(name,), epsilons=options.linf_of(name),
        epsilons_l2=options.l2, steps=steps or options.steps_for(name), restarts=options.restarts, seed=run.seed,
        batch_size=work.batch_size, precision=run.precision, side=options.patch_side,
        aligned=not options.patch_anywhere, indices=indices.tolist(), downwards=downwards, on_progress=advance,
    )  # fmt: skip


def _gathered(work: ModelAttack, name: str, parts: list[dict[str, Tensor]]) -> SweptAttack:
    whole = {
        key: work.processes.gathered(torch.cat([part[key] for part in parts]))
        for key in ("clean", "broken_at", "distance", "silent")
    }
    forwards, backwards, seconds = work.processes.total(torch.stack([part["counts"] for part in parts]).sum(0)).tolist()
    clean, broken_at = whole["clean"].bool(), whole["broken_at"]
    if ATTACKS[name].kind == "minimum":  # its distances are finer than the epsilons
        broken_at = torch.where(clean, whole["distance"], torch.zeros_like(broken_at))
    outcome = Outcome(
        ATTACKS[name].slug, work.model.alias, tuple(parts[0]["epsilons"].tolist()), clean, broken_at,
        work.split.groups,
    )  # fmt: skip
    return SweptAttack(name, outcome, whole["distance"], whole["silent"].bool(), int(forwards), int(backwards), seconds)
