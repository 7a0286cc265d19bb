"""Attributions compared with the grad-cam package and captum, in one process: job, peer, ours,
ratio, agreement.

    python benchmarks/explain.py [--images 64] [--repeats 3]  > the table of benchmarks/explain.md

Weights are random: time and memory do not depend on them. Times are medians of alternating runs
after a warm-up, ratios the peer's over ours. GradCAM is compared with the loop of the package's
examples: one image after the other through one GradCAM object, with the model as torchvision or
timm gives it. Integrated gradients are compared with captum's, with as many copies in one pass; the
peak of memory is that of a process that does nothing else.
"""

import argparse
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from copy import deepcopy

import numpy as np
import torch
from captum.attr import IntegratedGradients
from pytorch_grad_cam import GradCAM
from pytorch_grad_cam.utils.image import scale_cam_image
from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget
from torch import Tensor, nn

from vitlens.analysis.evaluation.evaluate import BACKWARD, fitting_batch_size
from vitlens.attribution.explain import explain
from vitlens.attribution.gradients import integrated_gradients
from vitlens.models import loading
from vitlens.models.model import Model

MODELS: dict[str, tuple[str, Callable[[nn.Module], nn.Module], bool]] = {
    "ResNet-50": ("torchvision:resnet50", lambda model: model.layer4[-1], False),
    "ViT-B/16": ("timm:vit_base_patch16_224", lambda model: model.blocks[-1].norm1, True),
}
TARGET = 281
EXPLAINED = 8  # images of integrated gradients
STEPS = 10


def timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def side_by_side(
    ours: Callable[[], object], peer: Callable[[], object], repeats: int
) -> tuple[float, float, float]:
    """Median seconds of both, and the median of the peer's over ours, from alternating runs after
    one warm-up.
    """
    ours(), peer()
    pairs = [(timed(ours), timed(peer)) for _ in range(repeats)]
    return *(statistics.median(side) for side in zip(*pairs)), statistics.median(
        b / a for a, b in pairs
    )


def from_tokens(output: Tensor) -> Tensor:
    """Return the reshape of the package's ViT example."""
    return output[:, 1:].reshape(len(output), 14, 14, -1).permute(0, 3, 1, 2)


def package_loop(
    model: Model, layer: Callable[[nn.Module], nn.Module], tokens: bool
) -> Callable[[Tensor], Tensor]:
    """GradCAM as in the package's examples, image by image; its scaled maps (batch, height,
    width)."""
    module = deepcopy(model.module).requires_grad_(True)
    cam = GradCAM(
        model=module,
        target_layers=[layer(module)],
        reshape_transform=from_tokens if tokens else None,
    )

    def run(images: Tensor) -> Tensor:
        maps = [
            cam(input_tensor=model.prepare(image), targets=[ClassifierOutputTarget(TARGET)])
            for image in images.split(1)
        ]
        return torch.from_numpy(np.concatenate(maps))

    return run


def ours_in_batches(model: Model, images: Tensor) -> Tensor:
    """Ours, as the command runs it, brought to the package's scale."""
    raw = explain(model, images, targets=torch.full((len(images),), TARGET), method="gradcam")
    side = images.shape[-1], images.shape[-2]
    return torch.from_numpy(scale_cam_image(scale_cam_image(np.maximum(raw.numpy(), 0), side)))


def compare_gradcam(name: str, count: int, repeats: int) -> str:
    module, layer, tokens = MODELS[name]
    model = loading.load(module, random_weights=True)
    images = torch.rand(count, 3, 224, 224)
    peer = package_loop(model, layer, tokens)
    apart = (ours_in_batches(model, images) - peer(images)).abs().max().item()
    own, theirs, ratio = side_by_side(
        lambda: ours_in_batches(model, images), lambda: peer(images), repeats
    )
    return row(f"GradCAM, {name}, {count} images", "grad-cam's loop", theirs, own, ratio, apart)


def both_integrated(name: str) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
    """Ours and captum's, with as many copies of the images in a pass."""
    model = loading.load(MODELS[name][0], random_weights=True)
    images = torch.rand(EXPLAINED, 3, 224, 224)
    targets = torch.full((EXPLAINED,), TARGET)
    at_once = EXPLAINED * max(1, fitting_batch_size(model) // BACKWARD // EXPLAINED)
    captum = IntegratedGradients(model)

    def theirs() -> Tensor:
        found = captum.attribute(images, target=targets, n_steps=STEPS, internal_batch_size=at_once)
        return found.sum(1).float()

    return lambda: integrated_gradients(model, images, targets, steps=STEPS), theirs


def compare_integrated(name: str, repeats: int) -> str:
    ours, theirs = both_integrated(name)
    apart = ((ours() - theirs()).abs().max() / theirs().abs().max()).item()
    own, peer, ratio = side_by_side(ours, theirs, repeats)
    memory = " / ".join(f"{peak_of(name, side):.2f}" for side in ("ours", "captum"))
    job = f"integrated gradients, {name}, {EXPLAINED} images, {STEPS} steps (peak {memory} GB)"
    return row(job, "captum", peer, own, ratio, apart)


def peak_of(name: str, side: str) -> float:
    """Peak memory in GB of a process that runs one side once."""
    done = subprocess.run(
        [sys.executable, __file__, "--peak", name, side], capture_output=True, text=True, check=True
    )
    return float(done.stdout)


def row(job: str, peer: str, theirs: float, own: float, ratio: float, apart: float) -> str:
    return f"| {job} | {peer} | {theirs:.2f} s | {own:.2f} s | {ratio:.2f} | {apart:.1e} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--peak", nargs=2, metavar=("MODEL", "SIDE"))
    asked = parser.parse_args()
    torch.manual_seed(0)
    if asked.peak:
        ours, theirs = both_integrated(asked.peak[0])
        (ours if asked.peak[1] == "ours" else theirs)()
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6)
        return
    print("| job | peer | peer | ours | times faster | largest difference |")
    print("|---|---|---:|---:|---:|---:|")
    for name in MODELS:
        print(compare_gradcam(name, asked.images, asked.repeats), flush=True)
    for name in MODELS:
        print(compare_integrated(name, asked.repeats), flush=True)


if __name__ == "__main__":
    main()
