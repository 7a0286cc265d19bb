"""Deletion and insertion by patch: all steps of many images in one batch against the loop over
images and steps.

    python benchmarks/faithfulness.py [--model vit-digits] [--images 64] [--steps 20] [--rounds 5]
        [--substrate blur]
                                      [--device cpu] [--random-weights]

The loop is `single_run` of CausalMetric, the code that came with RISE (Petsiuk 2018), called for
every image and both curves: one forward for the class, then one at every step, a batch of one image
each. Its steps are patches here, as ours are. Both use the same maps (relevance) and the same
substrate, and compute the predicted classes themselves. The curves must agree. `absent` cannot be
done in pixels: it is compared with the time of the loop that blurs, which does not depend on the
substrate.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from vitlens.analysis.attention.methods import relevance
from vitlens.analysis.faithfulness.maps import removal_grid
from vitlens.analysis.faithfulness.removal import (
    both_orders,
    faithfulness,
    pixel_masks,
    removal_counts,
    substrate_images,
)
from vitlens.models import loading
from vitlens.models.model import Model


@torch.inference_mode()
def single_run(
    model: Model, image: Tensor, ranks: Tensor, counts: list[int], substrate: str, mode: str
) -> Tensor:
    """Probabilities (points,) of one image's predicted class as patches go (del) or come (ins)."""
    target = model(image).argmax(-1).item()
    other = substrate_images(image, substrate)  # type: ignore[arg-type]
    start, finish = (image.clone(), other) if mode == "del" else (other.clone(), image)
    scores = torch.empty(len(counts))
    grid = removal_grid(model)
    for place, count in enumerate(counts):
        scores[place] = model(start).softmax(-1)[0, target].item()
        if place + 1 < len(counts):
            now = pixel_masks(
                (ranks >= count) & (ranks < counts[place + 1]), grid, model.input_size
            )
            start = torch.where(now, finish, start)
    return scores


def loop(model: Model, images: Tensor, maps: Tensor, steps: int, substrate: str) -> Tensor:
    """Probabilities (2, images, points): deletion, and insertion from nothing to all."""
    grid = removal_grid(model)
    counts = removal_counts(grid[0] * grid[1], steps).tolist()
    curves = []
    for index in range(len(images)):
        ranks, _ = both_orders(maps[index : index + 1], grid, images=1)
        run = [
            single_run(model, images[index : index + 1], ranks, counts, substrate, mode)
            for mode in ("del", "ins")
        ]
        curves.append(torch.stack(run))
    return torch.stack(curves, 1)


def batched(model: Model, images: Tensor, maps: Tensor, steps: int, substrate: str) -> Tensor:
    with torch.inference_mode():
        targets = torch.cat([model(part).argmax(-1) for part in images.split(64)])
    (found,) = faithfulness(model, images, targets, [maps], steps=steps, substrate=substrate)  # type: ignore[arg-type]
    return torch.stack([found.deletion.probability, found.insertion.probability])


def timed(work: Callable[[], Tensor]) -> tuple[float, Tensor]:
    start = time.perf_counter()
    found = work().cpu()
    return time.perf_counter() - start, found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="vit-digits")
    parser.add_argument("--images", type=int, default=64)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--substrate", default="blur", choices=("blur", "mean", "black", "absent"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--random-weights", action="store_true")
    options = parser.parse_args()
    model = loading.load(
        options.model, random_weights=options.random_weights, device=torch.device(options.device)
    )
    height, width = model.input_size
    images = torch.rand(
        options.images, 3, height, width, generator=torch.Generator().manual_seed(0)
    ).to(options.device)
    maps = relevance(model, images)
    slow = "blur" if options.substrate == "absent" else options.substrate
    print(
        f"torch {torch.__version__}, {options.device}, {torch.get_num_threads()} threads, "
        f"{options.images} images, {options.steps} steps"
    )
    batched(model, images[:1], maps[:1], 2, options.substrate)  # the structure is read
    loop(model, images[:1], maps[:1], 2, slow)
    ratios = []
    for _ in range(options.rounds):
        naive, expected = timed(lambda: loop(model, images, maps, options.steps, slow))
        ours, found = timed(lambda: batched(model, images, maps, options.steps, options.substrate))
        ratios.append(naive / ours)
        same = (
            ""
            if options.substrate == "absent"
            else (f"; probabilities differ by {(found - expected).abs().max().item():.1e} at most")
        )
        print(
            f"loop {naive:.2f} s, batched {ours:.2f} s: {naive / ours:.2f} times as fast{same}",
            flush=True,
        )
    print(
        f"{options.model}, {options.substrate}: median {statistics.median(ratios):.2f} times the "
        "loop's speed"
    )


if __name__ == "__main__":
    main()
