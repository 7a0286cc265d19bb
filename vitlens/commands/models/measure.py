"""The list of `vitlens models`: every name that can be loaded, and the commands that each
supports."""

from collections.abc import Iterator
from dataclasses import replace

import torch

from vitlens.commands.models.options import ModelsOptions
from vitlens.commands.needs import described_commands, supported_commands
from vitlens.commands.registry import COMMANDS
from vitlens.devices import evaluating
from vitlens.errors import ModelError
from vitlens.models.anatomy import is_headless
from vitlens.models.loading import load
from vitlens.models.model import Model, Provenance
from vitlens.models.model_names import RANDOM
from vitlens.models.rebuild import Architecture, assemble, build, default_classes
from vitlens.models.sources.registry import SOURCES, ModelSource, unknown_model

_DESCRIBED_AT_MOST = 40  # models of the libraries whose support is listed, as each is built for it


def measure(options: ModelsOptions) -> Iterator[str]:
    """Return a line for each model whose name matches a pattern, or contains it.

    A line has the kind of the model and the commands that it supports. Without a pattern the
    libraries' models are only counted. Raises UnknownNameError where nothing matches.
    """
    pattern = options.pattern
    matching = {kind: source.matching(pattern) for kind, source in SOURCES.items()}
    # the sources with a prefix are libraries; the others are listed completely
    in_library = sum(len(names) for kind, names in matching.items() if SOURCES[kind].prefix)
    matches = any(matching.values())
    for kind, names in matching.items():
        source = SOURCES[kind]
        is_library = bool(source.prefix)
        is_hub = is_library and not source.list_names  # its names cannot be listed
        is_only_counted = is_library and not pattern
        is_only_named = is_library and in_library > _DESCRIBED_AT_MOST
        if is_hub:
            if not pattern or pattern.startswith(source.prefix):
                matches = True
                yield _line(source.usage, "not listed", f"{source.help} Such as {source.example}")
        elif is_only_counted:
            yield _count_line(source, len(names))
        elif is_only_named:
            yield from names
        else:
            for name in names:
                kind_of_model, commands = _describe(source, name)
                yield _line(name, kind_of_model, commands)
    if pattern and in_library > _DESCRIBED_AT_MOST:
        yield (
            f"more than {_DESCRIBED_AT_MOST} models: a narrower pattern also says which "
            "commands each supports"
        )
    if not matches:
        raise unknown_model(pattern)


def _count_line(source: ModelSource, count: int) -> str:
    """Return the line of a library whose models are only counted."""
    if source.extra and not count:
        return _line(source.usage, "not installed", f"pip install 'vitlens[{source.extra}]'")
    listing = f"vitlens models '{source.prefix}*' lists them"
    return _line(source.usage, f"{count} models", listing)


def _describe(source: ModelSource, name: str) -> tuple[str, str]:
    """Return the kind of a model, and the commands that it supports: from its shapes, without
    downloading weights.
    """
    if source.weights == "own":
        model = load(name)
        return f"{model.anatomy.family}, {source.kind}", " ".join(supported_commands(model))
    try:
        model = _without_weights(source, name)
        commands = supported_commands(model)
    except (ModelError, NotImplementedError, RuntimeError):
        # some read their weights, or need another library
        return "could not be built", "a command says whether it is supported"
    if source.weights == "none":
        usable = [word for word in commands if COMMANDS[word].untrained]
        return f"{model.anatomy.family}, untrained", " ".join(usable)
    commands = described_commands(model, commands)
    family = "image and text" if source.texts else model.anatomy.family
    return f"{family}, {model.parameter_count() / 1e6:.1f} M parameters", " ".join(commands)


def _without_weights(source: ModelSource, name: str) -> Model:
    """Return a model on the meta device, which has shapes but no weights."""
    with torch.device("meta"):
        if not source.build:
            return load(f"{name}@{RANDOM}", device="meta")
        architecture = Architecture(source.kind, name.removeprefix(source.prefix))
        module, preprocessing = build(architecture)
        with evaluating(module), torch.no_grad():
            logits = module(torch.empty(1, 3, *preprocessing.size))
    outputs = 0  # of a model without a classifier, whose outputs are features
    classes: tuple[str, ...] = ()
    if not is_headless(module):
        outputs = int(logits.shape[-1])
        classes = default_classes(outputs)
    architecture = replace(architecture, classes=outputs)
    model = assemble(module, architecture, preprocessing, classes, name, Provenance(name, "random"))
    return model.to("meta").eval().requires_grad_(False)


def _line(name: str, kind: str, commands: str) -> str:
    return f"{name:<44} {kind:<30} {commands}"
