"""The same attacks by foolbox, by torchattacks and by us, on the same images from the same starts; see attacks.py."""

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor

from vitlens.attacks.attack import fitting_batch
from vitlens.attacks.carlini_wagner import carlini_wagner
from vitlens.attacks.clean import look
from vitlens.attacks.engine import Engine, Plan
from vitlens.attacks.norms import LINF
from vitlens.attacks.sweep import sweep
from vitlens.data.catalogue import load_data
from vitlens.data.draws import keys
from vitlens.models import zoo
from vitlens.models.specimen import Specimen

os.environ.setdefault("GIT_PYTHON_REFRESH", "quiet")  # foolbox's zoo wants git, which no attack needs
with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # it reads scipy by an old name
    import foolbox
try:
    import torchattacks
except ImportError:
    torchattacks = None

PEERS = ("foolbox",) if torchattacks is None else ("foolbox", "torchattacks")
PIXELS = tuple(epsilon / 255 for epsilon in (0.25, 0.5, 1, 2, 4, 8))  # from nearly clean to nothing, on photographs
SCENES = tuple(4 * epsilon for epsilon in PIXELS)  # and on the scenes of digits
LENGTHS = (0.1, 0.2, 0.4, 0.8)
STEPS, SEED, STRIDE = 20, 0, 2.5
CW_STEPS, CW_SEARCHES = 100, 9
Standing = list[Tensor]  # for each epsilon, which images are right and stay so


@dataclass(frozen=True)
class Case:
    """A model and images of which it knows the labels."""

    name: str
    specimen: Specimen
    images: Tensor
    labels: Tensor
    epsilons: tuple[float, ...]
    batch: int

    @property
    def axis(self) -> str:
        return " / ".join(f"{255 * epsilon:g}" for epsilon in self.epsilons)

    def parts(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Indices, images and labels, batch by batch, on the specimen's device."""
        for rows in torch.arange(len(self.labels)).split(self.batch):
            yield rows, self.images[rows].to(self.specimen.device), self.labels[rows].to(self.specimen.device)

    def correct(self) -> Tensor:
        with torch.no_grad():
            return torch.cat([(self.specimen(images).argmax(1) == labels).cpu() for _, images, labels in self.parts()])


def case(
    name: str,
    count: int,
    *,
    data: str = "digits",
    device: str = "cpu",
    size: int | None = None,
    epsilons: Sequence[float] = (),
) -> Case:
    """A model on data; deit: DeiT-tiny on the photographs of VITLENS_DATA.

    size: of a batch, and epsilons, if not the usual ones.
    """
    if name == "deit":
        folder = Path(os.environ["VITLENS_DATA"])
        specimen = zoo.load(
            f"timm:deit_tiny_patch16_224@{folder / 'weights' / 'deit_tiny_patch16_224.safetensors'}", device=device
        )
        split = load_data(str(folder / "photos"), part="test", whole=True, preprocessing=specimen.preprocessing)
    else:
        specimen = zoo.load(name, device=device)
        split = load_data(data, part="test")
    batch = next(iter(split.limit(count).batches(count)))
    assert batch.labels is not None
    usual = SCENES if data == "digits" and name != "deit" else PIXELS
    return Case(
        specimen.alias, specimen, batch.images, batch.labels, tuple(epsilons) or usual, size or fitting_batch(specimen)
    )


def starts(rows: Tensor, images: Tensor) -> Tensor:
    """Our random starts of these images, in [-1, 1]."""
    nothing = torch.zeros_like(rows)
    return LINF.draw(keys(SEED, rows, nothing, nothing).to(images.device), images)


def by_foolbox(case: Case, make: Callable[[Tensor, Tensor], object], epsilons: Sequence[float]) -> Standing:
    """make: an attack for these rows and images."""
    model, found = foolbox.PyTorchModel(case.specimen, bounds=(0, 1), device=case.specimen.device), []
    for rows, images, labels in case.parts():
        *_, broken = make(rows, images)(model, images, labels, epsilons=list(epsilons))  # type: ignore[operator]
        found.append(~broken.cpu())
    return kept(case, torch.cat(found, 1))


class Started(foolbox.attacks.LinfProjectedGradientDescentAttack):  # type: ignore[misc]
    """PGD from given starts."""

    start: Tensor

    def get_random_start(self, x0, epsilon):
        return x0 + type(x0)(self.start * epsilon)


def foolbox_pgd(rows: Tensor, images: Tensor) -> object:
    attack = Started(rel_stepsize=STRIDE / STEPS, steps=STEPS, random_start=True)
    attack.start = starts(rows, images)
    return attack


def foolbox_cw(case: Case, lengths: Sequence[float], *, searches: int, first_c: float) -> Standing:
    """As far as its images are within each length: asked for lengths, it would shorten what it found and try again."""
    attack = foolbox.attacks.L2CarliniWagnerAttack(
        binary_search_steps=searches, steps=CW_STEPS, stepsize=0.01, initial_const=first_c
    )
    model, found = foolbox.PyTorchModel(case.specimen, bounds=(0, 1), device=case.specimen.device), []
    for _, images, labels in case.parts():
        adversarial, _, broken = attack(model, images, labels, epsilons=None)
        broken = broken & (adversarial.flatten(1).amax(1) > 0)  # black: nothing found
        found.append(farther(adversarial, images, broken, lengths))
    return kept(case, torch.cat(found, 1))


def farther(adversarial: Tensor, images: Tensor, broken: Tensor, lengths: Sequence[float]) -> Tensor:
    """For each length, which images need more."""
    distance = (adversarial - images).flatten(1).norm(dim=1).masked_fill(~broken, torch.inf)
    return torch.stack([(distance > length).cpu() for length in lengths])


def by_torchattacks(case: Case, make: Callable[[float], object], epsilons: Sequence[float]) -> Standing:
    """make: an attack of this epsilon, whose random start is replaced by ours."""
    found = []
    for rows, images, labels in case.parts():
        start, row = starts(rows, images), []
        for epsilon in epsilons:
            with patch.object(torch.Tensor, "uniform_", lambda _self, _low, high, start=start: start * high):
                adversarial = make(epsilon)(images, labels)  # type: ignore[operator]
            with torch.no_grad():
                row.append((case.specimen(adversarial).argmax(1) == labels).cpu())
        found.append(torch.stack(row))
    return kept(case, torch.cat(found, 1))


def torchattacks_cw(case: Case, lengths: Sequence[float]) -> Standing:
    """With its one c: as far as its images are within each length."""
    found = []
    for _, images, labels in case.parts():
        adversarial = torchattacks.CW(case.specimen, c=1, kappa=0, steps=CW_STEPS, lr=0.01)(images, labels)
        with torch.no_grad():
            broken = case.specimen(adversarial).argmax(1) != labels
        found.append(farther(adversarial, images, broken, lengths))
    return kept(case, torch.cat(found, 1))


def kept(case: Case, standing: Tensor) -> Standing:
    """Standing at every epsilon up to each, of those that were right to begin with."""
    return list((standing & case.correct()).cummin(0).values)


def ours(case: Case, attack: str, epsilons: Sequence[float], **options: object) -> Standing:
    found = sweep(
        case.specimen, case.images, case.labels, attacks=[attack], epsilons=epsilons, seed=SEED,
        batch_size=case.batch, **options,
    )  # type: ignore[arg-type]  # fmt: skip
    return [found.robust(attack, epsilon) for epsilon in epsilons]


def our_cw(case: Case, lengths: Sequence[float], *, searches: int, first_c: float) -> Standing:
    clean = look(case.specimen, case.images, case.labels)
    plan = Plan((1.0,), torch.ones(len(case.labels), dtype=torch.int64), batch_size=case.batch)
    machine = carlini_wagner(steps=CW_STEPS, searches=searches, first_c=first_c)
    distance = Engine(case.specimen, clean, machine, plan, lambda *_: None).run().distance
    return [clean.correct & (distance > length) for length in lengths]


def every_side(one: Case) -> Iterator[tuple[str, str, dict[str, Callable[[], Standing]]]]:
    """Attack, its epsilons, and what runs it on each side."""
    specimen, linf = one.specimen, f"{one.axis} (1/255)"
    l2 = " / ".join(f"{length:g}" for length in LENGTHS) + " (L2)"
    fgsm: dict[str, Callable[[], Standing]] = {
        "ours": lambda: ours(one, "fgsm", one.epsilons),
        "foolbox": lambda: by_foolbox(one, lambda *_: foolbox.attacks.LinfFastGradientAttack(), one.epsilons),
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
            one, lambda eps: torchattacks.FGSM(specimen, eps=eps), one.epsilons
        )
        once["torchattacks"] = lambda: torchattacks_cw(one, LENGTHS)
    yield "FGSM", linf, fgsm
    yield f"PGD-{STEPS}", linf, pgd_sides(one)
    yield f"C&W: c = 1, {CW_STEPS} steps", l2, once
    yield f"C&W: {CW_SEARCHES} searches of {CW_STEPS} steps", l2, searched


def pgd_sides(one: Case) -> dict[str, Callable[[], Standing]]:
    """The PGD sweep on each side."""
    sides: dict[str, Callable[[], Standing]] = {
        "ours": lambda: ours(one, "pgd", one.epsilons, steps=STEPS),
        "foolbox": lambda: by_foolbox(one, foolbox_pgd, one.epsilons),
    }
    if torchattacks is not None:
        sides["torchattacks"] = lambda: by_torchattacks(
            one,
            lambda eps: torchattacks.PGD(
                one.specimen, eps=eps, alpha=STRIDE * eps / STEPS, steps=STEPS, random_start=True
            ),
            one.epsilons,
        )
    return sides
