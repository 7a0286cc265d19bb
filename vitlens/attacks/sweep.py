"""The smallest epsilon that breaks each image: several attacks, one pass for a whole curve.

An image that survives one epsilon goes on to the next; one that is broken counts as broken at every larger one, so no
curve rises.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from vitlens.attacks.algorithm import Setting
from vitlens.attacks.attack import built, fitting_batch, levels_of, setting_of
from vitlens.attacks.checks import require_counts, require_epsilons
from vitlens.attacks.clean import CleanImages, clean_images
from vitlens.attacks.defaults import ATTACK, EPSILONS_L2, EPSILONS_LINF, RESTARTS
from vitlens.attacks.plan import AttackOutcome, AttackPlan
from vitlens.attacks.registry import ATTACKS, Attack, members_of
from vitlens.attacks.sequence import worst_case
from vitlens.errors import InputError
from vitlens.models.model import Model
from vitlens.pixels import takes_images
from vitlens.shapes import Images


@dataclass(frozen=True)
class Sweep:
    """What became of n images under each attack; mappings are by its name.

    epsilons: those it was tried at, pixel units (for a patch the share of the image covered); indices: by which the
    images are known; clean: which were right before; broken_at: the smallest epsilon that breaks an image, 0 where it
    was wrong already, infinite where it is robust; distance: of the smallest perturbation found, in the attack's norm,
    infinite where there is none, 0 where it was wrong already; kept: row and adversarial image of the first that broke,
    on the CPU; forwards, backwards: passes through the model; seconds; zero_gradients: images all of whose gradients
    were exactly 0; notes: what must be said beside the numbers.
    """

    attacks: tuple[str, ...]
    epsilons: Mapping[str, tuple[float, ...]]
    indices: Int[Tensor, " n"]
    clean: Bool[Tensor, " n"]
    broken_at: Mapping[str, Float[Tensor, " n"]]
    distance: Mapping[str, Float[Tensor, " n"]]
    kept: Mapping[str, tuple[Int[Tensor, " kept"], Float[Tensor, "kept 3 height width"]]]
    forwards: Mapping[str, int]
    backwards: Mapping[str, int]
    seconds: Mapping[str, float]
    zero_gradients: Mapping[str, Bool[Tensor, " n"]]
    notes: tuple[str, ...] = ()

    def robust(self, attack: str, epsilon: float) -> Bool[Tensor, " n"]:
        """Which images are right, and stay so within this epsilon (one of those tried, or a little more)."""
        return self.clean & (self.broken_at[attack] > epsilon)


@takes_images
def sweep(
    model: Model,
    images: Images,
    labels: Tensor | str | None,
    *,
    attacks: Sequence[str] = (ATTACK,),
    epsilons: Sequence[float] = EPSILONS_LINF,
    epsilons_l2: Sequence[float] = EPSILONS_L2,
    steps: int | Mapping[str, int] | None = None,
    restarts: int = RESTARTS,
    seed: int = 0,
    batch_size: int | None = None,
    precision: str = "fp32",
    side: int | None = None,
    aligned: bool = True,
    maps: Tensor | None = None,
    indices: Sequence[int] | None = None,
    keep: int = 0,
    downwards: bool = False,
    on_progress: Callable[[int], object] = lambda _: None,
) -> Sweep:
    """Attack every image at every epsilon, up to the one that breaks it.

    epsilons: of attacks bounded in L∞, epsilons_l2: of those in L2, pixel units, ascending, 0 allowed; steps: for all
    attacks or by name (None: as many as is usual for each); indices: of the images within the whole, which decide what
    is random, so that parts run apart give what the whole does; keep: adversarial images to keep of each attack;
    downwards: begin with the largest epsilon and end where an image is robust, which is then taken to be so at all
    smaller ones: two to three times as fast where many are, blind to an attack that fails at a larger epsilon alone;
    on_progress: told the number of images just done, which adds up to images times attacks. The rest as in `attack`,
    and the same errors.
    """
    chosen = steps if isinstance(steps, Mapping) else {}
    for count in (*chosen.values(), None if isinstance(steps, Mapping) else steps):
        require_counts(steps=count, restarts=restarts, keep=keep, batch_size=batch_size)
    asked = _require_attacks(attacks)
    axes = {"linf": require_epsilons(epsilons, "linf"), "l2": require_epsilons(epsilons_l2, "l2"), "patch": ()}
    clean = clean_images(model, images, labels, indices=indices, batch_size=batch_size)
    setting = setting_of(model, clean, side=side, aligned=aligned, maps=maps)
    base = AttackPlan(
        (), torch.zeros(len(clean.labels), dtype=torch.int64), restarts, None, seed,
        batch_size or fitting_batch(model), precision, keep, downwards,
    )  # fmt: skip
    timed: dict[str, tuple[AttackOutcome, float]] = {}
    levels = {attack.name: levels_of(attack.norm, setting, axes[attack.norm]) for attack in asked}
    for attack in asked:
        count = chosen.get(attack.name) if isinstance(steps, Mapping) else steps
        start = time.perf_counter()
        outcome = _run(model, clean, attack, levels[attack.name], setting, base, count, on_progress)
        timed[attack.name] = outcome, time.perf_counter() - start
    return _gathered(model, clean, asked, levels, timed)


def _require_attacks(names: Sequence[str]) -> tuple[Attack, ...]:
    """Raise UnknownNameError for no such attack, InputError for none at all or one named twice."""
    for name in names:
        members_of(name)
    if not names or len(set(names)) < len(names):
        raise InputError(f"expected attacks, each once, found {', '.join(names) or 'none'}")
    return tuple(ATTACKS[name] for name in names)


def _run(
    model: Model,
    clean: CleanImages,
    attack: Attack,
    epsilons: tuple[float, ...],
    setting: Setting,
    base: AttackPlan,
    steps: int | None,
    advance: Callable[[int], object],
) -> AttackOutcome:
    """One attack at its epsilons above 0, at which nothing can break; one that needs no epsilon, once."""
    levels = tuple(epsilon for epsilon in epsilons if epsilon > 0) if attack.kind == "budget" else (1.0,)
    algorithms = [built(member, setting, steps) for member in members_of(attack.name)]
    limits = torch.full_like(base.limits, len(levels))
    return worst_case(model, clean, algorithms, replace(base, levels=levels, limits=limits), advance=advance)


def _gathered(
    model: Model,
    clean: CleanImages,
    asked: Sequence[Attack],
    epsilons: Mapping[str, tuple[float, ...]],
    timed: Mapping[str, tuple[AttackOutcome, float]],
) -> Sweep:
    outcomes = {name: outcome for name, (outcome, _) in timed.items()}
    wrong = ~clean.correct
    return Sweep(
        tuple(outcomes),
        epsilons,
        clean.indices,
        clean.correct,
        {
            attack.name: _broken_at(attack, outcomes[attack.name], epsilons[attack.name]).masked_fill(wrong, 0.0)
            for attack in asked
        },
        {name: outcome.distance.masked_fill(wrong, 0.0) for name, outcome in outcomes.items()},
        {name: _kept(outcome, clean) for name, outcome in outcomes.items()},
        {name: int(outcome.forwards.sum()) for name, outcome in outcomes.items()},
        {name: int(outcome.backwards.sum()) for name, outcome in outcomes.items()},
        {name: seconds for name, (_, seconds) in timed.items()},
        {name: outcome.zero_gradients for name, outcome in outcomes.items()},
        clean.notes(model.alias),
    )


def _broken_at(attack: Attack, outcome: AttackOutcome, epsilons: tuple[float, ...]) -> Float[Tensor, " n"]:
    """The smallest of the epsilons that breaks each image; of a smallest perturbation, the first that is no smaller."""
    tried = torch.tensor([epsilon for epsilon in epsilons if epsilon > 0] + [torch.inf], dtype=torch.float64)
    place = outcome.level.where(outcome.level >= 0, len(tried) - 1)
    if attack.kind == "minimum":
        place = torch.searchsorted(tried, outcome.distance.double())
    return tried[place]


def _kept(
    outcome: AttackOutcome, clean: CleanImages
) -> tuple[Int[Tensor, " kept"], Float[Tensor, "kept 3 height width"]]:
    rows = sorted(outcome.adversarial)
    images = [outcome.adversarial[row].cpu() for row in rows]
    return torch.tensor(rows, dtype=torch.int64), torch.stack(images) if rows else clean.images[:0].cpu()
