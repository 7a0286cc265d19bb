"""The cost of exact ablation of every head: the replay compared with a loop of full forwards, each
head set to zero.

    python benchmarks/replay.py [--full] [--images 16] [--naive 1]

Layer by layer in alternation: the replay of all its heads, then full forwards for some of them
(--naive a layer), whose mean time is taken for all. Every figure is a ratio to the full forwards in
fp32. Weights are random: time and memory do not depend on them. The default takes some minutes;
--full is the measurement of ablation.md (64 images for ViT-B/16, 1,000 for vit-tiny), about half an
hour on 2 cores.
"""

import argparse
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from vitlens.devices import autocast
from vitlens.lens.attention import projection_of
from vitlens.lens.replay import Replay, replaying
from vitlens.lens.trace import Layer, layers
from vitlens.models import loading
from vitlens.models.model import Model

MUST = {("vit-base", "fp32"): 0.5, ("vit-tiny", "fp32"): 0.55, ("vit-base", "bf16"): 0.25}
MODELS = {"vit-base": "timm:vit_base_patch16_224", "vit-tiny": "vit-tiny"}


@contextmanager
def cut(model: Model, layer: Layer, head: int) -> Iterator[None]:
    """One head set to zero as one would by hand: a hook on the output projection."""

    def zero(_module: object, inputs: tuple[Tensor, ...]) -> Tensor:
        changed = inputs[0].clone()
        changed[..., head * layer.head_dim : (head + 1) * layer.head_dim] = 0
        return changed

    projection = projection_of(model, layer.attention)
    assert projection is not None
    handle = projection.register_forward_pre_hook(zero)
    try:
        yield
    finally:
        handle.remove()


@torch.no_grad()
def naive(model: Model, images: Tensor, layer: Layer, head: int) -> Tensor:
    with cut(model, layer, head):
        return model(images)


def sweep(
    model: Model, images: Tensor, precision: str, some: int, chunk: int | None
) -> tuple[Replay, float, float, float]:
    """Return the replay, its seconds, the seconds of full forwards for all heads, and the largest
    difference of logits.
    """
    ours = full = largest = 0.0
    forwards = heads = 0
    start = time.perf_counter()
    with autocast(images.device, precision), replaying(model, images, chunk=chunk) as replay:
        ours += time.perf_counter() - start
        for layer in layers(model):
            sets = [{f"blocks.{layer.index}.head.{head}": "zero"} for head in range(layer.heads)]
            start = time.perf_counter()
            logits = replay.run(sets)
            ours += time.perf_counter() - start
            heads += layer.heads
            for head in range(0, layer.heads, -(-layer.heads // some)):
                start = time.perf_counter()
                with torch.autocast(images.device.type, enabled=False):
                    expected = naive(model, images, layer, head)
                full += time.perf_counter() - start
                forwards += 1
                largest = max(largest, (logits[head] - expected).abs().max().item())
        return replay, ours, full / forwards * heads, largest


def job(module: str, precision: str, options: argparse.Namespace) -> None:
    count = (
        options.images
        or {"vit-base": 64 if options.full else 16, "vit-tiny": 1000 if options.full else 256}[
            module
        ]
    )
    model = loading.load(MODELS[module], random_weights=True)
    images = torch.rand(count, 3, *model.input_size, generator=torch.Generator().manual_seed(0))
    start = time.perf_counter()
    with replaying(
        model, images[:1]
    ) as first:  # reads the model and checks itself, once for each model
        checked = time.perf_counter() - start
        assert first.exact, first.note
    naive(model, images, layers(model)[0], 0)
    replay, ours, full, largest = sweep(model, images, precision, options.naive, options.chunk)
    must = MUST.get((module, precision))
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    heads = sum(layer.heads for layer in layers(model))
    bound = "" if must is None else f" (must be {must})"
    print(
        f"{module:9} {precision}  {count:4} images, {heads} heads   replay {ours:7.1f} s   ", end=""
    )
    print(f"full forwards {full:7.1f} s   ratio {ours / full:5.3f}{bound}   ", end="")
    print(
        f"counted {replay.forward_equivalents / heads:5.3f}   largest difference {largest:.1e}   ",
        end="",
    )
    print(f"peak {memory:.2f} GB   once: {checked:.1f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--images", type=int)
    parser.add_argument(
        "--naive",
        type=int,
        default=1,
        help="full forwards a layer, whose mean time is taken for all",
    )
    parser.add_argument("--chunk", type=int)
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--job", nargs=2)
    options = parser.parse_args()
    if options.job:
        return job(*options.job, options)
    print(
        f"torch {torch.__version__}, {torch.get_num_threads()} threads; full forwards in fp32, "
        f"{options.naive} a layer"
    )
    for model, precision in (
        ("vit-base", "fp32"),
        ("vit-base", "bf16"),
        ("vit-tiny", "fp32"),
        ("vit-tiny", "bf16"),
    ):
        subprocess.run(
            [sys.executable, __file__, *sys.argv[1:], "--job", model, precision], check=True
        )
    return None


if __name__ == "__main__":
    main()
