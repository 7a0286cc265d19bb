"""Loading of `hf:REPO` and `hf:FOLDER`: files, configuration and weights become one model."""

from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from vitlens.errors import ModelError, argument, in_one_line
from vitlens.files import read_json
from vitlens.models.adapters import Adapter, merge_into, read_adapter
from vitlens.models.fitting import load_strictly
from vitlens.models.language_image import LanguageImage, TextTower
from vitlens.models.model import Model
from vitlens.models.rebuild import (
    Architecture,
    both_classes,
    count_classes,
    numbered_classes,
    provenance_of,
    seeded,
)
from vitlens.models.sources.huggingface.configuration import (
    WITH_TEXTS,
    ModelDescription,
    describe_config,
    with_classifier,
)
from vitlens.models.sources.huggingface.files import (
    CONFIG,
    TOKENIZERS,
    find,
    read_preprocessing,
    read_state,
    transformers,
)
from vitlens.models.sources.huggingface.modules import (
    ProjectedImageTower,
    TextEncoder,
    Tokens,
    TransformersModule,
)
from vitlens.models.sources.registry import ModelRequest
from vitlens.models.weights import read_weights
from vitlens.models.wrap import wrap_module
from vitlens.preprocessing import Preprocessing
from vitlens.typed import parse_json


def build(
    architecture: Architecture,
    *,
    state: Mapping[str, Tensor] | None = None,
    pretrained: bool = False,  # noqa: ARG001  a saved model has its weights
) -> tuple[nn.Module, Preprocessing]:
    """Return the model of a file that vitlens wrote, with these weights or random ones.

    Its preprocessing is in that file. overrides: "class", of transformers, and "config", its
    configuration as JSON.
    """
    name = architecture.name
    classes = architecture.classes
    class_name = str(architecture.overrides.get("class"))
    text = str(architecture.overrides.get("config"))
    fields = parse_json(text, source=f"the configuration of {name}", error=ModelError)
    if isinstance(fields, dict):
        fields["architectures"] = [class_name]
    else:
        fields = None  # describe_config raises for it
    description = describe_config(fields, name)
    network = description.network(state=None, name=name, classes=classes)
    module = TransformersModule(network, description.output, classes)
    if state is not None:
        load_strictly(module, state, where=name)
    return module, Preprocessing(architecture.image_size or module.native)


def load(request: ModelRequest) -> Model:
    """Return the model of a folder or repository.

    Its weights are the safetensors files, those of another file, or random. Its outputs are the
    logits of a classifier, else features. Raises ModelError for files that are missing or do not
    fit, UnsupportedError for models that are refused by name.
    """
    transformers()  # raises first if it is not installed
    name = request.name
    takes_stored = not (request.file or request.random)  # the weights of the folder
    folder, revision = find(name, request.short, weights=takes_stored)
    hint = "a folder of transformers' save_pretrained has it"
    fields = read_json(folder / CONFIG, error=ModelError, hint=hint)
    adapter = None
    if request.adapter is not None:
        adapter = read_adapter(request.adapter)
        fields = with_classifier(fields, adapter, name)
    has_tokenizer = any((folder / tokenizer).is_file() for tokenizer in TOKENIZERS)
    description = describe_config(fields, name, texts=has_tokenizer)
    notes = [note for note in (revision, *description.notes) if note]

    state: Mapping[str, Tensor] | None = None  # of the folder or of a file; None for random
    digest: str | None = None  # of the folder's weights; that of a file is computed later
    if takes_stored:
        state, digest = read_state(folder, name)
    if request.file is not None:
        weights = read_weights(request.file)
        state = weights.state
        notes += weights.notes
    with seeded(request.seed):
        if adapter is None:
            network = description.network(state, name)
        else:
            assert state is not None  # random weights are refused
            network = _adapted_network(description, state, adapter, name)
            notes.append(adapter.note)

    module, visual = _with_towers(network, description, folder, name)
    preprocessing, preprocessing_notes = read_preprocessing(folder, visual.native, request)
    notes += preprocessing_notes
    size = "{}x{} px".format(*preprocessing.size)
    native = "{}x{} px".format(*visual.native)
    with in_one_line(
        f"{name} at {size} to run", f"made for {native}: check {argument('image_size')}"
    ):
        outputs = count_classes(visual, preprocessing.size)
    if size != native:
        notes.append(f"images of {size}, position embeddings of {native}")
    # features have no class names, and no classes in the architecture
    classes: tuple[str, ...] = ()
    head_classes = 0
    if description.output == "logits":
        classes = both_classes(description.labels()) or numbered_classes(outputs)
        head_classes = outputs
    weights_name = "hub" if revision else "model.safetensors"  # a folder has no revision
    provenance = provenance_of(
        request, notes, hub=weights_name, digest=digest, transformers=version("transformers")
    )
    architecture = description.architecture(request.alias, head_classes, preprocessing.size)
    return wrap_module(
        module,
        architecture,
        preprocessing,
        classes,
        alias=request.alias,
        provenance=provenance,
        hints=visual.structure_hints,
    ).eval()


def _adapted_network(
    description: ModelDescription, state: Mapping[str, Tensor], adapter: Adapter, name: str
) -> Any:
    """Return transformers' model with the weights of a base model and an adapter merged into them.

    Adapters name their tensors as the file of the base model does, or as its modules do.
    """
    state = description.with_saved(state, adapter)
    if adapter.fits(state):
        return description.network(adapter.merged(state, name), name)
    network = description.network(state, name)
    merge_into(network, adapter, name)
    return network


def _with_towers(
    network: Any, description: ModelDescription, folder: Path, name: str
) -> tuple[nn.Module, TransformersModule]:
    """Return the module of a model, and the part of it that computes the image's outputs.

    They are the same unless the model has a text tower.
    """
    if description.class_name not in WITH_TEXTS:
        visual = TransformersModule(network, description.output)
        return visual, visual
    projection = getattr(network, "visual_projection", None)  # SigLIP has none
    visual = TransformersModule(
        ProjectedImageTower(network.vision_model, projection), description.output
    )
    context = int(network.config.text_config.max_position_embeddings)
    tower = TextTower(TextEncoder(network), lambda: Tokens(folder, context), context, name)
    pooling = "map" if projection is None else "token"
    return LanguageImage(visual, tower, layout=None, pooling=pooling), visual
