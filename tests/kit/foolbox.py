"""foolbox, started where our attacks start, without its import warnings about scipy."""

import os
import warnings
from types import ModuleType

import torch
from torch import Tensor

from vitlens.attacks.norms import LINF
from vitlens.data.draws import keys
from vitlens.models.model import Model


def foolbox() -> ModuleType:
    os.environ.setdefault("GIT_PYTHON_REFRESH", "quiet")  # its zoo wants git, which no attack needs
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        import foolbox as found
        import foolbox.attacks
    return found


def standing(
    model: Model, images: Tensor, labels: Tensor, attack: object, epsilons: list[float]
) -> list[Tensor]:
    """Return which images are right and stay so, at each epsilon, by foolbox's own verdict."""
    module = foolbox().PyTorchModel(model, bounds=(0, 1), device=model.device)
    _, _, broken = attack(module, images, labels, epsilons=epsilons)  # type: ignore[operator]
    with torch.no_grad():
        correct = model(images).argmax(1) == labels
    return [correct & ~row for row in broken]


def fgsm() -> object:
    return foolbox().attacks.LinfFastGradientAttack()


def pgd(images: Tensor, *, steps: int, seed: int) -> object:
    """Run Foolbox's PGD with steps of 2.5 epsilon / steps from our random starts."""
    module = foolbox()
    indices = torch.arange(len(images))
    start = LINF.draw(
        keys(seed, indices, torch.zeros_like(indices), torch.zeros_like(indices)), images
    )

    class Started(module.attacks.LinfProjectedGradientDescentAttack):  # type: ignore[name-defined,misc]
        def get_random_start(self, x0, epsilon):
            return x0 + type(x0)(start * epsilon)

    return Started(rel_stepsize=2.5 / steps, steps=steps, random_start=True)


def carlini_wagner(*, searches: int, steps: int) -> object:
    return foolbox().attacks.L2CarliniWagnerAttack(
        binary_search_steps=searches,
        steps=steps,
        stepsize=0.01,
        confidence=0,
        initial_const=1e-3,
        abort_early=True,
    )
