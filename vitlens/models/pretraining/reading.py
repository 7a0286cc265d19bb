"""The pretraining of a loaded model, from where its weights come from."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from vitlens.errors import InputError, UnknownNameError
from vitlens.models.language_image import LanguageImage
from vitlens.models.model import Model
from vitlens.models.pretraining.registry import Pretraining, read_name
from vitlens.models.sources.registry import source_of
from vitlens.names import OBJECTIVES, Objective


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
