"""The options of `vitlens attack`."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from vitlens.attacks.defaults import COMMAND_ATTACKS, EPSILONS_255, EPSILONS_L2, RESTARTS
from vitlens.attacks.registry import ATTACKS
from vitlens.commands.attack.epsilons import UNIT
from vitlens.commands.scaffold.flags import bundle, option
from vitlens.commands.scaffold.options import (
    ModelOptions,
    RunOptions,
    data_option,
    images_option,
    predicted_option,
    several_models,
)
from vitlens.commands.scaffold.parsing import amounts, count_or_counts, named_amounts, one_of
from vitlens.errors import InputError, UnknownNameError
from vitlens.names import SelfChecks

_MORE, _PATCH = "Beside the curves", "The patch attack"


def _attacks(name: str, text: str) -> tuple[str, ...]:
    return one_of(name, text, tuple(ATTACKS))


@dataclass(frozen=True)
class AttackOptions:
    """All models are attacked on the same images.

    attacks: names of the registry; epsilons: of L∞ attacks, in 1/255, 0 for the clean accuracy; epsilons_l2: of L2
    attacks, in pixel units; single_epsilons: by L∞ attack that is run at one epsilon alone, in 1/255; steps: for all,
    or by attack (None: each attack's default); restarts: of attacks with a random start; downwards: from the largest
    epsilon to the first at which an image is still classified correctly; predicted: use the models' predictions as
    labels; resume: the folder of a stopped run of the same models, data and options; transfer: also test each model on
    the adversarial images of the others; inside: also measure maps, attention and block outputs; corruptions: also
    common corruptions; self_checks: whether every attack is checked in every way, or three checks a model are made;
    baseline: alias of the model to which mean corruption errors are relative (None: the first CNN, else the first
    model); patch_side: px of the patch attack's square (None: a quarter of the shorter side); patch_anywhere: the
    square need not be aligned with a ViT's patches.
    """

    models: tuple[str, ...] = several_models()
    data: str | None = data_option()
    images: tuple[str, ...] = images_option()
    attacks: tuple[str, ...] = option(
        "--attack",
        f"Comma-separated: {', '.join(ATTACKS)}.",
        default=COMMAND_ATTACKS,
        metavar="LIST",
        parse=_attacks,
    )
    epsilons: tuple[float, ...] = option(
        "--epsilon",
        "Of L∞ attacks, in 1/255; 0: the clean accuracy.",
        default=EPSILONS_255,
        metavar="LIST",
        parse=amounts,
    )
    epsilons_l2: tuple[float, ...] = option(
        "--epsilon-l2",
        "Of L2 attacks, distances in pixel units.",
        default=EPSILONS_L2,
        metavar="LIST",
        parse=amounts,
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
    inside: bool = option(
        "--inside/--no-inside", "Maps, attention and block outputs before and after.", default=True, panel=_MORE
    )
    corruptions: bool = option("--corruptions/--no-corruptions", "Also common corruptions.", default=True, panel=_MORE)
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
    model_options: ModelOptions = bundle(ModelOptions)
    run: RunOptions = bundle(RunOptions)

    def __post_init__(self) -> None:
        _require_amounts(self)
        _require_counts(self)
        _require_attacks(self)

    def steps_for(self, attack: str) -> int | None:
        """The number of steps of this attack; None for its default."""
        return self.steps.get(attack) if isinstance(self.steps, Mapping) else self.steps

    def linf_of(self, attack: str) -> tuple[float, ...]:
        """Epsilons of this L∞ attack in pixel units, rising, without 0."""
        single = (self.single_epsilons or {}).get(attack)
        return self.linf if single is None else (single / UNIT,)

    @property
    def linf(self) -> tuple[float, ...]:
        """Epsilons of L∞ attacks in pixel units, rising, without 0."""
        return tuple(sorted({epsilon / UNIT for epsilon in self.epsilons if epsilon > 0}))

    @property
    def l2(self) -> tuple[float, ...]:
        """Epsilons of L2 attacks in pixel units, rising, without 0."""
        return tuple(sorted({epsilon for epsilon in self.epsilons_l2 if epsilon > 0}))


def _require_amounts(options: AttackOptions) -> None:
    """Raise InputError for an epsilon below 0 or above the largest possible change of an image."""
    singles = tuple((options.single_epsilons or {}).values())
    for name, epsilons, most, example in (
        ("--epsilon", options.epsilons, UNIT, EPSILONS_255),
        ("--epsilon-l2", options.epsilons_l2, float("inf"), EPSILONS_L2),
        ("--single-epsilon", singles, UNIT, EPSILONS_255),
    ):
        wrong = [epsilon for epsilon in epsilons if not 0 <= epsilon <= most or epsilon == float("inf")]
        if wrong:
            unit = "of at least 0, in pixel units" if name == "--epsilon-l2" else f"from 0 to {most:g}, in 1/255"
            raise InputError(f"expected {name} {unit}, found {wrong[0]:g}; e.g. {name} {_listed(example)}")


def _require_counts(options: AttackOptions) -> None:
    """Raise InputError for no steps, restarts or patch, and for steps or a patch of an attack that is not run."""
    for name in options.steps if isinstance(options.steps, Mapping) else ():
        if name not in options.attacks:
            known = ", ".join(options.attacks)
            raise InputError(f"expected --steps for attacks of --attack, found {name}; try {known}")
    for steps in _numbers_of_steps(options):
        if steps < 1:
            raise InputError(f"expected --steps of at least 1, found {steps}; leave it out for each attack's own")
    if options.restarts < 1:
        raise InputError(f"expected --restarts of at least 1, found {options.restarts}")
    if options.patch_side is not None and options.patch_side < 1:
        raise InputError(f"expected --patch-side of at least 1 px, found {options.patch_side}")
    patched = any(name in ATTACKS and ATTACKS[name].norm == "patch" for name in options.attacks)
    if not patched and (options.patch_side is not None or options.patch_anywhere):
        raise InputError("expected --patch-side and --patch-anywhere with --attack patch, found them without")


def _numbers_of_steps(options: AttackOptions) -> Iterator[int]:
    if isinstance(options.steps, Mapping):
        yield from options.steps.values()
    elif options.steps is not None:
        yield options.steps


def _require_attacks(options: AttackOptions) -> None:
    """Raise UnknownNameError for an unknown attack, InputError for one without an epsilon above 0, for a single epsilon
    of another attack, and for --downwards where no attack has several epsilons."""
    if not options.attacks:
        raise InputError(f"expected --attack with at least one of {', '.join(ATTACKS)}, found none")
    for name in options.attacks:
        if name not in ATTACKS:
            raise UnknownNameError("attack", name, ATTACKS)
        option_name, epsilons = _epsilons(name, options)
        if not epsilons:
            raise InputError(
                f"expected {option_name} with a number above 0 for {name}, found none; e.g. {option_name} 1,2,4"
            )
    known = [name for name in options.attacks if ATTACKS[name].norm == "linf"]
    for name, epsilon in (options.single_epsilons or {}).items():
        if name not in known or epsilon == 0:
            raise InputError(
                f"expected --single-epsilon above 0 of L∞ attacks of --attack, found {name}={epsilon:g}; "
                f"try {', '.join(known) or 'another --attack'}"
            )
    bounded = [name for name in options.attacks if ATTACKS[name].kind == "budget"]
    if options.downwards and not any(len(_epsilons(name, options)[1]) > 1 for name in bounded):
        names = ", ".join(options.attacks)
        raise InputError(f"expected --downwards with an attack at several epsilons, found {names}; leave it out")


def _epsilons(name: str, options: AttackOptions) -> tuple[str, tuple[float, ...]]:
    """The option for an attack's epsilons, and those above 0; a patch has one size."""
    axes = {"linf": ("--epsilon", options.linf_of(name)), "l2": ("--epsilon-l2", options.l2)}
    return axes.get(ATTACKS[name].norm, ("", (1.0,)))


def _listed(amounts: Sequence[float]) -> str:
    """Numbers as they are typed: "0.25,0.5,1"."""
    return ",".join(f"{amount:g}" for amount in amounts)
