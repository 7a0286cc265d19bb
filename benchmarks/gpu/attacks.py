"""PGD-20 and C&W sweeps, with gradients in fp32 and in bf16 and fp32 judgement, beside foolbox
where it imports.
"""

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Final

import torch
from torch import Tensor

from benchmarks.gpu.machine import computing
from benchmarks.gpu.session import Session, Values
from benchmarks.gpu.subjects import Subject, small, subject
from benchmarks.gpu.timing import Timed, alternating, timed
from vitlens.attacks.attack import attack, sweep
from vitlens.attacks.plan import AttackPlan, fitting_batch
from vitlens.attacks.registry import ATTACKS
from vitlens.attacks.robustness import Outcome
from vitlens.data.digits import digits
from vitlens.models import loading
from vitlens.models.model import Model

STEPS: Final = 20
SCENES: Final = tuple(epsilon / 255 for epsilon in (1, 2, 4, 8, 16, 32))
LENGTHS: Final = (0.1, 0.2, 0.4, 0.8)
NEVER: Final = (1e-9,)  # no image is broken, so that every step is made
# fp32, of pixels after three steps, of which each is as long whatever the gradient is
TOLERANCE: Final = 1e-3


def run(session: Session) -> None:
    """Run the checks, the sweeps of the bundled ViT, and the rate of steps on ViT-B/16."""
    session.check("pixels of 8 images after 3 steps of PGD-L2", _pixels, tolerance=TOLERANCE)
    model = loading.load("vit-digits", device=session.device)
    count = 4 if session.tiny else 450
    for name in ("pgd", "cw"):
        for precision in ("fp32", "bf16"):
            title = f"{name}, gradients in {precision}, vit-digits"
            session.case(
                title,
                partial(_sweep, session, model, name, precision, count),
                batch=count,
                needs=10,
            )
        title = f"{name}, beside foolbox, vit-digits"
        session.case(
            title, partial(_beside_foolbox, session, model, name, count), batch=count, needs=20
        )
    one = subject(session.device, tiny=session.tiny)
    batch = 4 if session.tiny else fitting_batch(one.model)
    for precision in ("fp32", "bf16"):
        title = f"PGD-{STEPS}, every step, gradients in {precision}"
        session.case(title, partial(_every_step, session, one, precision), batch=batch, needs=10)


def _pixels(device: torch.device) -> Tensor:
    """Return the direction of a gradient without its sign function, which would make a rounding
    error a whole step.
    """
    model, images = small(device)
    found = attack(model, images, "predicted", method="pgd-l2", epsilon=0.5, steps=3).images
    return found.cpu() - images.cpu()


def _scenes(model: Model, count: int) -> tuple[Tensor, Tensor]:
    batch = next(iter(digits("test").limit(count).batches(count)))
    assert batch.labels is not None
    return batch.images.to(model.device), batch.labels.to(model.device)


def _steps(name: str, session: Session) -> int:
    return 3 if session.tiny else STEPS if name == "pgd" else 100


def _epsilons(session: Session) -> tuple[float, ...]:
    return SCENES[3:5] if session.tiny else SCENES


def _swept(
    session: Session, model: Model, name: str, precision: str, images: Tensor, labels: Tensor
) -> Outcome:
    return sweep(
        model,
        images,
        labels,
        AttackPlan(steps=_steps(name, session), batch_size=len(images), precision=precision),
        attack=name,
        epsilons=LENGTHS if ATTACKS[name].norm == "l2" else _epsilons(session),
    )


def _sweep(
    session: Session, model: Model, name: str, precision: str, count: int, batch: int
) -> Values:
    """Images in batches of `batch`; robust accuracy at every epsilon, judged in fp32 whatever the
    gradients are in.
    """
    images, labels = _scenes(model, count)
    found: list[list[Outcome]] = []

    def work() -> None:
        parts = zip(images.split(batch), labels.split(batch))
        found[:] = [[_swept(session, model, name, precision, *part) for part in parts]]

    with computing(session.device, "fp32"):
        time = timed(work, session.device, repeats=1 if session.tiny or name == "cw" else 3)
    return {**_of(time, count), "robust": _robust(session, found[0], name)}


def _robust(session: Session, parts: list[Outcome], name: str) -> str:
    """Return how many images are robust at each epsilon, ascending."""
    epsilons = _epsilons(session) if name == "pgd" else LENGTHS
    return " / ".join(
        str(sum(int(part.robust(epsilon).sum()) for part in parts)) for epsilon in epsilons
    )


def _beside_foolbox(session: Session, model: Model, name: str, count: int, batch: int) -> Values:
    """Return the same sweep by foolbox, in turns: the same step, steps and starts, each epsilon by
    itself.
    """
    peers = _peers()
    if peers is None:
        return {"note": "foolbox is not installed"}
    images, labels = _scenes(model, count)
    case = peers.Case(
        model.alias, model, images, labels, _epsilons(session), batch, torch.arange(count)
    )
    searches = 2 if session.tiny else 9
    sides: dict[str, Callable[[], list[Tensor]]] = {
        "ours": lambda: peers.our_cw(case, LENGTHS, searches=searches, first_c=1e-3),
        "foolbox": lambda: peers.foolbox_cw(case, LENGTHS, searches=searches, first_c=1e-3),
    }
    if name == "pgd":
        every = peers.pgd_sides(case)
        sides = {side: every[side] for side in ("ours", "foolbox")}
    found: dict[str, list[Tensor]] = {}
    jobs = {side: partial(_kept, found, side, work) for side, work in sides.items()}
    before = peers.STEPS, peers.CW_STEPS
    try:
        peers.STEPS = peers.CW_STEPS = _steps(name, session)
        with computing(session.device, "fp32"):
            times = alternating(
                jobs, session.device, repeats=1 if session.tiny or name == "cw" else 2
            )
    finally:
        peers.STEPS, peers.CW_STEPS = before
    ours = times["ours"]
    theirs = times["foolbox"]
    robust = {
        side: " / ".join(str(int(row.sum())) for row in standing)
        for side, standing in found.items()
    }
    return {
        **_of(ours, count),
        "foolbox (s)": theirs.seconds,
        "times foolbox": ours.seconds / theirs.seconds,
        "foolbox's memory (GB)": None if theirs.peak is None else theirs.peak / 1e9,
        "robust": robust["ours"],
        "robust by foolbox": robust["foolbox"],
    }


def _kept(found: dict[str, list[Tensor]], side: str, work: Callable[[], list[Tensor]]) -> None:
    found[side] = work()


def _peers() -> ModuleType | None:
    try:
        from benchmarks import attack_peers
    except ImportError:
        return None
    return attack_peers


def _every_step(session: Session, one: Subject, precision: str, batch: int) -> Values:
    """PGD of an epsilon so small that no image is broken; labels are the predictions."""
    images = one.images(batch)
    with computing(session.device, "fp32"), torch.no_grad():
        labels = one.model(images).argmax(-1)
    found: list[Outcome] = []

    def work() -> None:
        found[:] = [
            sweep(
                one.model,
                images,
                labels,
                AttackPlan(batch_size=batch, precision=precision, steps=_steps("pgd", session)),
                epsilons=NEVER,
            )
        ]

    with computing(session.device, "fp32"):
        time = timed(work, session.device, repeats=1 if session.tiny else 3)
    passes = (
        found[0].forwards + found[0].backwards
    )  # a backward pass to the pixels costs one forward
    return {
        **_of(time, batch),
        "steps of an image/s": batch * _steps("pgd", session) / time.seconds,
        "passes an image": passes / batch,
        "TFLOP/s": passes * one.flops / time.seconds / 1e12,
        "of peak (bf16, dense)": session.machine.share(passes * one.flops / time.seconds),
    }


def _of(time: Timed, images: int) -> Values:
    return {
        "images/s": images / time.seconds,
        "seconds": time.seconds,
        "peak memory (GB)": None if time.peak is None else time.peak / 1e9,
    }
