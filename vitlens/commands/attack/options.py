"""The options of `vitlens attack`."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from vitlens.attacks.registry import ATTACKS, COMMAND_ATTACKS, EPSILONS_255, EPSILONS_L2, RESTARTS, UNIT
from vitlens.commands.run.flags import choices, option
from vitlens.commands.run.options import ModelsOnImages, predicted_option, require_models, several_models
from vitlens.commands.run.parsing import amounts, count_or_counts, named_amounts
from vitlens.errors import InputError, UnknownNameError
from vitlens.names import SelfChecks

_MORE = "Beside the curves"
_PATCH = "The patch attack"


@dataclass(frozen=True)
class AttackOptions(ModelsOnImages):
    """All models are attacked on the same images.

    attacks: names of the registry; single_epsilons: by L∞ attack, in 1/255; steps: for all, or by attack (None: each
    attack's default); step: of PGD, in epsilon / steps (None: 2.5); resume: of the same models, data and options;
    save_images: whether adversarial images are kept; baseline: an alias (None: the first CNN, else the first model).
    """

    models: tuple[str, ...] = several_models(default=())
    attacks: tuple[str, ...] = choices(
        "--attack", f"Comma-separated: {', '.join(ATTACKS)}.", ATTACKS, default=COMMAND_ATTACKS
    )
    epsilons: tuple[float, ...] = option(
        "--epsilon",
        "Of L∞ attacks, in 1/255; 0: the clean accuracy.",
        default=EPSILONS_255,
        metavar="LIST",
        parse=amounts,
    )
    epsilons_l2: tuple[float, ...] = option(
        "--epsilon-l2", "Of L2 attacks, distances in pixel units.", default=EPSILONS_L2, metavar="LIST", parse=amounts
    )
    single_epsilons: Mapping[str, float] | None = option(
        "--single-epsilon",
        "Of L∞ attacks to run at one epsilon alone: low-frequency=8.",
        default=None,
        metavar="LIST",
        parse=named_amounts,
        shown=False,
    )
    steps: int | Mapping[str, int] | None = option(
        "--steps",
        "Of attacks with steps; of some alone: pgd=20,cw=50.",
        default=None,
        metavar="N",
        parse=count_or_counts,
        shown="each attack's own",
    )
    step: float | None = option(
        "--step",
        "Of PGD in all its forms: its step as a multiple of epsilon / steps.",
        default=None,
        metavar="X",
        shown="2.5",
    )
    restarts: int = option("--restarts", "Of attacks with a random start.", default=RESTARTS, metavar="N")
    downwards: bool = option(
        "--downwards",
        "Try the largest epsilon first, down to where an image stays correct: faster, less strict.",
        default=False,
    )
    predicted: bool = predicted_option()
    resume: Path | None = option("--resume", "Go on with a run that was stopped.", default=None, metavar="FOLDER")
    transfer: bool = option(
        "--transfer/--no-transfer", "Test each model on adversarial images of the others.", default=True, panel=_MORE
    )
    inside: bool = option("--inside/--no-inside", "Maps and block outputs before and after.", default=True, panel=_MORE)
    corruptions: bool = option("--corruptions/--no-corruptions", "Also common corruptions.", default=True, panel=_MORE)
    save_images: bool = option(
        "--save-images",
        "Keep adversarial images: exact in arrays/, and as PNG, rounded to 8 bits, in adversarial/.",
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
        "Side of the patch attack's square.",
        default=None,
        metavar="PX",
        shown="a quarter of the shorter side",
        panel=_PATCH,
    )
    patch_anywhere: bool = option(
        "--patch-anywhere", "The square need not be aligned with a ViT's patches.", default=False, panel=_PATCH
    )

    def __post_init__(self) -> None:
        """Raise InputError for options of which no run can be made, UnknownNameError for an unknown attack."""
        require_models(self.models, self.resume)
        singles = self.single_epsilons or {}
        for epsilon in (*self.epsilons, *singles.values()):
            if not 0 <= epsilon <= UNIT:
                option = "--epsilon" if epsilon in self.epsilons else "--single-epsilon"
                raise InputError(f"expected {option} from 0 to {UNIT:g}, in 1/255, found {epsilon:g}")
        for epsilon in self.epsilons_l2:
            if not 0 <= epsilon < float("inf"):
                raise InputError(f"expected --epsilon-l2 of at least 0, in pixel units, found {epsilon:g}")
        if not self.attacks:
            raise InputError(f"expected --attack with at least one of {', '.join(ATTACKS)}, found none")
        for name in self.attacks:
            if name not in ATTACKS:
                raise UnknownNameError("attack", name, ATTACKS)
            if not self.epsilons_of(name):
                typed = {"linf": "--epsilon", "l2": "--epsilon-l2"}[ATTACKS[name].norm]
                raise InputError(f"expected {typed} with a number above 0 for {name}, found none; e.g. {typed} 1,2,4")
        known = ", ".join(self.attacks)
        linf = [name for name in self.attacks if ATTACKS[name].norm == "linf"]
        for name, epsilon in singles.items():
            if name not in linf or epsilon == 0:
                raise InputError(
                    f"expected --single-epsilon above 0 of L∞ attacks of --attack, found {name}={epsilon:g}; "
                    f"try {', '.join(linf) or 'another --attack'}"
                )
        steps = self.steps if isinstance(self.steps, Mapping) else {self.attacks[0]: self.steps}
        for name in steps:
            if name not in self.attacks:
                raise InputError(f"expected --steps for attacks of --attack, found {name}; try {known}")
        counts = [*(("--steps", each) for each in steps.values()), ("--restarts", self.restarts)]
        for option, count in (*counts, ("--patch-side", self.patch_side)):
            if count is not None and count < 1:
                raise InputError(f"expected {option} of at least 1, found {count}; leave it out for the default")
        if self.step is not None and not 0 < self.step < float("inf"):
            raise InputError(f"expected --step above 0, in epsilon / steps, found {self.step:g}; e.g. --step 2.5")
        if self.step is not None and not any(ATTACKS[name].takes_stride for name in self.attacks):
            able = ", ".join(name for name, entry in ATTACKS.items() if entry.takes_stride)
            raise InputError(f"expected --step with one of {able}, found {known}; leave it out")
        if not any(ATTACKS[name].norm == "patch" for name in self.attacks) and (self.patch_side or self.patch_anywhere):
            raise InputError("expected --patch-side and --patch-anywhere with --attack patch, found them without")
        bounded = [name for name in self.attacks if ATTACKS[name].kind == "budget"]
        if self.downwards and all(len(self.epsilons_of(name)) == 1 for name in bounded):
            raise InputError(f"expected --downwards with an attack at several epsilons, found {known}; leave it out")

    def steps_for(self, attack: str) -> int | None:
        """Return the number of steps of this attack; None for its default."""
        return self.steps.get(attack) if isinstance(self.steps, Mapping) else self.steps

    def epsilons_of(self, attack: str) -> tuple[float, ...]:
        """Epsilons of this attack in pixel units, rising, without 0; a patch has one size."""
        single = (self.single_epsilons or {}).get(attack)
        norm = ATTACKS[attack].norm
        if norm == "linf" and single is not None:
            return (single / UNIT,)
        return {"linf": self.linf, "l2": self.l2}.get(norm, (1.0,))

    @property
    def linf(self) -> tuple[float, ...]:
        """Epsilons of L∞ attacks in pixel units, rising, without 0."""
        return tuple(sorted({epsilon / UNIT for epsilon in self.epsilons if epsilon > 0}))

    @property
    def l2(self) -> tuple[float, ...]:
        """Epsilons of L2 attacks in pixel units, rising, without 0."""
        return tuple(sorted({epsilon for epsilon in self.epsilons_l2 if epsilon > 0}))
