"""The phrases of --text as subjects of `vitlens explain`: each is explained on every image."""

import re
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Final

from vitlens.commands.explain.options import ExplainOptions
from vitlens.commands.run.load import load_models
from vitlens.commands.run.options import RunOptions
from vitlens.errors import InputError
from vitlens.models.language_image import LanguageImage, with_prompts
from vitlens.models.model import Model

_DEFAULT_TARGET: Final = "predicted"
# characters of an alias: of the model, and of the phrase
_MODEL_LENGTH: Final = 45
_PHRASE_LENGTH: Final = 30


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
            order = [index, *(other for other in range(len(model.classes)) if other != index)]
            subject = with_prompts(model, [model.classes[at] for at in order], prompts[order])
            if len(model.classes) > 1:
                subject.alias = _unused(model.alias, phrase, index, aliases)
                aliases.add(subject.alias)
            yield subject


def _unused(alias: str, phrase: str, index: int, used: set[str]) -> str:
    """Return the alias of a phrase of a model that is not used yet."""
    letters = re.sub(r"[^A-Za-z0-9]+", "-", phrase).strip("-")[:_PHRASE_LENGTH].strip("-")
    name = f"{alias[:_MODEL_LENGTH]}-{letters or f'text-{index}'}"
    if name not in used:
        return name
    return next(f"{name}-{number}" for number in count(2) if f"{name}-{number}" not in used)
