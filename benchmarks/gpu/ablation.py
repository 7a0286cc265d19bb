"""Exact ablation of every head: images a second by precision, compiled or not, and the time for
50,000 images.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Final

import torch
from torch import Tensor

from benchmarks.gpu.machine import PRECISIONS, computing
from benchmarks.gpu.session import Session, Values
from benchmarks.gpu.subjects import Subject, random_labels, small, subject
from benchmarks.gpu.timing import timed
from vitlens.analysis.ablation.bench import Bench
from vitlens.analysis.ablation.outcomes import Outcomes
from vitlens.analysis.ablation.units import units_of
from vitlens.lens.replay import DEFAULT_BUDGET
from vitlens.models.model import Model

TOLERANCE: Final = 1e-4  # fp32, of losses
IMAGES: Final = 50_000
LARGE_BUDGET: Final = 16 << 30  # bytes: everything of a clean pass of 128 images stays on the card


def run(session: Session) -> None:
    """Check, then measure every precision: with the clean pass kept as usual, and kept whole."""
    session.check("loss of 8 images without each of 12 heads", _check, tolerance=TOLERANCE)
    one = subject(session.device, tiny=session.tiny)
    with computing(
        session.device, "fp32"
    ):  # a count, which depends neither on precision nor on the number of images
        forwards = effects_of(one.model, one.images(8)).forward_equivalents
    measured = partial(_case, session, one, forwards)
    for precision in PRECISIONS[::-1]:
        session.case(
            precision, partial(measured, precision, DEFAULT_BUDGET), batch=one.batch, needs=15
        )
    session.case(
        "bf16, all kept", partial(measured, "bf16", LARGE_BUDGET), batch=one.batch, needs=15
    )
    with compiled(one.model, tiny=session.tiny):
        for precision in PRECISIONS[::-1]:
            measure = partial(measured, precision, LARGE_BUDGET)
            session.case(
                f"{precision}, all kept, MLPs and norms compiled",
                measure,
                batch=one.batch,
                needs=45,
            )


def effects_of(model: Model, images: Tensor, *, budget: int = DEFAULT_BUDGET) -> Outcomes:
    """Return every image's loss without each head, as `vitlens.ablate` measures it on one batch."""
    labels = random_labels(model, len(images))
    bench = Bench(model, images, labels, "mean", batch_size=len(images), budget=budget)
    return bench.without([(unit,) for unit in units_of(model, kinds=["head"])])


def _check(device: torch.device) -> Tensor:
    return effects_of(*small(device)).loss


def _case(
    session: Session, one: Subject, forwards: float, precision: str, budget: int, batch: int
) -> Values:
    """Seconds of all heads on one batch, and of its plain forward in the same precision; forwards:
    counted, for all.
    """
    images = one.images(batch)
    repeats = 1 if session.tiny else 3
    found: list[Outcomes] = []

    def ablation() -> None:
        found[:] = [effects_of(one.model, images, budget=budget)]

    @torch.no_grad()
    def forward() -> Tensor:
        logits: Tensor = one.model(images)
        return logits

    with computing(session.device, precision):
        plain = timed(forward, session.device, repeats=3 * repeats)
        all_heads = timed(ablation, session.device, repeats=repeats)
    heads = len(found[0].sets)
    rate = batch / all_heads.seconds
    return {
        "images/s": rate,
        f"{IMAGES:,} images (s)": IMAGES / rate,
        f"{heads} full forwards of as many (s)": heads * IMAGES * plain.seconds / batch,
        "forwards counted": forwards,
        f"PFLOP of {IMAGES:,} images": forwards * one.flops * IMAGES / 1e15,
        "TFLOP/s": forwards * one.flops * rate / 1e12,
        "of peak (bf16, dense)": session.machine.share(forwards * one.flops * rate),
        "plain forward of peak": session.machine.share(one.flops * batch / plain.seconds),
        "peak memory (GB)": None if all_heads.peak is None else all_heads.peak / 1e9,
        "note": found[0].note or "everything kept",
    }


def _unwatched(forward: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Without the modes that watch functions: what they count would be a reason to compile again,
    each time.
    """

    def unwatched(tokens: Tensor) -> Tensor:
        with torch._C.DisableTorchFunction():
            return forward(tokens)

    return unwatched


@contextmanager
def compiled(model: Model, *, tiny: bool = False) -> Iterator[None]:
    """Inside, the norms and MLPs of a ViT's blocks are compiled; not its attention, which the lens
    must see.

    tiny: traced only, without a compiler. Hooks on these modules still run, as only their `forward`
    is replaced; modes that watch functions do not see what is compiled, so that a replay's count of
    multiply-adds is too low.
    """
    parts = [
        module
        for block in (model.module.get_submodule(name) for name in model.anatomy.blocks)
        for name in ("norm1", "norm2", "mlp")
        if isinstance(module := getattr(block, name, None), torch.nn.Module)
    ]
    from torch import _dynamo  # takes seconds

    try:
        for part in parts:
            part.forward = _unwatched(
                torch.compile(part.forward, backend="eager" if tiny else "inductor", dynamic=True)
            )
        with _dynamo.config.patch(recompile_limit=64):  # precisions, modes and numbers of tokens
            yield
    finally:
        for part in parts:
            part.__dict__.pop("forward", None)
