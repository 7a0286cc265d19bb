"""What observing attention costs beside the plain forward, and beside the loops that users of timm
write.
"""

from collections.abc import Callable
from functools import partial
from typing import Final

import torch
from torch import Tensor

from benchmarks.attention_peers import Unfused, chefer, vit_explain
from benchmarks.gpu.machine import computing
from benchmarks.gpu.session import Session, Values
from benchmarks.gpu.subjects import Subject, small, subject
from benchmarks.gpu.timing import alternating
from vitlens.analysis.attention.methods import relevance, rollout
from vitlens.analysis.attention.weights import attention
from vitlens.analysis.heads.statistics import statistics
from vitlens.attribution.explain import explain
from vitlens.models.model import Model

TOLERANCE: Final = 1e-4  # fp32, of maps and statistics, relative to their largest value
BATCH: Final = 64
Job = Callable[[Model, Tensor], object]

JOBS: Final[dict[str, Job]] = {
    "all weights": attention,
    "all statistics": lambda model, images: statistics(model, images, batch_size=len(images)),
    "rollout": rollout,
    "relevance": relevance,
    "recommended map": lambda model, images: explain(
        model, images, method="best", batch_size=len(images)
    ),
}


def run(session: Session) -> None:
    """Run the checks, then every job in fp32 and in bf16."""
    session.check(
        "relevance of 8 images", lambda device: relevance(*small(device)), tolerance=TOLERANCE
    )
    session.check(
        "rollout of 8 images", lambda device: rollout(*small(device)), tolerance=TOLERANCE
    )
    session.check(
        "entropy of every head",
        lambda device: statistics(*small(device)).entropy,
        tolerance=TOLERANCE,
    )
    one = subject(session.device, tiny=session.tiny)
    for precision in ("bf16", "fp32"):
        for name in JOBS:
            batch = one.batch if session.tiny else BATCH
            session.case(
                f"{name}, {precision}",
                partial(_case, session, one, precision, name),
                batch=batch,
                needs=5,
            )


def _case(session: Session, one: Subject, precision: str, name: str, batch: int) -> Values:
    """Return a job, the plain forward and the peer in turns."""
    model = one.model
    images = one.images(batch)

    @torch.no_grad()
    def forward() -> Tensor:
        logits: Tensor = model(images)
        return logits

    jobs: dict[str, Callable[[], object]] = {
        "ours": lambda: JOBS[name](model, images),
        "forward": forward,
    }
    peer = _peer(name, model, images)
    if peer is not None:
        jobs["peer"] = peer
    with computing(session.device, precision):
        found = alternating(jobs, session.device, repeats=1 if session.tiny else 5)
        agreement = None if peer is None else _difference(JOBS[name](model, images), peer())
    ours = found["ours"]
    plain = found["forward"]
    theirs = found.get("peer")
    return {
        "images/s": batch / ours.seconds,
        "seconds": ours.seconds,
        "times a plain forward": ours.seconds / plain.seconds,
        "times the peer": None if theirs is None else ours.seconds / theirs.seconds,
        "largest difference from the peer": agreement,
        "peak memory (GB)": None if ours.peak is None else ours.peak / 1e9,
        "the peer's (GB)": None if theirs is None or theirs.peak is None else theirs.peak / 1e9,
    }


def _peer(name: str, model: Model, images: Tensor) -> Callable[[], object] | None:
    """Return the loop that gives the same on timm's unfused path, or None."""
    if name not in ("all weights", "rollout", "relevance"):
        return None
    unfused = Unfused(model)
    prepared = model.prepare(images)
    if name == "all weights":
        return lambda: unfused.weights(prepared)
    if name == "rollout":
        return lambda: vit_explain(unfused.weights(prepared))
    return lambda: chefer(*unfused.with_gradients(prepared.detach()))


def _difference(ours: object, theirs: object) -> float:
    """Return the largest difference: of maps relative to the peer's largest value, of weights as it
    is.
    """
    if isinstance(ours, Tensor) and isinstance(theirs, Tensor):
        apart = (ours.flatten(1).float() - theirs.float()).abs().max() / theirs.float().abs().max()
        return float(apart)
    assert isinstance(ours, tuple)
    assert isinstance(theirs, list)
    return max(
        float((a.float() - b.float()).abs().max()) for a, b in zip(ours, theirs, strict=True)
    )
