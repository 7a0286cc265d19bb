"""The options of `vitlens attack`."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from vitlens.attacks.registry import (
    ATTACKS,
    COMMAND_ATTACKS,
    EPSILONS_255,
    EPSILONS_L2,
    RESTARTS,
    UNIT,
)
from vitlens.commands.run.flags import choices, option
from vitlens.commands.run.options import (
    ModelsOnImages,
    predicted_option,
    require_models,
    several_models,
)
from vitlens.commands.run.parsing import amounts, count_or_counts, named_amounts
from vitlens.errors import InputError, UnknownNameError
from vitlens.names import SelfChecks

_MORE: Final = "Additional measurements"
_PATCH: Final = "The patch attack"
_EPSILON_OPTION: Final = {"linf": "--epsilon", "l2": "--epsilon-l2"}  # by norm


@dataclass(frozen=True)
class AttackOptions(ModelsOnImages):
    """The options; all models are attacked on the same images.

    attacks: names of the registry.
    single_epsilons: by L∞ attack, in 1/255.
    steps: for all attacks, or by attack (None: the default of each).
    step: the step of PGD, in epsilon / steps (None: 2.5).
    resume: a run with the same models, data and options.
    baseline: an alias (None: the first CNN, else the first model).
    """

    models: tuple[str, ...] = several_models(default=())
    attacks: tuple[str, ...] = choices(
        "--attack",
        f"Comma-separated: {', '.join(ATTACKS)}.",
        ATTACKS,
        default=COMMAND_ATTACKS,
    )
    epsilons: tuple[float, ...] = option(
        "--epsilon",
        "Epsilons of L∞ attacks, in 1/255; 0 is the clean accuracy.",
        default=EPSILONS_255,
        metavar="LIST",
        parse=amounts,
    )
    epsilons_l2: tuple[float, ...] = option(
        "--epsilon-l2",
        "Epsilons of L2 attacks, in pixel units.",
        default=EPSILONS_L2,
        metavar="LIST",
        parse=amounts,
    )
    single_epsilons: Mapping[str, float] | None = option(
        "--single-epsilon",
        "Run these L∞ attacks at one epsilon only: low-frequency=8.",
        default=None,
        metavar="LIST",
        parse=named_amounts,
        shown=False,
    )
    steps: int | Mapping[str, int] | None = option(
        "--steps",
        "Steps of iterative attacks, for all of them or for some: pgd=20,cw=50.",
        default=None,
        metavar="N",
        parse=count_or_counts,
        shown="the default of each attack",
    )
    step: float | None = option(
        "--step",
        "Step size of all PGD attacks, as a multiple of epsilon / steps.",
        default=None,
        metavar="X",
        shown="2.5",
    )
    restarts: int = option(
        "--restarts",
        "Restarts of attacks with a random start.",
        default=RESTARTS,
        metavar="N",
    )
    downwards: bool = option(
        "--downwards",
        "Start at the largest epsilon and stop once an image stays correct: faster, less strict.",
        default=False,
    )
    predicted: bool = predicted_option()
    resume: Path | None = option(
        "--resume",
        "Continue an interrupted run.",
        default=None,
        metavar="FOLDER",
    )
    transfer: bool = option(
        "--transfer/--no-transfer",
        "Test each model on adversarial images of the others.",
        default=True,
        panel=_MORE,
    )
    inside: bool = option(
        "--inside/--no-inside",
        "Compare maps and block outputs before and after the attack.",
        default=True,
        panel=_MORE,
    )
    corruptions: bool = option(
        "--corruptions/--no-corruptions",
        "Also measure common corruptions.",
        default=True,
        panel=_MORE,
    )
    save_images: bool = option(
        "--save-images",
        "Save adversarial images: exact in arrays/, and as PNG, rounded to 8 bits, in "
        "adversarial/.",
        default=False,
        panel=_MORE,
    )
    self_checks: SelfChecks = option(
        "--self-checks",
        "all, or few: gradients, more steps of the strongest attack, one step against many.",
        default="all",
        panel=_MORE,
    )
    baseline: str | None = option(
        "--baseline",
        "Model that mean corruption errors are relative to.",
        default=None,
        metavar="ALIAS",
        shown="the first CNN",
        panel=_MORE,
    )
    patch_side: int | None = option(
        "--patch-side",
        "Side of the square of the patch attack.",
        default=None,
        metavar="PX",
        shown="a quarter of the shorter side",
        panel=_PATCH,
    )
    patch_anywhere: bool = option(
        "--patch-anywhere",
        "Allow squares that are not aligned with the patches of a ViT.",
        default=False,
        panel=_PATCH,
    )

    def __post_init__(self) -> None:
        """Raise InputError for options that no run can have, UnknownNameError for an unknown
        attack.
        """
        require_models(self.models, self.resume)
        self._require_valid_epsilons()
        self._require_attacks()
        self._require_single_epsilons_of_linf_attacks()
        self._require_valid_counts()
        self._require_valid_step()
        self._require_patch_attack()
        self._require_several_epsilons()

    def steps_for(self, attack: str) -> int | None:
        """Return the number of steps of an attack; None for its default."""
        if isinstance(self.steps, Mapping):
            return self.steps.get(attack)
        return self.steps

    def epsilons_of(self, attack: str) -> tuple[float, ...]:
        """Return the epsilons of an attack in pixel units, ascending, without 0.

        The patch attack has one epsilon, as its square has one size.
        """
        norm = ATTACKS[attack].norm
        if norm == "patch":
            return (1.0,)  # not used: the side of the square bounds the attack
        if norm == "l2":
            return self.l2
        single = (self.single_epsilons or {}).get(attack)
        if single is not None:
            return (single / UNIT,)
        return self.linf

    @property
    def linf(self) -> tuple[float, ...]:
        """Return the epsilons of L∞ attacks in pixel units, ascending, without 0."""
        return tuple(sorted({epsilon / UNIT for epsilon in self.epsilons if epsilon > 0}))

    @property
    def l2(self) -> tuple[float, ...]:
        """Return the epsilons of L2 attacks in pixel units, ascending, without 0."""
        return tuple(sorted({epsilon for epsilon in self.epsilons_l2 if epsilon > 0}))

    def _require_valid_epsilons(self) -> None:
        single_epsilons = (self.single_epsilons or {}).values()
        for flag, epsilons in (("--epsilon", self.epsilons), ("--single-epsilon", single_epsilons)):
            for epsilon in epsilons:
                if not 0 <= epsilon <= UNIT:
                    raise InputError(
                        f"expected {flag} from 0 to {UNIT:g}, in 1/255, found {epsilon:g}"
                    )
        for epsilon in self.epsilons_l2:
            if not 0 <= epsilon < math.inf:
                raise InputError(
                    f"expected --epsilon-l2 of at least 0, in pixel units, found {epsilon:g}"
                )

    def _require_attacks(self) -> None:
        """Check that there is an attack, that all are known, and that each has an epsilon."""
        if not self.attacks:
            raise InputError(
                f"expected --attack with at least one of {', '.join(ATTACKS)}, found none"
            )
        for name in self.attacks:
            if name not in ATTACKS:
                raise UnknownNameError("attack", name, ATTACKS)
            if not self.epsilons_of(name):
                flag = _EPSILON_OPTION[ATTACKS[name].norm]
                raise InputError(
                    f"expected {flag} with a number above 0 for {name}, found none; e.g. {flag} "
                    "1,2,4"
                )

    def _require_single_epsilons_of_linf_attacks(self) -> None:
        linf_attacks = [name for name in self.attacks if ATTACKS[name].norm == "linf"]
        suggestion = ", ".join(linf_attacks) or "another --attack"
        for name, epsilon in (self.single_epsilons or {}).items():
            if name not in linf_attacks or epsilon == 0:
                raise InputError(
                    "expected --single-epsilon above 0 of L∞ attacks of --attack, found "
                    f"{name}={epsilon:g}; try {suggestion}"
                )

    def _require_valid_counts(self) -> None:
        """Check the number of steps, of restarts and of pixels of a patch."""
        counts: list[tuple[str, int | None]] = []
        if isinstance(self.steps, Mapping):
            for name, steps in self.steps.items():
                if name not in self.attacks:
                    raise InputError(
                        f"expected --steps for attacks of --attack, found {name}; try "
                        f"{', '.join(self.attacks)}"
                    )
                counts.append(("--steps", steps))
        else:
            counts.append(("--steps", self.steps))
        counts.append(("--restarts", self.restarts))
        counts.append(("--patch-side", self.patch_side))
        for flag, count in counts:
            if count is not None and count < 1:
                raise InputError(
                    f"expected {flag} of at least 1, found {count}; leave it out for the default"
                )

    def _require_valid_step(self) -> None:
        if self.step is None:
            return
        if not 0 < self.step < math.inf:
            raise InputError(
                f"expected --step above 0, in epsilon / steps, found {self.step:g}; e.g. --step 2.5"
            )
        if not any(ATTACKS[name].takes_stride for name in self.attacks):
            able = [name for name, attack in ATTACKS.items() if attack.takes_stride]
            raise InputError(
                f"expected --step with one of {', '.join(able)}, found {', '.join(self.attacks)}; "
                "leave it out"
            )

    def _require_patch_attack(self) -> None:
        """Check that options of the patch attack come with this attack."""
        if any(ATTACKS[name].norm == "patch" for name in self.attacks):
            return
        if self.patch_side or self.patch_anywhere:
            raise InputError(
                "expected --patch-side and --patch-anywhere with --attack patch, found them without"
            )

    def _require_several_epsilons(self) -> None:
        """Check that --downwards has several epsilons to try in that order."""
        if not self.downwards:
            return
        for name in self.attacks:
            if ATTACKS[name].kind == "budget" and len(self.epsilons_of(name)) > 1:
                return
        raise InputError(
            "expected --downwards with an attack at several epsilons, found "
            f"{', '.join(self.attacks)}; leave it out"
        )
