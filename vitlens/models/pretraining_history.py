"""The pretraining of models, from their names and sources: objectives, recipes and data.

The rules are literal tables. The names are those of timm with their tags
(`vit_small_patch16_224.dino`), of open_clip with its tags, and of transformers with their
model_type. A name that no rule matches is "not known", never a guess.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from vitlens.errors import InputError, UnknownNameError
from vitlens.files import read_json
from vitlens.models.language_image import LanguageImage
from vitlens.models.model import Model
from vitlens.models.sources.registry import source_of
from vitlens.names import OBJECTIVES, KnownObjective, Objective
from vitlens.record import CONFIG


@dataclass(frozen=True)
class PretrainingHistory:
    """The pretraining of one model.

    objective: the objective of the first training.
    recipe: the name of the recipe ("DINOv2"), or "" if it is not known.
    data: the data of the first training, or "" if they are not known.
    labels: the labelled data of a fine-tuning afterwards, or "" if there was none or it is not
        known.
    source: what this information was read from ("its name").
    """

    objective: KnownObjective
    recipe: str = ""
    data: str = ""
    labels: str = ""
    source: str = ""


# a word in a name begins and ends where no other letter is next to it
_START = r"(?:^|[^a-z])"
_END = r"(?![a-z])"

# (pattern, objective, recipe): the first rule with a pattern in the name applies
RULES: Final[tuple[tuple[str, Objective, str], ...]] = (
    # language-image rules come first: the name of a CLIP model's tower has "clip", and may have the
    # pattern of another rule, too
    (r"siglip-?_?2(?![0-9])|siglip.*v2_webli", "language-image", "SigLIP 2"),
    ("siglip", "language-image", "SigLIP"),
    (r"mobileclip|_mclip", "language-image", "MobileCLIP"),
    ("tinyclip", "language-image", "TinyCLIP"),
    ("metaclip", "language-image", "MetaCLIP"),
    (r"vit_pe_|pe-core", "language-image", "Perception Encoder"),
    ("aimv2", "language-image", "AIMv2"),
    (rf"{_START}coca{_END}", "language-image", "CoCa"),
    (
        rf"{_START}(blip2?|align|altclip|flava|bridgetower){_END}",
        "language-image",
        "image-text model",
    ),
    (r"florence|gemma|qwen|deepseek|pali", "language-image", "tower of a vision-language model"),
    ("clip", "language-image", "CLIP"),
    # self-supervised
    ("dinov3", "self-supervised", "DINOv3"),
    ("dinov2", "self-supervised", "DINOv2"),
    (rf"{_START}(fb_)?dino{_END}", "self-supervised", "DINO"),
    (rf"{_START}fcmae{_END}", "self-supervised", "FCMAE"),
    (rf"{_START}(vit_)?mae{_END}", "self-supervised", "MAE"),
    (r"beitv2", "self-supervised", "BEiT v2"),
    (rf"{_START}beit(?!3)", "self-supervised", "BEiT"),
    (rf"{_START}(sim)?mim{_END}", "self-supervised", "masked image modelling"),
    ("data2vec", "self-supervised", "data2vec"),
    ("ijepa", "self-supervised", "I-JEPA"),
    (rf"{_START}(vit_)?msn{_END}", "self-supervised", "MSN"),
    (rf"{_START}seer{_END}", "self-supervised", "SEER (SwAV)"),
    (rf"{_START}(moco|simclr|swav|byol|ibot|vicreg){_END}", "self-supervised", "by its name"),
    # supervised, by labels from people, from hashtags or from another model
    (rf"{_START}(swag|wsl|swsl|ssl_yfcc){_END}|fb_ssl", "supervised", "hashtags"),
    (rf"{_START}sa1b{_END}|{_START}samvit", "supervised", "Segment Anything (masks)"),
    (rf"{_START}ns_jft", "supervised", "noisy student"),
    (
        rf"{_START}(deit3?|dist|distilled){_END}",
        "supervised",
        "labels, DeiT's recipe or distillation",
    ),
    (r"in(w)?(1k|12k|21k|22k)(?![0-9a-z])|miil|bamboo", "supervised", "labels"),
)

DATA: Final = {  # pattern -> data set; all data sets in a name are listed, in their order
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

# objective of `vitlens train --objective` -> its name in comparisons, and its recipe
TRAINED: Final[Mapping[str, tuple[Objective, str]]] = {
    "classify": ("supervised", "vitlens train"),
    "mae": ("self-supervised", "MAE"),
    "dino": ("self-supervised", "DINO"),
    "clip": ("language-image", "CLIP"),
}
_LONGEST_CHAIN: Final = 8  # most run folders that were trained from one another


def read_name(name: str) -> PretrainingHistory:
    """Return the pretraining that a name with its tag shows, by the tables above.

    Without a match, it is "not known".
    """
    text = name.lower()
    # _ft_ separates the data of pretraining from the labelled data of the fine-tuning
    pretraining_text, _, labels_text = text.partition("_ft_")
    architecture, _, tag = text.partition(".")
    if tag.startswith("ft_"):  # the tag has only the data of the fine-tuning
        labels_text = tag
        # the first training is that of the architecture, or else supervised with the same data
        pretraining_text = text if _rule_of(architecture) is None else architecture
    rule = _rule_of(pretraining_text)
    if rule is None:
        return PretrainingHistory("not known")
    objective, recipe = rule
    return PretrainingHistory(
        objective,
        recipe,
        data=_data(pretraining_text),
        labels=_data(labels_text),
        source="its name",
    )


def _rule_of(text: str) -> tuple[Objective, str] | None:
    """Return the objective and the recipe of the first rule that a text matches, or None."""
    for pattern, objective, recipe in RULES:
        if re.search(pattern, text):
            return objective, recipe
    return None


def _data(text: str) -> str:
    """Return the data sets in a part of a name, in order: "ImageNet-21k, ImageNet-1k"."""
    positions = []
    for pattern, name in DATA.items():
        match = re.search(pattern, text)
        if match:
            positions.append((match.start(), name))
    return ", ".join(name for _, name in sorted(positions))


def pretraining_of(model: Model, *, objective: Objective | None = None) -> PretrainingHistory:
    """Return the pretraining of a model, from its source, name and configuration.

    A user's weights file with a library's name is read by that name, and the result says so. The
    pretraining of a run folder is the one in its config.json; without it, it is "not known".

    objective: the objective given by the user. It replaces all others except "random weights".
    """
    weights = model.provenance.weights
    if weights == "random":
        return PretrainingHistory("random weights", source="its weights")
    read = _read(model)
    if objective is not None:
        if read.objective != objective:
            read = PretrainingHistory(objective)
        return replace(read, source="--objective")
    is_file = weights not in ("hub", "bundled", "training")
    if is_file and read.source == "its name":
        return replace(read, source="its name; the weights are the user's file")
    return read


def stated_objectives(texts: Sequence[str], aliases: Sequence[str]) -> Mapping[str, Objective]:
    """Return the objectives of `--objective ALIAS=OBJECTIVE` by alias.

    Raises InputError for another form, UnknownNameError for another objective or an alias of no
    model.
    """
    chosen: dict[str, Objective] = {}
    for text in texts:
        alias, equals, word = text.partition("=")
        if not equals:
            raise InputError(
                f"expected --objective ALIAS=OBJECTIVE, found {text!r}; e.g. --objective "
                f"{aliases[0]}=self-supervised"
            )
        if alias not in aliases:
            raise UnknownNameError("model of --objective", alias, aliases)
        objectives = {str(objective): objective for objective in OBJECTIVES}
        if word not in objectives:
            raise UnknownNameError("objective", word, OBJECTIVES)
        chosen[alias] = objectives[word]
    return chosen


def _read(model: Model) -> PretrainingHistory:
    """Return the pretraining by the source of the model, without what the user has said."""
    name = model.provenance.name
    kind = str(model.architecture.get("kind", ""))
    source = source_of(name)
    from_hub = model.provenance.weights == "hub"
    library = source.kind if source is not None else ""
    short_name = name.partition(":")[2]  # without the prefix of its source
    if library == "bundled":
        return _of_bundled(name)
    if library == "run" and kind == "preset":
        return _of_run(Path(name))
    if library == "file" and kind == "preset":
        return _of_run(Path(name).parent)
    if isinstance(model.module, LanguageImage):
        model_type = _model_type(model) or "clip"
        # the name of a folder says nothing about the pretraining
        hub_name = short_name if from_hub or library == "open-clip" else ""
        return replace(read_name(f"{model_type} {hub_name}"), source="its text tower")
    if library == "timm":
        config = getattr(model.module, "pretrained_cfg", None)
        default_tag = config.get("tag") if isinstance(config, Mapping) else None
        has_tag = "." in short_name
        if from_hub and not has_tag and default_tag:
            return read_name(f"{short_name}.{default_tag}")
        return read_name(short_name)
    if library == "torchvision" and from_hub:
        return PretrainingHistory(
            "supervised", recipe="labels", data="ImageNet-1k", source="torchvision's weights"
        )
    if library == "hf":
        # the name of a folder says nothing about the pretraining
        hub_name = short_name if from_hub else ""
        return read_name(f"{_model_type(model)} {hub_name}")
    return PretrainingHistory("not known")


def _of_bundled(name: str) -> PretrainingHistory:
    data = "digits-shortcut" if name.endswith("shortcut") else "digits"
    return PretrainingHistory(
        "supervised", recipe="vitlens train", data=data, source="bundled with vitlens"
    )


def _of_run(folder: Path, depth: int = 0) -> PretrainingHistory:
    """Return the pretraining that the config.json of a run folder shows.

    A run that started from another model has the pretraining of that model. If the run was
    supervised, its data are labels, too.

    depth: the number of runs that were trained from this one.
    """
    try:
        config = read_json(folder / CONFIG)
        start_model = config["models"][0]
        parent = str(start_model["name"])
        if config["command"] != "train":  # the model was only pruned
            return _of_parent(parent, depth)
        objective, recipe = TRAINED[config["options"]["objective"]]
        data = str(config["data"]["name"])
    except (InputError, KeyError, IndexError, TypeError):
        return PretrainingHistory("not known")
    if start_model["weights"] == "training":  # the run started from a preset
        return PretrainingHistory(objective, recipe, data, source="its run folder")
    read = _of_parent(parent, depth)
    if objective == "supervised" and read.objective != "not known":
        labels = ", ".join(name for name in (read.labels, data) if name)
        read = replace(read, labels=labels)
    return read


def _of_parent(name: str, depth: int) -> PretrainingHistory:
    """Return the pretraining of the model that a run started from, by its name in config.json."""
    source = source_of(name)
    if source is None or depth == _LONGEST_CHAIN:
        return PretrainingHistory("not known")
    if source.kind == "bundled":
        return _of_bundled(name)
    if source.kind == "run":
        return _of_run(Path(name), depth + 1)
    if source.kind == "timm":
        return read_name(name.removeprefix(source.prefix))
    return PretrainingHistory("not known")


def _model_type(model: Model) -> str:
    """Return the name of the architecture in transformers; "" for other libraries' models."""
    for part in model.module.modules():
        model_type = getattr(getattr(part, "config", None), "model_type", None)
        if isinstance(model_type, str):
            return model_type
    return ""
