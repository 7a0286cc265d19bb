"""Language-image models: zero-shot accuracy by prompt template, and relevance for a prompt."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Final

import torch

from vitlens.analysis.attention.chain import chain_length
from vitlens.analysis.attention.relevance import relevance
from vitlens.analysis.features.features import Features
from vitlens.analysis.features.zero_shot import TemplateScore, chosen_templates, prompted, template_scores
from vitlens.commands.features.arrays import PROMPT_ARRAYS, PromptArrays
from vitlens.commands.features.measure.images import SHOWN, FeatureSets, names_of, pixels, sample
from vitlens.commands.features.options import FeaturesOptions
from vitlens.commands.features.record import NO_ZERO_SHOT, PROMPTS, TEMPLATES, ZERO_SHOT
from vitlens.commands.features.record.rows import NoZeroShotRow, PromptRow, TemplateRow
from vitlens.commands.run.folder import RunFolder
from vitlens.commands.run.progress.bar import progress
from vitlens.data.split import Split
from vitlens.errors import ModelError
from vitlens.lens.layers import probe_images
from vitlens.models.language_image import PHOTO, by_template, has_text_tower, prompt_names, text_tower
from vitlens.models.model import Model
from vitlens.names import TEMPLATE_SETS

_DEFAULT: Final = next(field.default for field in fields(FeaturesOptions) if field.name == "templates")


def require_language(models: Sequence[Model], options: FeaturesOptions) -> None:
    """Refuse prompts and templates that cannot be used: without a text tower, {} in a template, or a chain of
    attention."""
    with_texts = [model for model in models if has_text_tower(model)]
    if (options.prompts or options.templates != _DEFAULT) and not with_texts:
        text_tower(models[0])  # says which models have one
    for model in with_texts:
        if options.prompts:
            text_tower(model).tokens(list(options.prompts))
            chain_length(model, probe_images(model, 1))
        if options.templates != _DEFAULT:
            text_tower(model).tokens([template.replace("{}", "thing") for template in _templates(options)])


def write_language(
    folder: RunFolder,
    models: Sequence[Model],
    sets: Sequence[FeatureSets],
    tests: Sequence[Features],
    options: FeaturesOptions,
) -> None:
    """Zero-shot accuracy by template and of their ensemble, and maps for the prompts, of models with a text tower."""
    templates: list[TemplateRow] = []
    no_zero_shot: list[NoZeroShotRow] = []
    prompts: list[PromptRow] = []
    for model, own, test in zip(models, sets, tests):
        if not has_text_tower(model):
            continue
        if own.test.labels is not None and own.test.classes:
            try:
                scores = _scored(model, own.test, test, options)
            except ModelError as error:  # no tokenizer; with --prompt it was refused before
                no_zero_shot.append(NoZeroShotRow(model.alias, str(error)))
            else:
                folder.metric(ZERO_SHOT(model=model.alias), scores[0].accuracy)
                templates += [_row(model.alias, score) for score in scores]
        if options.prompts:
            prompts += _write_prompts(folder, model, own.shown or own.test, options)
    folder.write(TEMPLATES, templates)
    folder.write(NO_ZERO_SHOT, no_zero_shot)
    folder.write(PROMPTS, prompts)


def _templates(options: FeaturesOptions) -> tuple[str, ...]:
    """The templates of the options: of named sets, of files with one per line, and as typed."""
    words: list[str] = []
    for name in options.templates:
        file = Path(name)
        if name not in TEMPLATE_SETS and "{}" not in name and file.is_file():
            words += [line.strip() for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
        else:
            words.append(name)
    return chosen_templates(words, _template_sets(words))


def _template_sets(words: Sequence[str]) -> Mapping[str, Sequence[str]]:
    if not any(word in TEMPLATE_SETS and word != "photo" for word in words):
        return dict.fromkeys(TEMPLATE_SETS, ()) | {"photo": PHOTO}
    from vitlens.models.sources.open_clip import template_sets

    return {"photo": PHOTO, **template_sets()}


def _scored(model: Model, split: Split, test: Features, options: FeaturesOptions) -> tuple[TemplateScore, ...]:
    assert split.labels is not None  # checked by the caller
    templates, names = _templates(options), prompt_names(split.classes)
    embeddings = []
    with progress(
        f"Reading prompts by {model.alias}", len(templates), unit="templates", quiet=options.run.quiet
    ) as advance:
        for template in templates:
            embeddings.append(by_template(text_tower(model), names, [template], device=model.device).cpu())
            advance(1)
    return template_scores(
        test.logits, split.labels, torch.cat(embeddings), templates, groups=split.groups, seed=options.run.seed
    )


def _row(alias: str, score: TemplateScore) -> TemplateRow:
    accuracy, gain = score.accuracy, score.gain
    assert accuracy.low is not None  # an accuracy always has its interval
    assert accuracy.high is not None
    return TemplateRow(
        model=alias,
        template=score.template,
        accuracy=accuracy.value,
        low=accuracy.low,
        high=accuracy.high,
        n=len(score.correct),
        p=score.p,
        p_holm=score.p_holm,
        gain=None if gain is None else gain.value,
        gain_low=None if gain is None else gain.low,
        gain_high=None if gain is None else gain.high,
    )


def _write_prompts(folder: RunFolder, model: Model, split: Split, options: FeaturesOptions) -> list[PromptRow]:
    """Relevance of each prompt over a few images, and the cosine similarity of image and prompt."""
    first = torch.arange(min(SHOWN, len(split)))
    chosen = first if options.show else sample(len(split), SHOWN, labels=split.labels, seed=options.run.seed)
    (batch,) = split.pick(chosen).batches(max(1, len(chosen)), device=model.device)
    classifier = prompted(model, options.prompts)
    maps = []
    for index in range(len(options.prompts)):
        targets = torch.full((len(chosen),), index, device=model.device)
        maps.append(relevance(classifier, batch.images, targets=targets).float().cpu())
    with torch.no_grad():
        logits = classifier(batch.images).float().cpu()
    tower = text_tower(model)
    cosine = ((logits - tower.bias) / tower.scale).numpy()
    arrays = PromptArrays(pixels(split, chosen).numpy(), torch.stack(maps, 1).numpy())
    folder.save(PROMPT_ARRAYS, arrays, model=model.alias)
    return [
        PromptRow(model.alias, image, name, prompt, float(cosine[image, number]))
        for image, name in enumerate(names_of(split, chosen))
        for number, prompt in enumerate(options.prompts)
    ]
