"""Of a run of `vitlens attack`: what changes inside each model for the images that fool it."""

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from vitlens.analysis.robustness.inside import MapAgreement, Shift, cosines, map_agreement, shifts
from vitlens.attacks.registry import ATTACKS
from vitlens.attribution.explain import explain, methods_for, preferred_method
from vitlens.runs.attack_sample import Sample, logits_of, spread
from vitlens.runs.attack_sweep import Work

LOOKED_INTO: Final = 64  # fooled images whose inside is looked at
_ALSO: Final = "rollout"  # beside it, where there is attention: it knows no class
KINDS: Final = ("adversarial", "noise", "another image")


@dataclass(frozen=True)
class Inside:
    """One model on images that fool it: places in the sample (k,), the images before and after, the map's method and
    both maps (k, rows, columns) for the true class, agreements by name, cosines by depth by kind of counterpart, and
    the shifts of attention."""

    places: Tensor
    clean: Tensor
    changed: Tensor
    method: str
    before: Tensor
    after: Tensor
    agreements: dict[str, MapAgreement]
    paths: dict[str, Tensor]
    shifts: tuple[Shift, ...]


def looked_into(work: Work, sample: Sample, which: int) -> Inside | None:
    """What changes inside one model; None where no image of the sample fools it."""
    places = spread(sample.fooled[which].nonzero().flatten(), LOOKED_INTO)
    if not len(places):
        return None
    clean, changed = sample.clean[places], sample.adversarial[which][places]
    truth = work.labels[sample.indices[places]]
    wrong = logits_of(work, changed).argmax(-1)
    model, size = work.model, work.options.batch_size
    method = preferred_method(model)

    def maps(images: Tensor, targets: Tensor, name: str) -> Tensor:
        found = explain(model, images, targets=targets, method=name, batch_size=size, seed=work.options.seed)
        return found.detach().cpu()

    before, after = maps(clean, truth, method), maps(changed, truth, method)
    agreements = {
        f"{method} for the true class": map_agreement(before, after),
        f"{method} for each prediction": map_agreement(before, maps(changed, wrong, method)),
    }
    if _ALSO in methods_for(model) and method != _ALSO:
        agreements[_ALSO] = map_agreement(maps(clean, truth, _ALSO), maps(changed, truth, _ALSO))
    others = {KINDS[0]: changed, KINDS[1]: noisy(clean, changed, ATTACKS[sample.attack].norm, seed=work.options.seed)}
    if len(places) > 1:
        others[KINDS[2]] = clean.roll(len(places) // 2, 0)  # far away in the order, so mostly of another class
    paths = cosines(model, clean, others, batch_size=size)
    moved = shifts(model, clean, changed, batch_size=size)
    return Inside(places, clean, changed, method, before, after, agreements, paths, moved)


def noisy(clean: Tensor, changed: Tensor, norm: str, *, seed: int) -> Tensor:
    """The clean images with random noise as strong as each one's perturbation: what the size of a change does alone."""
    generator = torch.Generator().manual_seed(seed)
    change = changed - clean
    if norm == "linf":
        signs = torch.randint(0, 2, clean.shape, generator=generator) * 2.0 - 1
        return (clean + signs * change.flatten(1).abs().amax(1)[:, None, None, None]).clamp(0, 1)
    noise = torch.randn(clean.shape, generator=generator)
    wanted, drawn = (one.flatten(1).norm(dim=1)[:, None, None, None] for one in (change, noise))
    noisier: Tensor = (clean + noise * wanted / drawn).clamp(0, 1)
    return noisier
