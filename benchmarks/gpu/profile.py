"""Where the time of each part goes: how long the card is busy, and with which kernels."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.ablation import LARGE_BUDGET, effects_of
from benchmarks.gpu.attacks import NEVER
from benchmarks.gpu.machine import computing
from benchmarks.gpu.observation import JOBS
from benchmarks.gpu.session import Session, Values
from benchmarks.gpu.subjects import Subject, random_labels, subject
from vitlens.analysis.features.features import features
from vitlens.attacks.attack import sweep
from vitlens.attacks.plan import AttackPlan
from vitlens.models.model import Model

_SHOWN: Final = 5  # kernels
# what a kernel does, by its name; the first that fits
KINDS: Final[Mapping[str, tuple[str, ...]]] = {
    "attention": ("flash", "fmha", "attention", "softmax"),
    "matrix products": (
        "gemm",
        "gemv",
        "cutlass",
        "xmma",
        "nvjet",
        "matmul",
        "addmm",
        "::mm",
        "bmm",
        "linear",
    ),
    "convolutions": ("conv", "cudnn"),
    "copies": ("memcpy", "memset", "copy", "::to", "cat"),
    "sorting": ("sort", "topk", "radix"),
}
OTHER: Final = "elementwise and sums"
LIFTS: Final[Mapping[str, str]] = {
    "idle": "the card waits for the host: larger batches, compilation or CUDA graphs, fewer "
    "synchronisations",
    "attention": "attention kernels: weights asked for less often, or in fewer layers at once",
    "matrix products": "matrix products, which is what should be left: a lower precision, or fewer "
    "of them",
    "convolutions": "convolutions: channels-last, or the patch embedding as a matrix product",
    "copies": "copies: tensors kept on the card and in one dtype",
    "sorting": "sorting: fewer or smaller sorts",
    OTHER: "elementwise kernels: fused by compilation",
}


@dataclass(frozen=True)
class Busy:
    """seconds: of the whole work; kernels: seconds of each on the device, on a CPU of each
    operation itself.
    """

    seconds: float
    kernels: Mapping[str, float]


def run(session: Session) -> None:
    """Every part's main job, once under the profiler."""
    one = subject(session.device, tiny=session.tiny)
    for name, job in _jobs(session).items():
        precision = (
            "fp32" if name.startswith("PGD") else "bf16"
        )  # its gradients are in bf16 by its own option
        session.case(
            name,
            partial(_case, session, one, job, precision),
            batch=max(8, one.batch // 2),
            needs=10,
        )


def _jobs(session: Session) -> dict[str, Callable[[Model, Tensor], object]]:
    @torch.no_grad()
    def forward(model: Model, images: Tensor) -> Tensor:
        logits: Tensor = model(images)
        return logits

    def steps(model: Model, images: Tensor) -> object:
        labels = random_labels(model, len(images))
        with torch.no_grad():
            labels = model(images).argmax(-1)
        count = 3 if session.tiny else 20
        return sweep(
            model,
            images,
            labels,
            AttackPlan(steps=count, precision="bf16", batch_size=len(images)),
            epsilons=NEVER,
        )

    return {
        "plain forward, bf16": forward,
        "ablation of every head, bf16": lambda model, images: effects_of(
            model, images, budget=LARGE_BUDGET
        ),
        **{f"{name}, bf16": job for name, job in JOBS.items()},
        "PGD-20, gradients in bf16": steps,
        "features of the last layer, bf16": lambda model, images: features(
            model, images, layer=-1, batch_size=len(images)
        ),
    }


def _case(
    session: Session,
    one: Subject,
    job: Callable[[Model, Tensor], object],
    precision: str,
    batch: int,
) -> Values:
    images = one.images(batch)
    with computing(session.device, precision):
        job(one.model, images)
        return summary(busy(lambda: job(one.model, images), session.device), session.device)


def busy(work: Callable[[], object], device: torch.device) -> Busy:
    """Return one run of some work under torch's profiler."""
    on_card = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_card else [])]
    with profile(activities=activities) as profiler:
        start = time.perf_counter()
        work()
        if on_card:
            torch.cuda.synchronize(device)
        seconds = time.perf_counter() - start
    kernels: dict[str, float] = {}
    for event in profiler.key_averages():
        found = _own_seconds(event, on_card=on_card)
        if found > 0:
            kernels[event.key] = kernels.get(event.key, 0.0) + found
    return Busy(seconds, kernels)


def _own_seconds(event: Any, *, on_card: bool) -> float:
    """On a card only the kernels themselves: an operation's time on the device is that of its
    kernels again.
    """
    if on_card:
        return (
            event.self_device_time_total / 1e6 if str(event.device_type).endswith("CUDA") else 0.0
        )
    return float(event.self_cpu_time_total) / 1e6


def summary(found: Busy, device: torch.device) -> Values:
    """Shares of the whole time by kind of kernel, the largest kernels, and what would lift the
    largest share.
    """
    shares: dict[str, float] = {}
    for name, seconds in found.kernels.items():
        shares[kind_of(name)] = shares.get(kind_of(name), 0.0) + seconds / found.seconds
    if device.type == "cuda":
        shares["idle"] = max(0.0, 1 - sum(shares.values()))
    ranked = sorted(shares, key=shares.__getitem__, reverse=True)
    largest = sorted(found.kernels, key=found.kernels.__getitem__, reverse=True)[:_SHOWN]
    return {
        "seconds": found.seconds,
        "shares": ", ".join(f"{name} {shares[name]:.0%}" for name in ranked),
        "largest kernels": "; ".join(
            f"{_brief(name)} {found.kernels[name] / found.seconds:.0%}" for name in largest
        ),
        "what would lift it": LIFTS[ranked[0]] if ranked else None,
    }


def kind_of(kernel: str) -> str:
    """Return what a kernel does, by its name."""
    low = kernel.lower()
    return next(
        (kind for kind, words in KINDS.items() if any(word in low for word in words)), OTHER
    )


def _brief(kernel: str) -> str:
    return kernel.replace("|", "/").replace("\n", " ")[:60]
