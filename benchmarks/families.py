"""Attention observed in timm's families: writes docs/families.md, one row a family.

    python benchmarks/families.py [--out docs/families.md] [--only PATTERN]

With random weights and one image: the table depends on neither.
"""

import argparse
import fnmatch
import importlib.metadata
import time
import warnings
from pathlib import Path

import torch

from vitlens.analysis.attention.methods import rollout
from vitlens.errors import VitlensError
from vitlens.lens.observe import observe, survey
from vitlens.lens.site import KIND_WORDS
from vitlens.models import loading
from vitlens.models.model import Model

FAMILIES = {
    "ViT": "vit_tiny_patch16_224",
    "ViT, average pooling": "vit_wee_patch16_reg1_gap_256",
    "DeiT, distilled": "deit_tiny_distilled_patch16_224",
    "DeiT-3": "deit3_small_patch16_224",
    "DINOv2, registers": "vit_small_patch14_reg4_dinov2",
    "DINOv3": "vit_small_patch16_dinov3",
    "SigLIP": "vit_base_patch16_siglip_224",
    "Perception Encoder": "vit_pe_core_tiny_patch16_384",
    "ViT, relative positions": "vit_relpos_small_patch16_224",
    "NaFlexViT": "naflexvit_base_patch16_gap",
    "SAM": "samvit_base_patch16_224",
    "BEiT": "beit_base_patch16_224",
    "BEiT v2": "beitv2_base_patch16_224",
    "EVA-02": "eva02_tiny_patch14_224",
    "CaiT": "cait_xxs24_224",
    "XCiT": "xcit_nano_12_p16_224",
    "ConViT": "convit_tiny",
    "CrossViT": "crossvit_tiny_240",
    "TNT": "tnt_s_legacy_patch16_224",
    "PiT": "pit_ti_224",
    "VOLO": "volo_d1_224",
    "Swin": "swin_tiny_patch4_window7_224",
    "Swin v2": "swinv2_tiny_window8_256",
    "Swin v2 (CR)": "swinv2_cr_tiny_224",
    "Hiera": "hiera_tiny_224",
    "MViT v2": "mvitv2_tiny",
    "PVT v2": "pvt_v2_b0",
    "Twins-SVT": "twins_svt_small",
    "NesT": "nest_tiny",
    "DaViT": "davit_tiny",
    "GC ViT": "gcvit_xxtiny",
    "CoaT": "coat_lite_tiny",
    "CoAtNet": "coatnet_0_rw_224",
    "MaxViT": "maxvit_tiny_tf_224",
    "TinyViT": "tiny_vit_5m_224",
    "LeViT": "levit_128s",
    "Visformer": "visformer_tiny",
    "MobileViT": "mobilevit_xxs",
    "MobileViT v2": "mobilevitv2_050",
    "EdgeNeXt": "edgenext_xx_small",
    "EfficientFormer": "efficientformer_l1",
    "EfficientFormer v2": "efficientformerv2_s0",
    "EfficientViT (MIT)": "efficientvit_b0",
    "EfficientViT (MSRA)": "efficientvit_m0",
    "CAFormer": "caformer_s18",
    "FastViT": "fastvit_sa12",
    "Next-ViT": "nextvit_small",
    "SwiftFormer": "swiftformer_xs",
    "ViTamin": "vitamin_small_224",
    "MLP-Mixer": "mixer_s16_224",
    "ConvNeXt": "convnext_atto",
    "ResNet": "resnet18",
}
COLUMNS = (
    "family",
    "model",
    "layers observed",
    "kind",
    "prefix",
    "readout",
    "logits bit-equal",
    "rollout",
)


def row(family: str, name: str) -> tuple[str, ...]:
    model = loading.load(f"timm:{name}", random_weights=True)
    image = torch.rand(1, 3, *model.input_size, generator=torch.Generator().manual_seed(0))
    layout = model.anatomy.layout
    modules = model.anatomy.attention_modules
    prefix = "-" if layout is None else words_of(layout.prefix)
    with torch.no_grad():
        plain = model(image)
    try:
        equal = torch.equal(plain, observe(model, image, lambda _call: None))
    except VitlensError as error:
        return (
            family,
            name,
            f"0 of {len(modules)}",
            reason(error),
            prefix,
            model.anatomy.readout or "-",
            "-",
            "no",
        )
    sites = survey(model, image)
    kinds: dict[str, int] = {}
    for site in sites:
        kinds[site.kind] = kinds.get(site.kind, 0) + 1
    words = ", ".join(f"{kind} {count}" for kind, count in kinds.items())
    seen = f"{len({site.module for site in sites})} of {len(modules)}"
    readout = model.anatomy.readout or "-"
    return (
        family,
        name,
        seen,
        words,
        prefix,
        readout,
        "yes" if equal else "no",
        rolls_out(model, image),
    )


def words_of(prefix: tuple[str, ...]) -> str:
    counts = {kind: prefix.count(kind) for kind in prefix}
    return (
        " + ".join(kind if count == 1 else f"{count} {kind}s" for kind, count in counts.items())
        or "none"
    )


def reason(error: VitlensError) -> str:
    return "none" if "expected softmax attention" in str(error) else f"refused: {error}"


def rolls_out(model: Model, image: torch.Tensor) -> str:
    try:
        maps = rollout(model, image)
    except VitlensError:
        return "no"
    return "yes" if torch.isfinite(maps).all() else "not finite"


def table(rows: list[tuple[str, ...]]) -> str:
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "timm"))
    kinds = "\n".join(f"- **{kind}**: {words}" for kind, words in KIND_WORDS.items())
    lines = [f"| {' | '.join(row)} |" for row in (COLUMNS, tuple("---" for _ in COLUMNS), *rows)]
    return f"""# Attention observed in timm's families

Written by `python benchmarks/families.py` with {versions}: one image, random weights, the
smallest model of each family (or close to it).

*Layers observed*: attention modules whose weights were observed, of all that the model has. *Kind*:
what attends to what, and in how many attention calls of one forward pass:

{kinds}

*Logits bit-equal*: the logits under observation are bit-equal to those of the unobserved model.
*Rollout*: defined if nothing but attention mixes patches. Every layer is patch attention over one
sequence of tokens (or class attention after it), or in windows at known places. *None*: no
softmax attention. For models that mix their heads (CaiT), the weights are those of the softmax,
before mixing.

{chr(10).join(lines)}
"""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("docs/families.md"))
    parser.add_argument("--only", default="*")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    rows = []
    for family, name in FAMILIES.items():
        if not fnmatch.fnmatch(name, options.only):
            continue
        begin = time.perf_counter()
        rows.append(row(family, name))
        print(f"{time.perf_counter() - begin:5.1f} s  {' | '.join(rows[-1])}", flush=True)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(table(rows))


if __name__ == "__main__":
    main()
