"""What `vitlens attack` can be asked for; free of torch, so that the command line can name it at once."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from vitlens.attacks.defaults import COMMAND_ATTACKS, EPSILONS_255, EPSILONS_L2, RESTARTS
from vitlens.attacks.registry import ATTACKS
from vitlens.errors import InputError

UNIT: Final = 255.0  # --epsilon is in 1/255


def listed(amounts: Sequence[float]) -> str:
    """Numbers as they are typed: "0.25,0.5,1"."""
    return ",".join(f"{amount:g}" for amount in amounts)


@dataclass(frozen=True)
class AttackChoices:
    """Which attacks, how strong, and what is looked at beside them.

    attacks: names of the registry; epsilons: of L∞ attacks, in 1/255, 0 for the clean accuracy; epsilons_l2: of L2
    attacks, in pixel units; steps: for all, or by attack; None for each attack's own;
    restarts: of those that start at random; corruptions:
    also everyday damage; transfer: also each model's images shown to the others; inside: also what changes inside;
    predicted: attack what the model predicts, for images without labels; baseline: the model whose errors mean
    corruption errors are relative to, by its alias (None: the first CNN, else the first model); patch_side: px of the
    patch attack's square (None: a quarter of the shorter side); patch_anywhere: it need not lie on a ViT's tokens;
    downwards: from the largest epsilon to the first at which an image stands.
    """

    attacks: tuple[str, ...] = COMMAND_ATTACKS
    epsilons: tuple[float, ...] = EPSILONS_255
    epsilons_l2: tuple[float, ...] = EPSILONS_L2
    steps: int | Mapping[str, int] | None = None
    restarts: int = RESTARTS
    corruptions: bool = True
    transfer: bool = True
    inside: bool = True
    predicted: bool = False
    baseline: str | None = None
    patch_side: int | None = None
    patch_anywhere: bool = False
    downwards: bool = False

    def steps_for(self, attack: str) -> int | None:
        """How many steps were asked of this attack; None for its own."""
        return self.steps.get(attack) if isinstance(self.steps, Mapping) else self.steps

    @property
    def linf(self) -> tuple[float, ...]:
        """Epsilons of L∞ attacks in pixel units, rising, without 0."""
        return tuple(sorted({epsilon / UNIT for epsilon in self.epsilons if epsilon > 0}))

    @property
    def l2(self) -> tuple[float, ...]:
        """Epsilons of L2 attacks in pixel units, rising, without 0."""
        return tuple(sorted({epsilon for epsilon in self.epsilons_l2 if epsilon > 0}))


def require_sensible(choices: AttackChoices) -> None:
    """Raise InputError for an epsilon below 0 or above everything, for no epsilon at all, and for no steps."""
    for option, found, most in (
        ("--epsilon", choices.epsilons, UNIT),
        ("--epsilon-l2", choices.epsilons_l2, float("inf")),
    ):
        wrong = [epsilon for epsilon in found if not 0 <= epsilon <= most or epsilon == float("inf")]
        if wrong:
            unit = f"from 0 to {most:g}, in 1/255" if option == "--epsilon" else "of at least 0, in pixel units"
            raise InputError(f"expected {option} {unit}, found {wrong[0]:g}; e.g. {option} {_EXAMPLES[option]}")
    named = choices.steps if isinstance(choices.steps, Mapping) else {}
    for name in named:
        if name not in choices.attacks:
            known = ", ".join(choices.attacks)
            raise InputError(f"expected --steps for attacks of --attack, found {name}; try {known}")
    for steps in (*named.values(), *(() if named or not isinstance(choices.steps, int) else (choices.steps,))):
        if steps < 1:
            raise InputError(f"expected --steps of at least 1, found {steps}; leave it out for each attack's own")
    if choices.restarts < 1:
        raise InputError(f"expected --restarts of at least 1, found {choices.restarts}")
    if choices.patch_side is not None and choices.patch_side < 1:
        raise InputError(f"expected --patch-side of at least 1 px, found {choices.patch_side}")
    patched = any(name in ATTACKS and ATTACKS[name].norm == "patch" for name in choices.attacks)
    if not patched and (choices.patch_side is not None or choices.patch_anywhere):
        raise InputError("expected --patch-side and --patch-anywhere with --attack patch, found them without")


_EXAMPLES: Final = {"--epsilon": listed(EPSILONS_255), "--epsilon-l2": listed(EPSILONS_L2)}
