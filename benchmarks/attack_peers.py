"""The same attacks by foolbox, torchattacks and vitlens, on the same images from the same starts;
see attacks.py.
"""

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from vitlens.attacks.attack import sweep
from vitlens.attacks.engine import worst_case
from vitlens.attacks.norms import LINF
from vitlens.attacks.plan import AttackPlan, clean_images, fitting_batch
from vitlens.attacks.registry import ATTACKS
from vitlens.data.catalogue import load_data
from vitlens.data.draws import keys
from vitlens.models import loading
from vitlens.models.model import Model

os.environ.setdefault(
    "GIT_PYTHON_REFRESH", "quiet"
)  # foolbox's zoo wants git, which no attack needs
with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # it reads scipy by an old name
    import foolbox
try:
    import torchattacks
except ImportError:
    torchattacks = None

PEERS = ("foolbox",) if torchattacks is None else ("foolbox", "torchattacks")
PIXELS = tuple(
    epsilon / 255 for epsilon in (0.25, 0.5, 1, 2, 4, 8)
)  # from nearly clean to nothing, on photographs
SCENES = tuple(4 * epsilon for epsilon in PIXELS)  # and on the scenes of digits
LENGTHS = (0.1, 0.2, 0.4, 0.8)
STEPS = 20
SEED = 0
STRIDE = 2.5
CW_STEPS = 100
CW_SEARCHES = 9
Standing = list[Tensor]  # for each epsilon, which images are right and stay so


@dataclass(frozen=True)
class Case:
    """A model and images of which it knows the labels."""

    name: str
    model: Model
    images: Tensor
    labels: Tensor
    epsilons: tuple[float, ...]
    batch: int
    numbers: Tensor  # by which random starts know the images

    @property
    def axis(self) -> str:
        return " / ".join(f"{255 * epsilon:g}" for epsilon in self.epsilons)

    def parts(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield indices, images and labels, batch by batch, on the model's device."""
        for rows in torch.arange(len(self.labels)).split(self.batch):
            images = self.images[rows]
            labels = self.labels[rows]
            yield self.numbers[rows], images.to(self.model.device), labels.to(self.model.device)

    def only(self, rows: Tensor) -> "Case":
        return replace(
            self, images=self.images[rows], labels=self.labels[rows], numbers=self.numbers[rows]
        )

    def correct(self) -> Tensor:
        with torch.no_grad():
            return torch.cat(
                [
                    (self.model(images).argmax(1) == labels).cpu()
                    for _, images, labels in self.parts()
                ]
            )


def case(
    name: str,
    count: int,
    *,
    data: str = "digits",
    device: str = "cpu",
    size: int | None = None,
    epsilons: Sequence[float] = (),
) -> Case:
    """Return a model on data; deit: DeiT-tiny on the photographs of VITLENS_DATA.

    size: of a batch, and epsilons, if not the usual ones.
    """
    if name == "deit":
        folder = Path(os.environ["VITLENS_DATA"])
        weights = folder / "weights" / "deit_tiny_patch16_224.safetensors"
        model = loading.load(f"timm:deit_tiny_patch16_224@{weights}", device=device)
        split = load_data(
            str(folder / "photos"), part="test", whole=True, preprocessing=model.preprocessing
        )
    else:
        model = loading.load(name, device=device)
        split = load_data(data, part="test")
    batch = next(iter(split.limit(count).batches(count)))
    assert batch.labels is not None
    usual = SCENES if data == "digits" and name != "deit" else PIXELS
    return Case(
        model.alias,
        model,
        batch.images,
        batch.labels,
        tuple(epsilons) or usual,
        size or fitting_batch(model),
        torch.arange(len(batch.labels)),
    )


def starts(rows: Tensor, images: Tensor) -> Tensor:
    """Our random starts of these images, in [-1, 1]."""
    nothing = torch.zeros_like(rows)
    return LINF.draw(keys(SEED, rows, nothing, nothing).to(images.device), images)


def by_foolbox(
    case: Case, make: Callable[[Tensor, Tensor], Callable[..., Any]], epsilons: Sequence[float]
) -> Standing:
    """make: an attack for these rows and images."""
    model = foolbox.PyTorchModel(case.model, bounds=(0, 1), device=case.model.device)
    found = []
    for rows, images, labels in case.parts():
        *_, broken = make(rows, images)(model, images, labels, epsilons=list(epsilons))
        found.append(~broken.cpu())
    return kept(case, torch.cat(found, 1))


def on_what_is_left(case: Case, side: str) -> Standing:
    """Return a peer's PGD without attacking again what it broke at a smaller epsilon, which counts
    as broken anyway.
    """
    standing = case.correct()
    found = []
    for epsilon in case.epsilons:
        rows = standing.nonzero()[:, 0]
        if len(rows):
            left = replace(case.only(rows), epsilons=(epsilon,))
            standing = standing.index_copy(0, rows, pgd_sides(left)[side]()[0])
        found.append(standing)
    return found


class Started(foolbox.attacks.LinfProjectedGradientDescentAttack):  # type: ignore[misc]
    """PGD from given starts."""

    start: Tensor

    def get_random_start(self, x0, epsilon):
        return x0 + type(x0)(self.start * epsilon)


def foolbox_pgd(rows: Tensor, images: Tensor) -> Callable[..., Any]:
    attack = Started(rel_stepsize=STRIDE / STEPS, steps=STEPS, random_start=True)
    attack.start = starts(rows, images)
    return attack


def foolbox_cw(case: Case, lengths: Sequence[float], *, searches: int, first_c: float) -> Standing:
    attack = foolbox.attacks.L2CarliniWagnerAttack(
        binary_search_steps=searches, steps=CW_STEPS, stepsize=0.01, initial_const=first_c
    )
    model = foolbox.PyTorchModel(case.model, bounds=(0, 1), device=case.model.device)
    found = []
    for _, images, labels in case.parts():
        adversarial, *_ = attack(
            model, images, labels, epsilons=None
        )  # black where it found nothing
        found.append(withstood(case, adversarial, images, labels, lengths))
    return kept(case, torch.cat(found, 1))


def withstood(
    case: Case, adversarial: Tensor, images: Tensor, labels: Tensor, lengths: Sequence[float]
) -> Tensor:
    """For each length, which images are right when what was found is shortened to it (foolbox's own
    rule).

    A black image was not found by an attack: where it is one, nothing was.
    """
    found = adversarial.flatten(1).amax(1) > 0
    norm = foolbox.distances.l2
    with torch.no_grad():
        shortened = [norm.clip_perturbation(images, adversarial, length) for length in lengths]
        right = [(case.model(short).argmax(1) == labels) | ~found for short in shortened]
    return torch.stack(right).cpu()


def by_torchattacks(
    case: Case, make: Callable[[float], object], epsilons: Sequence[float]
) -> Standing:
    """make: an attack of this epsilon, whose random start is replaced by ours."""
    found = []
    for rows, images, labels in case.parts():
        start = starts(rows, images)
        row = []
        for epsilon in epsilons:
            with patch.object(
                torch.Tensor, "uniform_", lambda _self, _low, high, start=start: start * high
            ):
                adversarial = make(epsilon)(images, labels)  # type: ignore[operator]
            with torch.no_grad():
                row.append((case.model(adversarial).argmax(1) == labels).cpu())
        found.append(torch.stack(row))
    return kept(case, torch.cat(found, 1))


def torchattacks_cw(case: Case, lengths: Sequence[float]) -> Standing:
    """With its one c."""
    found = []
    for _, images, labels in case.parts():
        adversarial = torchattacks.CW(case.model, c=1, kappa=0, steps=CW_STEPS, lr=0.01)(
            images, labels
        )
        found.append(withstood(case, adversarial, images, labels, lengths))
    return kept(case, torch.cat(found, 1))


def kept(case: Case, standing: Tensor) -> Standing:
    """Standing at every epsilon up to each, of those that were right to begin with."""
    return list((standing & case.correct()).cummin(0).values)


def ours(case: Case, attack: str, epsilons: Sequence[float], **options: object) -> Standing:
    found = sweep(
        case.model,
        case.images,
        case.labels,
        AttackPlan(seed=SEED, batch_size=case.batch, **options),  # type: ignore[arg-type]
        attack=attack,
        epsilons=epsilons,
    )
    return [found.robust(epsilon) for epsilon in epsilons]


def our_cw(case: Case, lengths: Sequence[float], *, searches: int, first_c: float) -> Standing:
    clean = clean_images(case.model, case.images, case.labels)
    plan = AttackPlan((1.0,), steps=CW_STEPS, batch_size=case.batch)
    entry = replace(ATTACKS["cw"], options={"searches": searches, "first_c": first_c})
    distance = worst_case(case.model, clean, entry, plan).distance
    return [clean.correct & (distance > length) for length in lengths]


def every_side(one: Case) -> Iterator[tuple[str, str, dict[str, Callable[[], Standing]]]]:
    """Attack, its epsilons, and what runs it on each side."""
    model = one.model
    linf = f"{one.axis} (1/255)"
    l2 = " / ".join(f"{length:g}" for length in LENGTHS) + " (L2)"
    fgsm: dict[str, Callable[[], Standing]] = {
        "ours": lambda: ours(one, "fgsm", one.epsilons),
        "foolbox": lambda: by_foolbox(
            one, lambda *_: foolbox.attacks.LinfFastGradientAttack(), one.epsilons
        ),
    }
    searched: dict[str, Callable[[], Standing]] = {
        "ours": lambda: our_cw(one, LENGTHS, searches=CW_SEARCHES, first_c=1e-3),
        "foolbox": lambda: foolbox_cw(one, LENGTHS, searches=CW_SEARCHES, first_c=1e-3),
    }
    once: dict[str, Callable[[], Standing]] = {
        "ours": lambda: our_cw(one, LENGTHS, searches=1, first_c=1.0),
        "foolbox": lambda: foolbox_cw(one, LENGTHS, searches=1, first_c=1.0),
    }
    if torchattacks is not None:
        fgsm["torchattacks"] = lambda: by_torchattacks(
            one, lambda eps: torchattacks.FGSM(model, eps=eps), one.epsilons
        )
        once["torchattacks"] = lambda: torchattacks_cw(one, LENGTHS)
    yield "FGSM", linf, fgsm
    pgd: dict[str, Callable[[], Standing]] = {
        side: partial(on_what_is_left, one, side) for side in PEERS
    }
    yield f"PGD-{STEPS}", linf, {"ours": pgd_sides(one)["ours"], **pgd}
    yield f"C&W: c = 1, {CW_STEPS} steps", l2, once
    yield f"C&W: {CW_SEARCHES} searches of {CW_STEPS} steps", l2, searched


def pgd_sides(one: Case) -> dict[str, Callable[[], Standing]]:
    """Return the PGD sweep on each side."""
    sides: dict[str, Callable[[], Standing]] = {
        "ours": lambda: ours(one, "pgd", one.epsilons, steps=STEPS),
        "foolbox": lambda: by_foolbox(one, foolbox_pgd, one.epsilons),
    }
    if torchattacks is not None:
        sides["torchattacks"] = lambda: by_torchattacks(
            one,
            lambda eps: torchattacks.PGD(
                one.model, eps=eps, alpha=STRIDE * eps / STEPS, steps=STEPS, random_start=True
            ),
            one.epsilons,
        )
    return sides
