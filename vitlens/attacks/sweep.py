"""The smallest epsilon at which an attack succeeds on each image: several attacks, one pass for a whole curve.

An image that is robust at one epsilon is attacked at the next; one on which an attack succeeds counts as broken at
every larger epsilon, so that robust accuracy never rises with epsilon.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from vitlens.attacks.algorithm import Setting
from vitlens.attacks.attack import build_algorithm, fitting_batch, levels_of, setting_of
from vitlens.attacks.checks import require_counts, require_epsilons
from vitlens.attacks.clean import CleanImages, clean_images
from vitlens.attacks.defaults import ATTACK, EPSILONS_L2, EPSILONS_LINF, PRECISION, RESTARTS
from vitlens.attacks.plan import AttackOutcome, AttackPlan
from vitlens.attacks.registry import ATTACKS, Attack, members_of
from vitlens.attacks.sequence import worst_case
from vitlens.errors import InputError
from vitlens.models.model import Model
from vitlens.names import DEFAULT_SEED
from vitlens.pixels import AnyImages, as_parts, takes_images
from vitlens.summary import Summary


@dataclass(frozen=True, repr=False)
class Sweep(Summary):
    """The results of several attacks on n images; mappings are by the attack's name.

    epsilons: of the attack, pixel units (for a patch the share of the image covered); indices: of the images in the
    data set; clean: whether the clean image is classified correctly; broken_at: the smallest epsilon at which the
    attack succeeds, 0 where the clean image is misclassified, infinite where it is robust; distance: of the smallest
    perturbation found, in the attack's norm, infinite where there is none, 0 where the clean image is misclassified;
    kept: rows and adversarial images of the first successes, on the CPU; forwards, backwards: passes through the model;
    seconds; zero_gradients: images all of whose gradients were exactly 0; notes: caveats that belong to the numbers.
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
        """Which images are classified correctly within this epsilon (one of `epsilons`, or slightly more)."""
        return self.clean & (self.broken_at[attack] > epsilon)


@takes_images
def sweep(
    model: Model,
    images: AnyImages,
    labels: Tensor | str | None = None,
    *,
    attacks: Sequence[str] = (ATTACK,),
    epsilons: Sequence[float] = EPSILONS_LINF,
    epsilons_l2: Sequence[float] = EPSILONS_L2,
    steps: int | Mapping[str, int] | None = None,
    restarts: int = RESTARTS,
    seed: int = DEFAULT_SEED,
    batch_size: int | None = None,
    precision: str = PRECISION,
    side: int | None = None,
    aligned: bool = True,
    maps: Tensor | None = None,
    indices: Sequence[int] | None = None,
    keep: int = 0,
    downwards: bool = False,
    on_progress: Callable[[int], object] = lambda _: None,
) -> Sweep:
    """Attack every image at every epsilon, up to the first at which the attack succeeds.

    epsilons: of attacks bounded in L∞, epsilons_l2: of those in L2, pixel units, ascending, 0 allowed; steps: for all
    attacks or by name (None: the default of each); indices: of the images in the data set, which seed the random draws,
    so that the parts of a data set give the same results as the whole; keep: adversarial images to keep of each attack;
    downwards: start at the largest epsilon and stop at the first at which an image is robust, which is then taken to be
    robust at all smaller ones: two to three times as fast where many images are, but wrong where an attack fails only
    at a larger epsilon; on_progress: called with the number of images just finished, images times attacks in all. The
    other arguments and the errors are those of `attack`.
    """
    steps_of = steps if isinstance(steps, Mapping) else {}
    for count in (*steps_of.values(), None if isinstance(steps, Mapping) else steps):
        require_counts(steps=count, restarts=restarts, keep=keep, batch_size=batch_size)
    entries = _require_attacks(attacks)
    axes = {"linf": require_epsilons(epsilons, "linf"), "l2": require_epsilons(epsilons_l2, "l2"), "patch": ()}
    clean = clean_images(model, as_parts(images), labels, indices=indices, batch_size=batch_size)
    setting = setting_of(model, clean, side=side, aligned=aligned, maps=maps)
    base = AttackPlan(
        (), torch.zeros(len(clean.labels), dtype=torch.int64), restarts, None, seed,
        batch_size or fitting_batch(model), precision, keep, downwards,
    )  # fmt: skip
    timed: dict[str, tuple[AttackOutcome, float]] = {}
    levels = {attack.name: levels_of(attack.norm, setting, axes[attack.norm]) for attack in entries}
    for attack in entries:
        count = steps_of.get(attack.name) if isinstance(steps, Mapping) else steps
        start = time.perf_counter()
        outcome = _run(model, clean, attack, levels[attack.name], setting, base, count, on_progress)
        timed[attack.name] = outcome, time.perf_counter() - start
    return _gathered(model, clean, entries, levels, timed)


def _require_attacks(names: Sequence[str]) -> tuple[Attack, ...]:
    """The attacks of these names. Raises UnknownNameError for an unknown one, InputError for none or a repeated one."""
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
    """One attack at its epsilons above 0 (at 0 no image changes); an attack that needs no epsilon runs once."""
    levels = tuple(epsilon for epsilon in epsilons if epsilon > 0) if attack.kind == "budget" else (1.0,)
    algorithms = [build_algorithm(member, setting, steps) for member in members_of(attack.name)]
    limits = torch.full_like(base.limits, len(levels))
    return worst_case(model, clean, algorithms, replace(base, levels=levels, limits=limits), advance=advance)


def _gathered(
    model: Model,
    clean: CleanImages,
    attacks: Sequence[Attack],
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
            for attack in attacks
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
    """The smallest epsilon at which each image breaks; for a minimum-norm attack, the first not below the distance."""
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
    none = torch.empty(0, *clean.images.shape[1:])
    return torch.tensor(rows, dtype=torch.int64), torch.stack(images) if rows else none
