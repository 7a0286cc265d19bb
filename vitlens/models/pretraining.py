"""What models were pretrained for, as their names and sources tell: objectives, recipes and data as literal tables.

The names are those of timm with their tags (`vit_small_patch16_224.dino`), of open_clip with theirs, and of
transformers with their model_type. A name that no rule matches is "not known", never a guess.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from vitlens.errors import InputError, UnknownNameError
from vitlens.models.language_image import LanguageImage
from vitlens.models.model import Model
from vitlens.models.sources.registry import source_of
from vitlens.names import OBJECTIVES, KnownObjective, Objective


@dataclass(frozen=True)
class Rule:
    """Names that hold a pattern (a regular expression, in lower case) were pretrained so; the first rule holds."""

    pattern: str
    objective: Objective
    recipe: str


@dataclass(frozen=True)
class Pretraining:
    """The pretraining of one model.

    objective: of the first training; recipe: its name ("DINOv2"), data: what it saw, labels: the labelled data of a
    fine-tuning afterwards, each "" where not known or none; source: what tells it ("its name").
    """

    objective: KnownObjective
    recipe: str = ""
    data: str = ""
    labels: str = ""
    source: str = ""


_START, _END = r"(?:^|[^a-z])", r"(?![a-z])"

RULES: Final = (
    # language-image first: the towers of CLIP models are named after it, whatever else their name holds
    Rule(r"siglip-?_?2(?![0-9])|siglip.*v2_webli", "language-image", "SigLIP 2"),
    Rule("siglip", "language-image", "SigLIP"),
    Rule(r"mobileclip|_mclip", "language-image", "MobileCLIP"),
    Rule("tinyclip", "language-image", "TinyCLIP"),
    Rule("metaclip", "language-image", "MetaCLIP"),
    Rule(r"vit_pe_|pe-core", "language-image", "Perception Encoder"),
    Rule("aimv2", "language-image", "AIMv2"),
    Rule(rf"{_START}coca{_END}", "language-image", "CoCa"),
    Rule(rf"{_START}(blip2?|align|altclip|flava|bridgetower){_END}", "language-image", "image-text model"),
    Rule(r"florence|gemma|qwen|deepseek|pali", "language-image", "tower of a vision-language model"),
    Rule("clip", "language-image", "CLIP"),
    # self-supervised
    Rule("dinov3", "self-supervised", "DINOv3"),
    Rule("dinov2", "self-supervised", "DINOv2"),
    Rule(rf"{_START}(fb_)?dino{_END}", "self-supervised", "DINO"),
    Rule(rf"{_START}fcmae{_END}", "self-supervised", "FCMAE"),
    Rule(rf"{_START}(vit_)?mae{_END}", "self-supervised", "MAE"),
    Rule(r"beitv2", "self-supervised", "BEiT v2"),
    Rule(rf"{_START}beit(?!3)", "self-supervised", "BEiT"),
    Rule(rf"{_START}(sim)?mim{_END}", "self-supervised", "masked image modelling"),
    Rule("data2vec", "self-supervised", "data2vec"),
    Rule("ijepa", "self-supervised", "I-JEPA"),
    Rule(rf"{_START}(vit_)?msn{_END}", "self-supervised", "MSN"),
    Rule(rf"{_START}seer{_END}", "self-supervised", "SEER (SwAV)"),
    Rule(rf"{_START}(moco|simclr|swav|byol|ibot|vicreg){_END}", "self-supervised", "by its name"),
    # supervised: with labels of people, of hashtags or of another model
    Rule(rf"{_START}(swag|wsl|swsl|ssl_yfcc){_END}|fb_ssl", "supervised", "hashtags"),
    Rule(rf"{_START}sa1b{_END}|{_START}samvit", "supervised", "Segment Anything (masks)"),
    Rule(rf"{_START}ns_jft", "supervised", "noisy student"),
    Rule(rf"{_START}(deit3?|dist|distilled){_END}", "supervised", "labels, DeiT's recipe or distillation"),
    Rule(r"in(w)?(1k|12k|21k|22k)(?![0-9a-z])|miil|bamboo", "supervised", "labels"),
)

DATA: Final = {  # pattern -> name; every one found is listed, in the order of the name
    r"in1k": "ImageNet-1k",
    r"in12k": "ImageNet-12k",
    r"inw?21k": "ImageNet-21k",
    r"in22k": "ImageNet-22k",
    r"lvd142m": "LVD-142M",
    r"lvd1689m": "LVD-1689M",
    r"sat493m": "SAT-493M",
    r"webli": "WebLI",
    r"openai": "WIT-400M",
    r"laion2b": "LAION-2B",
    r"laion400m": "LAION-400M",
    r"laiona": "LAION-Aesthetic",
    r"laion5b": "LAION-5B",
    r"datacomp(?:1b|xl)": "DataComp-1B",
    r"dfn2b": "DFN-2B",
    r"dfn5b": "DFN-5B",
    r"merged2b": "Merged-2B",
    r"metaclip_2pt5b|fullcc": "Common Crawl (MetaCLIP)",
    r"metaclip_400m": "Common Crawl 400M (MetaCLIP)",
    r"commonpool": "CommonPool",
    r"yfcc15m": "YFCC-15M",
    r"yfcc100m": "YFCC-100M",
    r"cc12m": "CC-12M",
    r"sa1b": "SA-1B",
    r"ig1b": "Instagram 1B",
    r"jft": "JFT-300M",
    r"m38m": "Merged-38M",
}
_FINE_TUNED: Final = "_ft_"  # in timm's tags, between the data of pretraining and the labelled data after it


def read_name(name: str) -> Pretraining:
    """What a name with its tag tells, by the tables above; "not known" where no rule matches."""
    text = name.lower()
    before, _, after = text.partition(_FINE_TUNED)
    if text.partition(".")[2].startswith("ft_"):
        before, after = text, text.partition(".")[2]
    rule = next((rule for rule in RULES if re.search(rule.pattern, before)), None)
    if rule is None:
        return Pretraining("not known")
    return Pretraining(rule.objective, rule.recipe, _data(before), _data(after), "its name")


def _data(text: str) -> str:
    """The data sets that a part of a name holds, in their order: "ImageNet-21k, ImageNet-1k"."""
    found = [(match.start(), name) for pattern, name in DATA.items() if (match := re.search(pattern, text))]
    return ", ".join(name for _, name in sorted(found))


def pretraining_of(model: Model, *, told: Objective | None = None) -> Pretraining:
    """What a model was pretrained for: as the user tells it, else as its source, name and configuration tell it.

    told: the user's word, which goes before all others but "random weights". A weights file of the user's under a
    library's name is read by that name, and the result says so; a run folder is known where it holds a preset, which
    `vitlens train` trains with labels, but not where it is a fine-tuned model of another library.
    """
    weights = model.provenance.weights
    if weights == "random":
        return Pretraining("random weights", source="its weights")
    read = _read(model)
    if told is not None:
        same = read if read.objective == told else Pretraining(told)
        return replace(same, source="--objective")
    file = weights not in ("hub", "bundled", "training") and read.source == "its name"
    return replace(read, source="its name; the weights are the user's file") if file else read


def told_objectives(texts: Sequence[str], aliases: Sequence[str]) -> Mapping[str, Objective]:
    """`--objective ALIAS=WORD`, by alias. Raises InputError for another form, UnknownNameError for another word or an
    alias of no model."""
    told: dict[str, Objective] = {}
    for text in texts:
        alias, equals, word = text.partition("=")
        if not equals:
            raise InputError(
                f"expected --objective ALIAS=OBJECTIVE, found {text!r}; e.g. --objective {aliases[0]}=self-supervised"
            )
        if alias not in aliases:
            raise UnknownNameError("model of --objective", alias, aliases)
        known = {str(objective): objective for objective in OBJECTIVES}
        if word not in known:
            raise UnknownNameError("objective", word, OBJECTIVES)
        told[alias] = known[word]
    return told


def _read(model: Model) -> Pretraining:
    name, kind = model.provenance.name, str(model.architecture.get("kind", ""))
    source = source_of(name)
    named = source.kind if source is not None else ""
    if named == "bundled":
        return Pretraining("supervised", "vitlens train", "digits", source="bundled with vitlens")
    if named in ("run", "file") and kind == "preset":
        return Pretraining("supervised", "vitlens train", source="a preset, trained with labels")
    if isinstance(model.module, LanguageImage):
        from_hub = named == "open-clip" or model.provenance.weights == "hub"  # a folder's name says nothing
        read = read_name(f"{_model_type(model) or 'clip'} {name.partition(':')[2] if from_hub else ''}")
        return replace(read, source="its text tower")
    if named == "timm":
        return read_name(_with_tag(model, name.partition(":")[2]))
    if named == "torchvision" and model.provenance.weights == "hub":
        return Pretraining("supervised", "labels", "ImageNet-1k", source="torchvision's weights")
    if named == "hf":
        own = name.partition(":")[2] if model.provenance.weights == "hub" else ""
        return read_name(f"{_model_type(model)} {own}")
    return Pretraining("not known")


def _model_type(model: Model) -> str:
    """transformers' name of the architecture, "" for a model of another library."""
    for module in model.module.modules():
        config: Any = getattr(module, "config", None)
        if isinstance(found := getattr(config, "model_type", None), str):
            return found
    return ""


def _with_tag(model: Model, name: str) -> str:
    """timm's name with the tag of the weights that its hub gives, where none was typed."""
    config = getattr(model.module, "pretrained_cfg", None)
    tag = config.get("tag") if isinstance(config, Mapping) else None
    return f"{name}.{tag}" if tag and "." not in name and model.provenance.weights == "hub" else name
