"""One head set to zero, the logits of some images: ViT-Prisma's hooked forward, a hook on timm's
model, our replay.

    python benchmarks/prisma.py [--images 8] [--rounds 3]

Needs vit-prisma and vitlens in one environment (a separate one: vit-prisma pins old packages).
ViT-B/16 at 224 px with the same random weights in all three; every round times one head of every
second layer by each, and the replay of all heads of these layers. The logits must agree.
"""

import argparse
import statistics
import time
from functools import partial

import torch
from replay import naive
from torch import Tensor
from vit_prisma.configs.HookedViTConfig import HookedViTConfig
from vit_prisma.models.base_vit import HookedViT
from vit_prisma.prisma_tools.loading_from_pretrained import convert_timm_weights

from vitlens.lens.replay import replaying
from vitlens.lens.trace import layers
from vitlens.models import loading
from vitlens.models.model import Model


def hooked(model: Model) -> HookedViT:
    """Prisma's model with the model's weights."""
    config = HookedViTConfig(
        n_layers=12,
        d_model=768,
        d_head=64,
        d_mlp=3072,
        n_heads=12,
        patch_size=16,
        image_size=224,
        n_classes=1000,
        return_type="class_logits",
    )
    module = HookedViT(config)
    found = module.load_state_dict(
        convert_timm_weights(model.module.state_dict(), config), strict=False
    )
    assert not found.unexpected_keys, found
    return module.eval()


def zero(z: Tensor, hook: object, *, head: int) -> Tensor:  # noqa: ARG001 - it is called by name
    """Return the output of a head, before the output projection, set to zero: (batch, tokens,
    heads, dim).
    """
    z[:, :, head] = 0
    return z


@torch.no_grad()
def by_prisma(model: HookedViT, images: Tensor, layer: int, head: int) -> Tensor:
    hooks = [(f"blocks.{layer}.attn.hook_z", partial(zero, head=head))]
    logits: Tensor = model.run_with_hooks(images, fwd_hooks=hooks)
    return logits


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--images", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    model = loading.load("timm:vit_base_patch16_224", random_weights=True)
    prisma = hooked(model)
    table = layers(model)
    images = torch.rand(options.images, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    prepared = model.prepare(images)
    heads = sum(layer.heads for layer in table)
    ratios: list[tuple[float, float]] = []
    for turn in range(options.rounds):
        theirs = hooks = ours = largest = 0.0
        some = table[turn % 2 :: 2]
        for layer in some:
            start = time.perf_counter()
            expected = by_prisma(prisma, prepared, layer.index, turn)
            theirs += time.perf_counter() - start
            start = time.perf_counter()
            again = naive(model, images, layer, turn)
            hooks += time.perf_counter() - start
            largest = max(largest, (expected - again).abs().max().item())
        with torch.no_grad():
            start = time.perf_counter()
            with replaying(model, images) as replay:
                for layer in table:
                    logits = replay.run(
                        [
                            {f"blocks.{layer.index}.head.{head}": "zero"}
                            for head in range(layer.heads)
                        ]
                    )
            ours = time.perf_counter() - start
        largest = (
            max(largest, (logits[turn] - again).abs().max().item())
            if some[-1] is table[-1]
            else largest
        )
        theirs = theirs / len(some) * heads
        hooks = hooks / len(some) * heads
        ratios.append((ours / theirs, ours / hooks))
        print(
            f"{heads} heads, {options.images} images: ViT-Prisma {theirs:.1f} s, hooks {hooks:.1f} "
            "s, "
            f"replay {ours:.1f} s; replay/Prisma {ours / theirs:.3f}; logits differ by "
            f"{largest:.1e} at most",
            flush=True,
        )
    print(f"median replay/Prisma {statistics.median(ratio for ratio, _ in ratios):.3f}")


if __name__ == "__main__":
    main()
