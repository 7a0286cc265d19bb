"""The sweep of a run of `vitlens attack`: every attack on every image, in one process or several, resumable."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from vitlens.analysis.robustness.curve import Outcome
from vitlens.archives import Form
from vitlens.attacks.attack import fitting_batch
from vitlens.attacks.registry import ATTACKS
from vitlens.attacks.sweep import Sweep, sweep
from vitlens.commands.scaffold.digests import batch_digest
from vitlens.commands.scaffold.options import RunOptions
from vitlens.commands.scaffold.progress import Advance, progress
from vitlens.data.split import Split
from vitlens.models.model import Model
from vitlens.processes import Processes
from vitlens.runs.attack_choices import AttackChoices
from vitlens.runs.attack_progress import Store

A_PART = 4  # batches that are attacked, and remembered, together: the queue is refilled from all of them


@dataclass(frozen=True)
class Work:
    """What all steps of a run need of one model. labels: (n,), columns of the model's logits."""

    model: Model
    split: Split
    labels: Tensor
    choices: AttackChoices
    processes: Processes
    options: RunOptions
    store: Store

    @property
    def batch_size(self) -> int:
        """Images at a time."""
        return self.options.batch_size or fitting_batch(self.model)

    def images(self, indices: Tensor) -> Tensor:
        """The pixels of these images (n, 3, height, width) in [0, 1], on the CPU."""
        return self.split.source.read(indices).float().div_(255)


@dataclass(frozen=True)
class Swept:
    """What one attack did to one model on all images.

    outcome: by the epsilons it tried; distance: (n,), of the smallest perturbation found, in the attack's norm; silent:
    (n,), where every gradient that was read was zero; forwards, backwards: images put through the model, in all;
    seconds: of attacking, all processes together.
    """

    attack: str
    outcome: Outcome
    distance: Tensor
    silent: Tensor
    forwards: int
    backwards: int
    seconds: float


def swept(work: Work) -> list[Swept]:
    """Every attack of the choices on all images, each process on its share, gathered in the images' order."""
    mine = torch.arange(work.processes.index, len(work.split), work.processes.count)
    names = work.choices.attacks
    title = f"attacking {work.model.alias}"
    with progress(title, len(mine) * len(names), unit="images", quiet=work.options.quiet) as advance:
        found = []
        for name in names:
            parts = []
            for start in range(0, len(mine), A_PART * work.batch_size):
                indices = mine[start : start + A_PART * work.batch_size]
                parts.append(_part(work, name, start, indices, advance))
            found.append(_gathered(work, name, parts))
    return found


def _part(work: Work, name: str, start: int, indices: Tensor, advance: Advance) -> dict[str, Tensor]:
    """One attack on some of the images, or what is remembered of it."""
    images, labels = work.images(indices), work.labels[indices]
    digest = batch_digest(images, labels)
    each = Form("bf", (len(indices),))
    forms = dict.fromkeys(("clean", "broken_at", "distance", "silent"), each)
    forms |= {"epsilons": Form("f", (None,)), "counts": Form("f", (3,))}
    known = work.store.recall(work.model.alias, name, start, digest, forms)
    if known is not None:
        advance(len(indices))
        return known
    result = attempted(work, name, indices, downwards=work.choices.downwards, advance=advance)
    counts = (result.forwards[name], result.backwards[name], result.seconds[name])
    found = {
        "clean": result.clean.cpu(),
        "broken_at": result.broken_at[name].cpu().double(),
        "distance": result.distance[name].cpu().double(),
        "silent": result.zero_gradients[name].cpu(),
        "epsilons": torch.tensor(result.epsilons[name], dtype=torch.float64),
        "counts": torch.tensor(counts, dtype=torch.float64),
    }
    work.store.remember(work.model.alias, name, start, digest, found)
    return found


def attempted(
    work: Work,
    name: str,
    indices: Tensor,
    *,
    downwards: bool,
    steps: int | None = None,
    advance: Callable[[int], object] = lambda _: None,
) -> Sweep:
    """One attack on these images at all epsilons, as the choices have it; steps: None, as many as they say."""
    choices, options = work.choices, work.options
    return sweep(
        work.model, work.images(indices), work.labels[indices], attacks=(name,), epsilons=choices.linf,
        epsilons_l2=choices.l2, steps=steps or choices.steps_for(name), restarts=choices.restarts, seed=options.seed,
        batch_size=work.batch_size, precision=options.precision, side=choices.patch_side,
        aligned=not choices.patch_anywhere, indices=indices.tolist(), downwards=downwards, on_progress=advance,
    )  # fmt: skip


def _gathered(work: Work, name: str, parts: list[dict[str, Tensor]]) -> Swept:
    whole = {
        key: work.processes.gathered(torch.cat([part[key] for part in parts]))
        for key in ("clean", "broken_at", "distance", "silent")
    }
    forwards, backwards, seconds = work.processes.total(torch.stack([part["counts"] for part in parts]).sum(0)).tolist()
    clean, broken_at = whole["clean"].bool(), whole["broken_at"]
    if ATTACKS[name].kind == "minimum":  # its distances say more than the epsilons they lie below
        broken_at = torch.where(clean, whole["distance"], torch.zeros_like(broken_at))
    outcome = Outcome(
        ATTACKS[name].slug, work.model.alias, tuple(parts[0]["epsilons"].tolist()), clean, broken_at,
        work.split.groups,
    )  # fmt: skip
    return Swept(name, outcome, whole["distance"], whole["silent"].bool(), int(forwards), int(backwards), seconds)
