"""What a run of `vitlens attack` asks before it begins: models that can be attacked, and whether it can go on."""

from collections.abc import Mapping, Sequence
from itertools import product

from vitlens.attacks.algorithm import Setting, algorithm_of
from vitlens.attacks.registry import members_of
from vitlens.commands.attack.options import AttackOptions
from vitlens.commands.scaffold.digests import model_digest
from vitlens.commands.scaffold.options import RunOptions
from vitlens.data.split import Split
from vitlens.models.model import Model
from vitlens.processes import Processes


def require_able(models: Sequence[Model], split: Split, options: AttackOptions) -> None:
    """Raise UnsupportedError for a model of too few classes for an attack, InputError for a patch beyond the image."""
    for model, name in product(models, options.attacks):
        for member in members_of(name):
            setting = Setting(1, len(model.classes), split.size, side=options.patch_side)
            algorithm_of(member, setting)


def identity_of(
    models: Sequence[Model], split: Split, options: AttackOptions, processes: Processes, run: RunOptions
) -> dict[str, object]:
    """What must be the same for a stopped run to go on; the images themselves are compared part by part."""
    order = -1 if options.downwards else 1  # epsilons stand in the order in which they are tried
    return {
        "models": [model_digest(model) for model in models],
        "aliases": [model.alias for model in models],
        "images": len(split),
        "attacks": list(options.attacks),
        "epsilons": list(options.linf)[::order],
        "epsilons_l2": list(options.l2)[::order],
        "steps": dict(options.steps) if isinstance(options.steps, Mapping) else options.steps,
        "restarts": options.restarts,
        "patch": [options.patch_side, options.patch_anywhere],
        "seed": run.seed,
        "batch_size": run.batch_size,
        "precision": run.precision,
        "processes": processes.count,
    }
