"""The phrases of --text as subjects of `vitlens explain`: each is explained on every image."""

import re
from collections.abc import Iterator, Sequence
from typing import Final

from vitlens.commands.explain.options import ExplainOptions
from vitlens.commands.run.load import load_models, require_image_paths
from vitlens.commands.run.options import RunOptions
from vitlens.errors import InputError
from vitlens.models.language_image import LanguageImage, with_prompts
from vitlens.models.model import Model

_DEFAULT_TARGET: Final = "predicted"
_MODEL_LENGTH: Final = 45  # characters of the model in an alias with a phrase, at most
_PHRASE_LENGTH: Final = 30  # characters of the phrase in it, at most


def require_phrase_targets(options: ExplainOptions) -> None:
    """Raise InputError for options that choose other targets than the phrases of --text."""
    if options.target != _DEFAULT_TARGET:
        raise InputError(
            f"expected either --text or --target, found both (--target {options.target}); each "
            "phrase is explained on every image"
        )
    if options.auto:
        raise InputError(
            "expected --method or --verify with --text, found --auto, which chooses by classes of "
            "images"
        )


def load_by_phrase(options: ExplainOptions, run: RunOptions) -> tuple[Model, ...]:
    """Return the models that the options name, with --text one for each of its phrases."""
    require_image_paths(options.images)
    models = load_models(
        options.models, command="explain", model_options=options.model_options, options=run
    )
    if not options.model_options.text:
        return models
    return tuple(by_phrase(models))


def by_phrase(models: Sequence[Model]) -> Iterator[Model]:
    """Yield each model once for each of its phrases, which is then its class 0.

    With several phrases, the alias has the phrase in it.
    """
    aliases = {model.alias for model in models}
    for model in models:
        assert isinstance(model.module, LanguageImage)  # with_text returns no other
        prompts = model.module.prompts
        assert prompts is not None
        for index, phrase in enumerate(model.classes):
            # this phrase first, then the others in their order
            order = [index, *range(index), *range(index + 1, len(model.classes))]
            names = [model.classes[position] for position in order]
            subject = with_prompts(model, names, prompts[order])
            if len(model.classes) > 1:
                subject.alias = _unused_alias(model.alias, phrase, index, aliases)
                aliases.add(subject.alias)
            yield subject


def _unused_alias(alias: str, phrase: str, index: int, used: set[str]) -> str:
    """Return an alias of the phrase with this index of a model, which is not used yet."""
    words = re.sub(r"[^A-Za-z0-9]+", "-", phrase).strip("-")
    words = words[:_PHRASE_LENGTH].strip("-")
    if not words:  # the phrase has none of these letters
        words = f"text-{index}"
    name = f"{alias[:_MODEL_LENGTH]}-{words}"
    unused = name
    number = 2
    while unused in used:
        unused = f"{name}-{number}"
        number += 1
    return unused
