"""Attention, relevance and statistics compared with other libraries, in one process: job, peer,
ours, ratio, agreement.

    python benchmarks/attention.py [--batch 8] [--repeats 5]  > the table of benchmarks/attention.md

Weights are random: time and memory do not depend on them. Times are medians of alternating runs
after a warm-up, ratios ours over the peer's. Peers: timm's unfused path with hooks on attn_drop,
captum's layer methods, vit-explain's rollout loop and Chefer's relevance, their formulas written
out in attention_peers.py.
"""

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from attention_peers import Unfused, chefer, vit_explain
from captum.attr import LayerActivation, LayerGradientXActivation
from torch import Tensor

from vitlens.analysis.attention.chain import chained
from vitlens.analysis.attention.methods import relevance, rollout
from vitlens.analysis.attention.weights import attention
from vitlens.analysis.heads.statistics import Stream
from vitlens.analysis.heads.statistics import statistics as head_statistics
from vitlens.lens.observe import survey
from vitlens.models import loading
from vitlens.models.model import Model

MODEL = "timm:vit_base_patch16_224"


def timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def side_by_side(
    ours: Callable[[], object], peer: Callable[[], object], repeats: int
) -> tuple[float, float, float]:
    """Median seconds of both, and the median ratio, from alternating runs after one warm-up."""
    ours(), peer()
    pairs = [(timed(ours), timed(peer)) for _ in range(repeats)]
    return *(statistics.median(side) for side in zip(*pairs)), statistics.median(
        a / b for a, b in pairs
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--relevance-batch", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--job")
    options = parser.parse_args()
    if options.job:
        return memory_job(options.job)
    print(
        f"torch {torch.__version__}, {torch.get_num_threads()} threads, {MODEL}, batch "
        f"{options.batch}\n"
    )
    print(
        "| job | peer | ours (s) | peer (s) | ratio | largest difference |\n| --- | --- | ---: | "
        "---: | ---: | ---: |"
    )
    model = loading.load(MODEL, random_weights=True)
    images = torch.rand(options.batch, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    survey(model, images)
    with_peers(model, images, options.repeats)
    many = torch.rand(
        options.relevance_batch, 3, 224, 224, generator=torch.Generator().manual_seed(1)
    )
    of_relevance(model, many, max(3, options.repeats - 2))
    for job in ("stream:64", "stream:512", "long:8"):
        print(f"| peak memory, {JOBS[job]} | | {peak(job):.2f} GB | | | |", flush=True)
    return None


def row(job: str, peer: str, times: tuple[float, float, float], difference: object) -> None:
    ours, theirs, ratio = times
    found = f"{difference:.1e}" if isinstance(difference, float) else str(difference)
    print(f"| {job} | {peer} | {ours:.3f} | {theirs:.3f} | {ratio:.2f} | {found} |", flush=True)


def with_peers(model: Model, images: Tensor, repeats: int) -> None:
    unfused = Unfused(model)
    prepared = model.prepare(images)

    @torch.no_grad()
    def plain() -> Tensor:
        return model(images)

    both = side_by_side(
        lambda: head_statistics(model, images, batch_size=len(images)), plain, repeats
    )
    row("every statistic and offset map of 144 heads", "the plain fused forward", both, "")
    both = side_by_side(
        lambda: attention(model, images), lambda: unfused.weights(prepared), repeats
    )
    pairs = zip(attention(model, images), unfused.weights(prepared))
    row(
        "all weights of all layers",
        "timm unfused, hooks",
        both,
        max((a - b).abs().max().item() for a, b in pairs),
    )
    both = side_by_side(
        lambda: rollout(model, images), lambda: vit_explain(unfused.weights(prepared)), repeats
    )
    apart = (
        (rollout(model, images).flatten(1) - vit_explain(unfused.weights(prepared)))
        .abs()
        .max()
        .item()
    )
    row("rollout, CLS row", "vit-explain's loop on timm unfused", both, apart)
    layers = [block.attn.attn_drop for block in unfused.model.blocks]
    few = prepared[:2]
    target = plain()[:2].argmax(-1)
    activation = LayerActivation(unfused.model, layers)
    product = LayerGradientXActivation(unfused.model, layers, multiply_by_inputs=True)
    found = activation.attribute(few)
    apart = max((a - b).abs().max().item() for a, b in zip(attention(model, images[:2]), found))
    both = side_by_side(
        lambda: attention(model, images[:2]), lambda: activation.attribute(few), repeats
    )
    row("all weights, 2 images", "captum LayerActivation on attn_drop", both, apart)

    def ours() -> list[Tensor]:
        calls = chained(model, images[:2], targets=target, gradient=True).calls
        return [
            call.weights() * gradient
            for call in calls
            if (gradient := call.weight_gradient()) is not None
        ]

    theirs = product.attribute(few, target=target)
    apart = max((a - b).abs().max().item() for a, b in zip(ours(), theirs))
    largest = max(b.abs().max().item() for b in theirs)
    both = side_by_side(ours, lambda: product.attribute(few, target=target), repeats)
    row(
        "gradient x weights of every layer, 2 images",
        "captum LayerGradientXActivation",
        both,
        f"{apart:.1e} of {largest:.1e}",
    )


def of_relevance(model: Model, images: Tensor, repeats: int) -> None:
    unfused = Unfused(model)
    prepared = model.prepare(images)

    @torch.no_grad()
    def forward() -> Tensor:
        return model(images)

    def forward_backward() -> None:
        inputs = images.detach().requires_grad_()
        model(inputs).max(-1).values.sum().backward()

    def peer() -> Tensor:
        return chefer(*unfused.with_gradients(prepared.detach()))

    forward(), forward_backward(), relevance(model, images)
    rounds = [
        (timed(lambda: relevance(model, images)), timed(forward_backward), timed(forward))
        for _ in range(repeats)
    ]
    beyond = statistics.median((whole - base) / one for whole, base, one in rounds)
    whole, base, one = (statistics.median(side) for side in zip(*rounds))
    print(
        f"| relevance, batch of {len(images)} | plain forward and backward | {whole:.2f} | "
        f"{base:.2f} | {whole / base:.2f} | beyond it: {beyond:.2f} forwards of {one:.2f} s |",
        flush=True,
    )
    apart = (relevance(model, images).flatten(1) - peer()).abs().max().item()
    largest = peer().abs().max().item()
    row(
        f"relevance, batch of {len(images)}",
        "Chefer's matrices on timm unfused",
        side_by_side(lambda: relevance(model, images), peer, repeats),
        f"{apart:.1e} of {largest:.1e}",
    )


JOBS = {
    "stream:64": "statistics of 64 images, ViT-B/16",
    "stream:512": "statistics of 512 images, ViT-B/16",
    "long:8": "statistics of 8 images at 518 px, ViT-S/14 (1,370 tokens)",
}


def peak(job: str) -> float:
    """Peak memory in GB of a job in a process of its own."""
    return float(
        subprocess.check_output([sys.executable, __file__, "--job", job], text=True).split()[-1]
    )


def memory_job(job: str) -> None:
    kind, count = job.split(":")
    name, side = (MODEL, 224) if kind == "stream" else ("timm:vit_small_patch14_dinov2", 518)
    stream = Stream(loading.load(name, random_weights=True))
    size = 8 if kind == "stream" else 4
    for _ in range(int(count) // size):
        stream.add(torch.rand(size, 3, side, side))
    stream.result()
    status = Path(
        "/proc/self/status"
    ).read_text()  # getrusage's peak is inherited from the process that started this
    print(int(status.split("VmHWM:")[1].split()[0]) / 1e6)


if __name__ == "__main__":
    main()
