"""What works on which architecture, each tried: writes docs/architectures.md, one row a model.

    python benchmarks/architectures.py [--out docs/architectures.md] [--only PATTERN] [--rows
        FOLDER]

Random weights with noise on all of them, two images of noise; models of transformers and of the
hand-written styles are tiny, those of timm, torchvision and open_clip the smallest of their family;
a head of five classes is added where there is none. "works" means: attention: the lens's self-check
passed (weights @ value is the module's output, rows sum to 1, logits unchanged, every attention
module seen, one softmax a head), "before talking heads" where a linear map then mixes the weights
over heads; ablation: three heads replaced by zero in a replay give the logits of full forwards, to
1e-4 of the largest; the others: finite maps that are not constant, and images within epsilon;
explain: every method that the model has and that is not slow, each map of the size of its input, or
of the patches or cells in which the image's corners are where they should be: a changed corner
changes that corner of the target layer most; features: one vector of channels a layer, as wide as
the layer's own. A model of transformers is also compared with its own eager attention.
"""

import argparse
import fnmatch
import importlib.metadata
import itertools
import json
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import vitlens
from tests.kit.models import handwritten
from vitlens.analysis.ablation.units import require_heads
from vitlens.analysis.faithfulness.maps import removal_grid
from vitlens.attribution.cam import layer_output, target_layer
from vitlens.attribution.explain import methods_for
from vitlens.attribution.registry import ATTRIBUTIONS
from vitlens.errors import ModelError, VitlensError
from vitlens.lens.intervene import intervene
from vitlens.lens.observe import survey
from vitlens.lens.one_softmax import talking_heads
from vitlens.lens.replay import replaying
from vitlens.lens.trace import layers
from vitlens.models.derived import for_classes
from vitlens.models.language_image import has_text_tower
from vitlens.models.model import Model

TIMM = (
    "vit_tiny_patch16_224",
    "vit_wee_patch16_reg1_gap_256",
    "deit_tiny_distilled_patch16_224",
    "deit3_small_patch16_224",
    "vit_small_patch14_reg4_dinov2",
    "vit_small_patch16_dinov3",
    "vit_base_patch16_siglip_224",
    "vit_relpos_small_patch16_224",
    "naflexvit_base_patch16_gap",
    "beit_base_patch16_224",
    "eva02_tiny_patch14_224",
    "cait_xxs24_224",
    "xcit_nano_12_p16_224",
    "convit_tiny",
    "crossvit_tiny_240",
    "pit_ti_224",
    "volo_d1_224",
    "swin_tiny_patch4_window7_224",
    "swinv2_tiny_window8_256",
    "swinv2_cr_tiny_224",
    "hiera_tiny_224",
    "mvitv2_tiny",
    "pvt_v2_b0",
    "twins_svt_small",
    "nest_tiny",
    "davit_tiny",
    "coat_lite_tiny",
    "maxvit_tiny_tf_224",
    "levit_128s",
    "mobilevit_xxs",
    "edgenext_xx_small",
    "efficientformer_l1",
    "vitamin_small_224",
    "eva02_base_patch16_clip_224",
    "mixer_s16_224",
    "convnext_atto",
    "resnet18",
    "vit_dwee_patch16_reg1_gap_256",
    "vit_dpwee_patch16_reg1_gap_256",
    "vit_base_patch16_rope_mixed_224",
    "tnt_s_legacy_patch16_224",
    "visformer_tiny",
    "gcvit_xxtiny",
    "tiny_vit_5m_224",
    "efficientvit_m0",
    "efficientvit_b0",
    "fastvit_sa12",
    "nextvit_small",
    "mobilenetv4_hybrid_medium_075",
    "swiftformer_xs",
    "caformer_s18",
    "mambaout_femto",
    "focalnet_tiny_srf",
    "sequencer2d_s",
    "starnet_s1",
    "efficientformerv2_s0",
    "lowformer_b0",
    "cpubone_nano",
    "csatv2",
    "iformer_t",
    "beit3_base_patch16_224",
    "vit_base_patch16_rope_224",
    "hieradet_small",
    "samvit_base_patch16_224",
    "gemma4_vit_167m",
    "deepseek_vit_412m",
)
IMAGE_SIZE = {
    "gemma4_vit_167m": (192, 192),
    "deepseek_vit_412m": (126, 126),
}  # in place of 768 and 546 px, for memory
TORCHVISION = ("vit_b_16", "swin_t", "swin_v2_t", "maxvit_t", "resnet18", "convnext_tiny")
OPEN_CLIP = ("ViT-B-32", "ViT-B-16-SigLIP", "RN50", "coca_ViT-B-32", "convnext_base")
HANDWRITTEN = ("SoftmaxViT", "EinsumViT", "MultiheadViT", "EncoderViT", "InlineViT", "SmallCNN")
COLUMNS = (
    "source",
    "model",
    "layers",
    "attention",
    "rollout",
    "relevance",
    "ablation",
    "explain",
    "features",
    "attack",
    "note",
)
WORKS = "works"
TOLERANCE = 1e-4
FAULTS: list[str] = []


def of_transformers() -> dict[str, Callable[[str], nn.Module]]:
    """Tiny models of transformers, by name; each is built with a kind of attention."""
    import transformers as hub

    shape = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "image_size": 32,
        "patch_size": 8,
        "num_labels": 5,
    }
    swin = {
        "image_size": 32,
        "patch_size": 2,
        "embed_dim": 16,
        "depths": [2, 2],
        "num_heads": [2, 4],
        "window_size": 4,
        "num_labels": 5,
    }
    towers = {"vision_config": shape, "num_labels": 5}
    kinds = {
        "ViTForImageClassification": hub.ViTConfig(**shape),
        "DeiTForImageClassification": hub.DeiTConfig(**shape),
        "DeiTForImageClassificationWithTeacher": hub.DeiTConfig(**shape),
        "BeitForImageClassification": hub.BeitConfig(**shape),
        "Dinov2ForImageClassification": hub.Dinov2Config(**shape),
        "Dinov2WithRegistersForImageClassification": hub.Dinov2WithRegistersConfig(**shape),
        "DINOv3ViTModel": hub.DINOv3ViTConfig(**shape, num_register_tokens=4),
        "CLIPForImageClassification": hub.CLIPConfig(**towers),
        "CLIPVisionModel": hub.CLIPVisionConfig(**shape),
        "SiglipForImageClassification": hub.SiglipConfig(**towers),
        "SiglipVisionModel": hub.SiglipVisionConfig(**shape),
        "SwinForImageClassification": hub.SwinConfig(**swin),
        "Swinv2ForImageClassification": hub.Swinv2Config(**swin),
        "ConvNextForImageClassification": hub.ConvNextConfig(
            hidden_sizes=[8, 16], depths=[1, 1], num_stages=2
        ),
    }

    def builder(name: str) -> Callable[[str], nn.Module]:
        def build(kernel: str) -> nn.Module:
            config = kinds[name]
            torch.manual_seed(0)
            eager = {} if name.startswith("ConvNext") else {"attn_implementation": kernel}
            model: nn.Module = getattr(hub, name)._from_config(config, **eager).eval()
            return shaken(model)

        return build

    return {name: builder(name) for name in kinds}


def kernel_of(name: str) -> str:
    """Return the attention that transformers loads by default: Swin v2's has no fused form."""
    return "eager" if name.startswith("Swinv2") else "sdpa"


def shaken(module: nn.Module) -> nn.Module:
    """Return the module with noise on its weights: no zero bias and no head of zeros that would
    hide a mistake.
    """
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return module.eval()


def with_classifier(model: Model) -> Model:
    """Return the model with noise on its weights, and with a head of five classes where it has
    none.
    """
    if not model.has_classifier and not has_text_tower(model):
        model = for_classes(model, ("a", "b", "c", "d", "e"))
    shaken(model.module)
    return model


def zero_shot(name: str) -> Callable[[], Model]:
    """Return a zero-shot classifier of three classes; the image tower alone where its tokenizer is
    not on this machine.
    """

    def build() -> Model:
        try:
            return vitlens.load(name, random_weights=True, classes=("a", "b", "c"))
        except ModelError:
            return vitlens.load(name, random_weights=True)

    return build


def models() -> dict[tuple[str, str], Callable[[], Model]]:
    """How to make every model, by source and name."""
    half = (0.5, 0.5, 0.5)

    def loaded(name: str) -> Callable[[], Model]:
        size = IMAGE_SIZE.get(name.removeprefix("timm:"))
        return lambda: with_classifier(vitlens.load(name, random_weights=True, image_size=size))

    made: dict[tuple[str, str], Callable[[], Model]] = {}
    for name in HANDWRITTEN:
        made["hand-written", name] = lambda name=name: vitlens.wrap(
            shaken(getattr(handwritten, name)()), image_size=handwritten.SIZE, mean=half, std=half
        )
    for name, build in of_transformers().items():
        made["transformers", name] = lambda name=name, build=build: vitlens.wrap(
            build(kernel_of(name)), image_size=32, mean=half, std=half
        )
    made |= {("timm", name): loaded(f"timm:{name}") for name in TIMM}
    made |= {("torchvision", name): loaded(f"torchvision:{name}") for name in TORCHVISION}
    made |= {("open_clip", name): zero_shot(f"open-clip:{name}") for name in OPEN_CLIP}
    return made


def tried(job: Callable[[], str]) -> str:
    """Return what a job says, or the reason for which it is refused; any other error is a fault of
    vitlens.
    """
    try:
        return job()
    except VitlensError as error:
        return str(error).partition("; ")[0]
    except Exception as error:
        FAULTS.append(f"{type(error).__name__}: {error}")
        return f"FAULT {FAULTS[-1]}".replace("\n", " ")[:200]


def map_of(maps: Tensor) -> str:
    spread = (maps.flatten(1).amax(1) - maps.flatten(1).amin(1)).min().item()
    return (
        WORKS
        if torch.isfinite(maps).all() and spread > 0
        else "finite maps expected, found constant ones"
    )


def attends(model: Model, images: Tensor) -> str:
    """Return the weights of every layer; told where they are not yet those that multiply the
    values.
    """
    vitlens.attention(model, images)
    return f"{WORKS}, before talking heads" if talking_heads(model, images) else WORKS


def replays(model: Model, images: Tensor) -> str:
    """Return three heads replaced by zero, by replay and by full forwards."""
    require_heads(model)
    known = [layer for layer in layers(model) if layer.head_dim]
    chosen = [
        {f"blocks.{layer.index}.head.{layer.heads - 1}": "zero"}
        for layer in (known[0], known[len(known) // 2], known[-1])
    ]
    with replaying(model, images) as replay:
        logits = replay.run(chosen)
        exact = replay.exact
    full = []
    for change in chosen:
        with torch.no_grad(), intervene(model, change):
            full.append(model(images))
    difference = (logits - torch.stack(full)).abs().max().item() / max(
        1.0, torch.stack(full).abs().max().item()
    )
    if difference > TOLERANCE:
        return f"differs by {difference:.1e} from full forwards"
    return WORKS if exact else f"{WORKS}, by full forwards"


def explains(model: Model, images: Tensor, targets: Tensor) -> str:
    """Return every quick method: its maps, their size, and whether the target layer's corners are
    the image's.
    """
    grids = {model.input_size, removal_grid(model)}
    if "gradcam" in methods_for(model):
        grids.add(target_layer(model).cells.grid)
        misplaced = misplaced_corners(model, images)
        if misplaced:
            return misplaced
    if model.anatomy.layout is None and model.anatomy.attention:
        grids |= {
            site.windows.resolution for site in survey(model, images) if site.windows is not None
        }
    for name in methods_for(model):
        if ATTRIBUTIONS[name].slow:
            continue
        maps = vitlens.explain(model, images, targets=targets, method=name)
        if map_of(maps) != WORKS:
            return f"{name}: {map_of(maps)}"
        if tuple(maps.shape[1:]) not in grids:
            return f"{name}: a map of {tuple(maps.shape[1:])}, expected one of {sorted(grids)}"
    return WORKS


def misplaced_corners(model: Model, images: Tensor) -> str:
    """Return what is wrong where a changed corner of the image does not change that corner of the
    target layer most.
    """
    _, plain = layer_output(model, images[:1])
    layer = target_layer(model)
    height = images.shape[2] // 4
    width = images.shape[3] // 4
    for down, across in itertools.product((0, 1), (0, 1)):
        changed = images[:1].clone()
        rows = slice(-height, None) if down else slice(height)
        columns = slice(-width, None) if across else slice(width)
        changed[..., rows, columns] = images[1:, :, rows, columns]
        _, output = layer_output(model, changed)
        change = layer.as_maps((output - plain).abs()).sum(1)
        quarters = F.adaptive_avg_pool2d(change, 2).flatten()
        if int(quarters.argmax()) != 2 * down + across:
            return f"corner {2 * down + across} of the image is not that of {layer.module}"
    return ""


def reads(model: Model, images: Tensor) -> str:
    """Features of every layer."""
    found = vitlens.features(model, images)
    finite = all(values.isfinite().all() and values.std() > 0 for values in found.values)
    wide = all(values.shape[1] == layer.dim for values, layer in zip(found.values, found.layers))
    return WORKS if finite and wide else "finite features expected, found constant ones"


def attacks(model: Model, images: Tensor) -> str:
    labels = model(images).argmax(1)
    found = vitlens.attack(model, images, labels, method="pgd", epsilon=4 / 255)
    return WORKS if (found.images - images).abs().max() <= 4 / 255 + 1e-6 else "outside epsilon"


def eager_difference(name: str, model: Model, images: Tensor) -> str:
    """Return the largest difference from the weights that transformers' eager attention returns."""
    eager = of_transformers()[name]("eager")
    with torch.no_grad():
        own = eager(model.prepare(images), output_attentions=True).attentions
    observed = vitlens.attention(model, images)[: len(own)]
    largest = max(
        (ours - theirs).abs().max().item() for ours, theirs in zip(observed, own, strict=True)
    )
    return f"eager's own weights to {largest:.0e}"


def row(source: str, name: str, build: Callable[[], Model]) -> tuple[str, ...]:
    model = build()
    images = torch.rand(2, 3, *model.input_size, generator=torch.Generator().manual_seed(0))
    targets = torch.zeros(2, dtype=torch.long)
    count = tried(lambda: str(len({site.layer for site in survey(model, images)})))
    attention = tried(lambda: attends(model, images))
    cells = [
        attention,
        tried(lambda: map_of(vitlens.rollout(model, images))),
        tried(lambda: map_of(vitlens.relevance(model, images, targets=targets))),
        tried(lambda: replays(model, images)),
        tried(lambda: explains(model, images, targets)),
        tried(lambda: reads(model, images)),
        tried(lambda: attacks(model, images)) if model.has_classifier else "no classifier",
    ]
    note = ""
    if source == "transformers" and attention == WORKS and model.anatomy.family == "vit":
        note = tried(lambda: eager_difference(name, model, images))
    return (source, name, count if count.isdigit() else "-", *cells, note)


def table(rows: list[tuple[str, ...]]) -> str:
    packages = ("torch", "timm", "torchvision", "transformers", "open_clip_torch")
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in packages)
    reasons = list(
        dict.fromkeys(cell for row in rows for cell in row[3:10] if not cell.startswith(WORKS))
    )
    numbered = {reason: f"({number})" for number, reason in enumerate(reasons, start=1)}
    lines = [f"| {' | '.join(numbered.get(cell, cell) for cell in row)} |" for row in rows]
    head = [f"| {' | '.join(COLUMNS)} |", f"|{' --- |' * len(COLUMNS)}"]
    notes = "\n".join(f"{number} {reason}" + "  " for reason, number in numbered.items())
    about = (__doc__ or "").split("\n\n", 2)[2].strip()
    return f"""# What works on which architecture

Written by `python benchmarks/architectures.py` with {versions}.

{about}

{chr(10).join([*head, *lines])}

{notes}
"""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("docs/architectures.md"))
    parser.add_argument("--only", default="*")
    parser.add_argument(
        "--rows",
        type=Path,
        help="a folder in which each row is kept: a second run makes the others",
    )
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    rows = []
    for (source, name), build in models().items():
        if not fnmatch.fnmatch(f"{source}:{name}", options.only):
            continue
        begin = time.perf_counter()
        kept = None if options.rows is None else options.rows / f"{source}-{name}.json"
        if kept is not None and kept.is_file():
            rows.append(tuple(json.loads(kept.read_text())))
            continue
        rows.append(row(source, name, build))
        if kept is not None:
            kept.parent.mkdir(parents=True, exist_ok=True)
            kept.write_text(json.dumps(rows[-1]))
        print(
            f"{time.perf_counter() - begin:5.1f} s  {' | '.join(cell[:60] for cell in rows[-1])}",
            flush=True,
        )
    options.out.write_text(table(rows))
    if FAULTS:
        sys.exit(f"{len(FAULTS)} faults: {FAULTS[0]}")


if __name__ == "__main__":
    main()
