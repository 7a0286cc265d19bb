"""What a run of `vitlens attack` asks before it begins: attacks that are there, labels, and whether it can go on."""

from collections.abc import Mapping, Sequence
from itertools import product

from vitlens.attacks.algorithm import Setting, algorithm_of
from vitlens.attacks.registry import ATTACKS, members_of
from vitlens.commands.scaffold.digests import model_digest
from vitlens.commands.scaffold.options import RunOptions
from vitlens.data.split import Split
from vitlens.errors import InputError, UnknownNameError
from vitlens.models.model import Model
from vitlens.processes import Processes
from vitlens.runs.attack_choices import AttackChoices, require_sensible


def require_attacks(choices: AttackChoices) -> None:
    """Raise UnknownNameError for an attack that is not there, InputError for one without an epsilon above 0.

    InputError also for an order of epsilons where no attack has several.
    """
    require_sensible(choices)
    if not choices.attacks:
        raise InputError(f"expected --attack with at least one of {', '.join(ATTACKS)}, found none")
    for name in choices.attacks:
        if name not in ATTACKS:
            raise UnknownNameError("attack", name, ATTACKS)
        option, epsilons = _epsilons(name, choices)
        if not epsilons:
            raise InputError(f"expected {option} with a number above 0 for {name}, found none; e.g. {option} 1,2,4")
    bounded = [name for name in choices.attacks if ATTACKS[name].kind == "budget"]
    if choices.downwards and not any(len(_epsilons(name, choices)[1]) > 1 for name in bounded):
        found = ", ".join(choices.attacks)
        raise InputError(f"expected --downwards with an attack at several epsilons, found {found}; leave it out")


def _epsilons(name: str, choices: AttackChoices) -> tuple[str, tuple[float, ...]]:
    """The option that says an attack's epsilons, and those above 0; a patch has one size."""
    axes = {"linf": ("--epsilon", choices.linf), "l2": ("--epsilon-l2", choices.l2)}
    return axes.get(ATTACKS[name].norm, ("", (1.0,)))


def require_able(models: Sequence[Model], split: Split, choices: AttackChoices) -> None:
    """Raise UnsupportedError for a model of too few classes for an attack, InputError for a patch beyond the image."""
    for model, name in product(models, choices.attacks):
        for member in members_of(name):
            setting = Setting(1, len(model.classes), split.size, side=choices.patch_side)
            algorithm_of(member, setting)


def identity_of(
    models: Sequence[Model], split: Split, choices: AttackChoices, processes: Processes, options: RunOptions
) -> dict[str, object]:
    """What must be the same for a stopped run to go on; the images themselves are compared part by part."""
    order = -1 if choices.downwards else 1  # epsilons stand in the order in which they are tried
    return {
        "models": [model_digest(model) for model in models],
        "aliases": [model.alias for model in models],
        "images": len(split),
        "attacks": list(choices.attacks),
        "epsilons": list(choices.linf)[::order],
        "epsilons_l2": list(choices.l2)[::order],
        "steps": dict(choices.steps) if isinstance(choices.steps, Mapping) else choices.steps,
        "restarts": choices.restarts,
        "patch": [choices.patch_side, choices.patch_anywhere],
        "seed": options.seed,
        "batch_size": options.batch_size,
        "precision": options.precision,
        "processes": processes.count,
    }
