"""Loading of `hf:REPO` and `hf:FOLDER`."""

from importlib.metadata import version

from torch import nn

from vitlens.errors import ModelError, VitlensError, lacks_memory
from vitlens.files import sha256
from vitlens.models.assembly import count_classes, default_classes, seeded, versions
from vitlens.models.model import Model, Provenance
from vitlens.models.sources.huggingface.configuration import WHOLE, Description, describe
from vitlens.models.sources.huggingface.folder import find
from vitlens.models.sources.huggingface.library import transformers
from vitlens.models.sources.huggingface.module import architecture_of, create, native_size
from vitlens.models.sources.huggingface.processor import read_processor
from vitlens.models.sources.huggingface.texts import with_texts
from vitlens.models.sources.registry import ModelRequest
from vitlens.models.weights import read_weights
from vitlens.models.wrap import wrapped


def load(request: ModelRequest) -> Model:
    """The model of a folder or repository, with its safetensors weights, those of a file, or random ones.

    Its outputs are the logits of a classifier, else features. Raises ModelError for files that are missing or do not
    fit, UnsupportedError for models that are refused by name.
    """
    transformers()  # says first where it is not installed
    file, own = request.file, not (request.file or request.random)
    folder = find(request.name, request.short, weights=own)
    found = describe(folder)
    notes = list(found.notes)
    native = native_size(found.config())
    state, digest = None, None
    if own:
        state, digest = folder.read_state()
    elif file is not None:
        weights = read_weights(file)
        state, digest = weights.state, sha256(file)
        notes += weights.notes
    processor = read_processor(folder, found.model_type, native, request.image_size)
    size = processor.preprocessing.size
    with seeded(request.seed):
        if found.class_name in WHOLE:
            module: nn.Module = with_texts(found, folder, state=state)
        else:
            module = create(found, state=state, name=request.name)
    outputs = _outputs(module, size, native, request)
    if size != native:
        notes.append(f"images of {size[0]}x{size[1]} px, position embeddings of {native[0]}x{native[1]} px")
    classes = _classes(found, outputs, request.name)
    told = getattr(module, "told", None)
    architecture = architecture_of(found, request.alias, len(classes), size)
    provenance = Provenance(
        request.name,
        file.name if file else "random" if request.random else "hub" if folder.from_hub else "model.safetensors",
        digest,
        versions() | {"transformers": version("transformers")},
        (*folder.notes, *notes, *processor.notes),
    )
    return wrapped(module, architecture, processor.preprocessing, classes, request.alias, provenance, told=told).eval()


def _outputs(module: nn.Module, size: tuple[int, int], native: tuple[int, int], request: ModelRequest) -> int:
    """The number of outputs, measured. Raises ModelError for a size at which the model does not run."""
    try:
        return count_classes(module, size)
    except VitlensError:
        raise
    except Exception as error:  # transformers raises many types for sizes that do not fit
        if lacks_memory(error):
            raise
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:160]
        made_for = "{}x{}".format(*native)
        raise ModelError(
            f"expected {request.name} at {size[0]}x{size[1]} px to run, found: {reason}; made for {made_for} px: "
            "check --image-size"
        ) from error


def _classes(found: Description, outputs: int, name: str) -> tuple[str, ...]:
    if found.output != "logits":
        return ()
    if found.labels and len(found.labels) != outputs:
        raise ModelError(f"expected {outputs} labels in config.json of {name}, found {len(found.labels)}")
    return found.labels or default_classes(outputs)
