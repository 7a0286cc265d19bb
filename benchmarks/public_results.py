"""What every public function returns on six models: written to a file, or compared with one, before
and after a change.

    python -m benchmarks.public_results --out FILE          write the results
    python -m benchmarks.public_results --against FILE      compare: exit code 1 where one differs
        by more than 1e-6

The bundled pair, DeiT-tiny (where VITLENS_DATA has its weights), and a small torchvision,
transformers and hand-written ViT with random weights. A result is followed into dataclasses, tuples
and mappings by the names of its public fields; of an array its shape, a hash of its bytes and 64 of
its values are kept.
"""

import argparse
import hashlib
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torchvision.models import VisionTransformer

import vitlens
from vitlens.data.split import InMemory
from vitlens.models.model import Model

TOLERANCE = 1e-6  # of the largest value of an array, at least of 1
SHOWN = 64  # values of an array
SKIPPED = (
    "model",
    "seconds",
    "images_per_second",
    "provenance",
    "peak",
    "saved_bytes",
)  # the machine's, or given
SLOW = (
    "rise",
    "kernel-shap",
    "scorecam",
    "ablationcam",
    "occlusion",
    "smoothgrad",
    "square",
    "auto",
)  # on few images
Job = Callable[[Model, "vitlens.Split"], object]


def jobs() -> Iterator[tuple[str, Job, bool]]:
    """Name, call on a model and labelled images, and whether it needs attention over one sequence
    of tokens.
    """
    yield "evaluate", vitlens.evaluate, False
    yield "attention", vitlens.attention, True
    yield "attention of CLS", lambda m, s: vitlens.attention(m, s, rows="cls"), True
    for fusion in ("mean", "max", "min"):
        yield (
            f"rollout {fusion}",
            lambda m, s, f=fusion: vitlens.rollout(m, s, fusion=f, discard=0.3),
            True,
        )
    yield "relevance", vitlens.relevance, True
    yield "statistics", lambda m, s: everything(vitlens.statistics(m, s)), True
    for replacement in ("mean", "zero", "resample"):
        yield (
            f"ablate {replacement}",
            lambda m, s, r=replacement: vitlens.ablate(
                m, s, kinds=("head", "mlp", "block"), replace=r
            ),
            True,
        )
    yield "features", lambda m, s: vitlens.features(m, s, embedding=True), False
    yield "similarity", lambda m, s: vitlens.similarity(vitlens.features(m, s), groups=2), False
    yield "direct_logit_attribution", vitlens.direct_logit_attribution, True
    yield "logit_lens", vitlens.logit_lens, True
    yield "walkthrough", lambda m, s: vitlens.walkthrough(m, s.pick(torch.arange(1))), True
    yield "look", vitlens.look, False
    yield "explorer", vitlens.explorer, True
    yield "failures", vitlens.failures, False
    yield (
        "choose_method",
        lambda m, s: vitlens.choose_method(m, s, methods=["saliency", "input-x-gradient"]),
        False,
    )
    yield "places", lambda m, _s: [(p.name, p.shape) for p in vitlens.places(m)], False
    yield "capture", lambda m, s: dict(vitlens.capture(m, s, vitlens.places(m).names)), False
    for change in ("zero", "mean", "resample"):
        yield (
            f"intervene {change}",
            lambda m, s, c=change: intervened(m, s, {vitlens.places(m).names[-2]: c}),
            False,
        )
    knocked = {
        "blocks.*.attention.weights": vitlens.KnockOut(keys=[0, 2], queries=1),
        "blocks.1.head.1": "zero",
    }
    yield "knock out", lambda m, s: intervened(m, s, knocked), True
    yield (
        "patch",
        lambda m, s: vitlens.patch(m, s, flipped(m, s), ["blocks.0.head.1", "blocks.1.mlp"]),
        True,
    )
    yield "replay", replayed, True
    for name in [each.name for each in vitlens.list_methods()]:
        yield (
            f"explain {name}",
            lambda m, s, n=name: vitlens.explain(m, s, method=n, targets="predicted"),
            False,
        )
    for name in [each.name for each in vitlens.list_attacks()]:
        yield (
            f"attack {name}",
            lambda m, s, n=name: vitlens.attack(m, s, "predicted", method=n, steps=2),
            False,
        )


def everything(found: Any) -> object:
    """Return every statistic of every head."""
    return {each.name: getattr(found, each.name) for each in vitlens.list_statistics()}


def flipped(model: Model, split: "vitlens.Split") -> Tensor:
    """Return the images in another order."""
    return vitlens.images(split, model).flip(0)


@torch.no_grad()
def intervened(model: Model, split: "vitlens.Split", changes: Mapping[str, Any]) -> Tensor:
    """Return the logits of a changed model."""
    with vitlens.intervene(model, changes, reference=split):
        logits: Tensor = model(vitlens.images(split, model))
        return logits


def replayed(model: Model, split: "vitlens.Split") -> object:
    """Return the logits of changes from a kept clean pass."""
    with vitlens.replay(model, split) as kept:
        return kept.run(
            [{"blocks.1.mlp": torch.neg}, {"blocks.0.head.1": "zero", "blocks.1": "remove"}]
        )


class Handwritten(nn.Module):
    """A user's ViT: attention as a softmax of products, a class token and a register, no
    library."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 24, 8, 8)
        self.cls = nn.Parameter(torch.randn(1, 1, 24))
        self.register = nn.Parameter(torch.randn(1, 1, 24))
        self.positions = nn.Parameter(torch.randn(1, 16, 24))
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm = nn.LayerNorm(24)
        self.head = nn.Linear(24, 5)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        prefix = torch.cat([self.cls, self.register], 1).expand(len(images), -1, -1)
        tokens = torch.cat([prefix, tokens], 1)
        for block in self.blocks:
            tokens = block(tokens)
        logits: Tensor = self.head(self.norm(tokens)[:, 0])
        return logits


class Block(nn.Module):
    """Three heads and an MLP, with norms before them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(24)
        self.qkv = nn.Linear(24, 72)
        self.out = nn.Linear(24, 24)
        self.norm2 = nn.LayerNorm(24)
        self.mlp = nn.Sequential(nn.Linear(24, 48), nn.GELU(), nn.Linear(48, 24))
        self.heads = 3

    def forward(self, tokens: Tensor) -> Tensor:
        query, key, value = (
            self.qkv(self.norm1(tokens)).unflatten(-1, (3, 3, 8)).permute(2, 0, 3, 1, 4)
        )
        weights = (query @ key.transpose(-2, -1) * 8**-0.5).softmax(-1)
        tokens = tokens + self.out((weights @ value).transpose(1, 2).flatten(2))
        mixed: Tensor = tokens + self.mlp(self.norm2(tokens))
        return mixed


def wrapped(build: Callable[[], nn.Module], alias: str) -> Model:
    """Return a module with seeded weights that matter, as its user would wrap it."""
    torch.manual_seed(0)
    module = build().eval()
    for parameter in module.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    half = (0.5, 0.5, 0.5)
    return vitlens.wrap(
        module, image_size=32, mean=half, std=half, classes=tuple("abcde"), alias=alias
    )


def of_transformers(folder: str) -> Model:
    """Return a small ViT of transformers, saved and loaded."""
    import transformers

    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
    }
    config = transformers.ViTConfig(**sizes, image_size=32, patch_size=8, num_labels=5)
    module = transformers.ViTForImageClassification(config)
    for parameter in module.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    module.save_pretrained(folder)
    transformers.ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(folder)
    return vitlens.load(f"hf:{folder}")


def models() -> Iterator[tuple[Model, "vitlens.Split"]]:
    """Yield each model, with labelled images of its size."""
    for name in ("vit-digits", "cnn-digits"):
        model = vitlens.load(name)
        yield model, vitlens.load_data("digits", limit=20, preprocessing=model.preprocessing)
    shape = {
        "image_size": 32,
        "patch_size": 8,
        "num_layers": 2,
        "num_heads": 2,
        "hidden_dim": 32,
        "mlp_dim": 64,
    }
    made = [
        wrapped(lambda: VisionTransformer(**shape, num_classes=5), "torchvision"),
        wrapped(Handwritten, "own"),
    ]
    with tempfile.TemporaryDirectory() as folder:
        made.append(of_transformers(str(Path(folder) / "transformers")))
    data = os.environ.get("VITLENS_DATA")
    if data:
        weights = Path(data) / "weights" / "deit_tiny_patch16_224.safetensors"
        made.append(vitlens.load("timm:deit_tiny_patch16_224", weights=weights))
    for model in made:
        yield model, smooth(model, 2 if max(model.input_size) > 100 else 20)


def smooth(model: Model, count: int) -> "vitlens.Split":
    """Random coarse patterns, of the model's size and classes."""
    coarse = torch.rand(count, 3, 6, 6, generator=torch.Generator().manual_seed(0))
    pixels = torch.nn.functional.interpolate(coarse, size=model.input_size, mode="bicubic").clamp(
        0, 1
    )
    labels = torch.arange(count) % len(model.classes)
    source = InMemory((255 * pixels).to(torch.uint8))
    return vitlens.Split("made", "test", source, model.input_size, model.classes, labels=labels)


def flat(value: object, name: str) -> Iterator[tuple[str, object]]:
    """Yield every array, number and text of a result, with its path."""
    if isinstance(value, (Tensor, np.ndarray)):
        yield name, array(value.detach().cpu().numpy() if isinstance(value, Tensor) else value)
    elif value is None or isinstance(value, (bool, int, float, str)):
        yield name, value
    elif isinstance(value, Mapping):
        for key in value:
            yield from flat(value[key], f"{name}/{key}")
    elif is_dataclass(value) and not isinstance(value, type):
        for each in fields(value):
            if not each.name.startswith("_") and each.name not in SKIPPED:
                yield from flat(getattr(value, each.name), f"{name}.{each.name}")
    elif isinstance(value, Sequence):
        for index, each in enumerate(value):
            yield from flat(each, f"{name}[{index}]")


def array(values: "np.ndarray[Any, Any]") -> dict[str, object]:
    """Shape, hash and some values of an array."""
    flat_values = np.ascontiguousarray(values).reshape(-1)
    chosen = (
        np.unique(np.linspace(0, max(0, flat_values.size - 1), SHOWN).astype(int))
        if flat_values.size
        else []
    )
    largest = (
        float(np.nanmax(np.abs(flat_values.astype(float))))
        if flat_values.size and values.dtype.kind != "U"
        else 0.0
    )
    return {
        "shape": list(values.shape),
        "hash": hashlib.sha256(flat_values.tobytes()).hexdigest()[:16],
        "largest": largest,
        "values": [each.item() for each in flat_values[chosen]],
    }


def results(only: str) -> dict[str, object]:
    """Return all results by model, function and path."""
    found: dict[str, object] = {}
    for model, split in models():
        for name, job, needs_tokens in jobs():
            if only not in name or (needs_tokens and model.supports("attention") is not None):
                continue
            if name.startswith("attack ") and not model.alias.endswith("digits"):
                # two models are enough: an attack meets a model by its logits and gradients alone
                continue
            slow = name.rpartition(" ")[2] in SLOW
            if slow and max(model.input_size) > 100:
                continue
            torch.manual_seed(0)
            began = time.perf_counter()
            try:
                value = job(model, split.pick(torch.arange(3)) if slow else split)
            except vitlens.errors.VitlensError as error:
                value = f"{type(error).__name__}"
            found.update(flat(value, f"{model.alias}: {name}"))
            print(f"{time.perf_counter() - began:6.1f} s  {model.alias}: {name}", file=sys.stderr)
    return found


def apart(one: Any, other: Any) -> float:
    """0: the same to the last bit; else the difference, relative to the largest value; infinity: of
    another kind.
    """
    if one == other:
        return 0.0
    if isinstance(one, dict) and isinstance(other, dict) and one["shape"] == other["shape"]:
        if one["hash"] == other["hash"]:
            return 0.0
        pairs = list(zip(one["values"], other["values"]))
        largest = max(1.0, one["largest"])
        return max((apart(*pair) / largest for pair in pairs), default=math.inf)
    if (
        isinstance(one, (int, float))
        and isinstance(other, (int, float))
        and not isinstance(one, bool)
    ):
        if math.isnan(one) and math.isnan(other):
            return 0.0
        return abs(one - other)
    return math.inf


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--against", type=Path)
    parser.add_argument("--only", default="", help="functions with this in their name")
    options = parser.parse_args()
    found = results(options.only)
    if options.out:
        options.out.write_text(json.dumps(found, indent=0))
    if not options.against:
        return 0
    expected = json.loads(options.against.read_text())
    expected = {
        name: value for name, value in expected.items() if options.only in name.partition(": ")[2]
    }
    found = json.loads(json.dumps(found))
    differ = [f"{name}: only before" for name in expected if name not in found]
    differ += [f"{name}: only now" for name in found if name not in expected]
    rounded = 0
    for name in expected.keys() & found.keys():
        difference = apart(expected[name], found[name])
        rounded += 0 < difference <= TOLERANCE
        if difference > TOLERANCE:
            differ.append(f"{name}: differs by {difference:.2g}")
    for line in sorted(differ)[:60]:
        print(line)
    print(
        f"{len(expected)} results: {len(differ)} differ, {rounded} differ by rounding, the others "
        "are bit-equal"
    )
    return 1 if differ else 0


if __name__ == "__main__":
    raise SystemExit(main())
