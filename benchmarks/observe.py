"""The cost of observing attention: ViT-B/16 at 224 px, observation and rollout compared with the
plain forward.

    python benchmarks/observe.py [--batch 8] [--repeats 7]

Every figure is a ratio to the plain fused forward, the two in turn, the median of the pairs.
Weights are random: time and memory do not depend on them.
"""

import argparse
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

from vitlens.analysis.attention.methods import rollout
from vitlens.analysis.attention.tokens import rollouts_so_far
from vitlens.analysis.heads.rows import Rows
from vitlens.lens.call import AttentionCall
from vitlens.lens.observe import observe, survey
from vitlens.models import loading


def timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def ratio(
    work: Callable[[], object], base: Callable[[], object], repeats: int
) -> tuple[float, float, float]:
    """Median ratio, and the median seconds of each, from alternating runs after one warm-up."""
    work(), base()
    pairs = [(timed(work), timed(base)) for _ in range(repeats)]
    return statistics.median(a / b for a, b in pairs), *(
        statistics.median(side) for side in zip(*pairs)
    )


def mean_entropy(call: AttentionCall) -> None:
    """The entropy of every head, a few images at a time."""
    for _, part in call.parts():
        Rows(part.weights()).entropy.mean(-1)


def observation(batch: int, repeats: int) -> None:
    model = loading.load("timm:vit_base_patch16_224", random_weights=True)
    images = torch.rand(batch, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    survey(model, images)
    cls = lambda call: call.rows((0,))  # noqa: E731

    @torch.no_grad()
    def plain() -> torch.Tensor:
        return model(images)

    same = torch.equal(plain(), observe(model, images, cls))
    jobs: dict[str, Callable[[], object]] = {
        "CLS row of every layer": lambda: observe(model, images, cls),
        "entropy of every head": lambda: observe(model, images, mean_entropy),
        "rollout, end to end": lambda: rollout(model, images),
    }
    for name, job in jobs.items():
        times, ours, base = ratio(job, plain, repeats)
        print(
            f"{name:28} {ours:8.3f} s   plain {base:8.3f} s   ratio {times:6.3f}   logits "
            f"bit-equal: {same}"
        )


def from_fused(batch: int, repeats: int) -> None:
    """The rollout up to each layer by rows against the textbook's full matrices, from the same
    head-fused weights.
    """
    generator = torch.Generator().manual_seed(0)
    layers = [torch.randn(batch, 197, 197, generator=generator).softmax(-1) for _ in range(12)]
    start = torch.zeros(batch, 197)
    start[:, 0] = 1

    def matrices() -> Tensor:
        product = torch.eye(197).expand(batch, 197, 197)
        for weights in layers:
            product = (weights + torch.eye(197)) / 2 @ product
        return product

    ours = rollouts_so_far(reversed(layers), start)[:, -1]
    full = matrices()[:, 0]
    times, a, b = ratio(lambda: rollouts_so_far(reversed(layers), start), matrices, repeats * 5)
    print(
        f"{'rollout by layer, fused':28} {a:8.4f} s   matrices {b:8.4f} s   ratio {times:6.3f}   "
        f"largest difference {(ours - full).abs().max().item():.1e}"
    )


def peak(job: str) -> float:
    """Peak memory in GB of a job in a process of its own."""
    return float(
        subprocess.check_output([sys.executable, __file__, "--job", job], text=True).split()[-1]
    )


def memory_job(job: str) -> None:
    torch.manual_seed(0)
    kind, count = job.split(":")
    if kind == "stream":  # entropy of every head, in batches of 8
        model = loading.load("timm:vit_base_patch16_224", random_weights=True)
        for _ in range(int(count) // 8):
            observe(model, torch.rand(8, 3, 224, 224), mean_entropy)
    else:  # rollout of a batch of 8 at 518 px: 1,370 tokens
        model = loading.load("timm:vit_small_patch14_dinov2", random_weights=True)
        rollout(model, torch.rand(8, 3, 518, 518), fusion=kind)  # type: ignore[arg-type]
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--job")
    options = parser.parse_args()
    if options.job:
        return memory_job(options.job)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, batch {options.batch}")
    observation(options.batch, options.repeats)
    from_fused(options.batch, options.repeats)
    for job in ("stream:64", "stream:512", "mean:8", "max:8"):
        print(f"peak memory, {job:12} {peak(job):6.2f} GB")
    return None


if __name__ == "__main__":
    main()
