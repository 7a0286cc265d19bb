"""What `vitlens features` finds of models that know texts: zero-shot accuracy, its wording, relevance for a prompt."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import torch

from vitlens.analysis.attention.chain import chain_length
from vitlens.analysis.attention.relevance import relevance
from vitlens.analysis.features.features import Features
from vitlens.analysis.features.zero_shot import TemplateScore, chosen_templates, prompted, template_scores
from vitlens.commands.scaffold.folder import RunFolder
from vitlens.commands.scaffold.options import RunOptions
from vitlens.commands.scaffold.progress import progress
from vitlens.data.split import Split
from vitlens.errors import ModelError
from vitlens.lens.layers import probe_images
from vitlens.models.language_image import PHOTO, by_template, has_text_tower, prompt_names, text_tower
from vitlens.models.model import Model
from vitlens.names import TEMPLATE_SETS
from vitlens.runs.features_choices import FeatureChoices
from vitlens.runs.features_load import SHOWN, Sets, names_of, pixels, some

_DEFAULT: Final = FeatureChoices().templates


def require_language(models: Sequence[Model], choices: FeatureChoices) -> None:
    """Refuse prompts and templates that cannot be used: no text tower, no {} in a template, no chain of attention."""
    speaking = [model for model in models if has_text_tower(model)]
    if (choices.prompts or choices.templates != _DEFAULT) and not speaking:
        text_tower(models[0])  # says which models have one
    for model in speaking:
        if choices.prompts:
            text_tower(model).tokens(list(choices.prompts))
            chain_length(model, probe_images(model, 1))
        if choices.templates != _DEFAULT:
            text_tower(model).tokens([template.replace("{}", "thing") for template in templates_of(choices)])


def templates_of(choices: FeatureChoices) -> tuple[str, ...]:
    """The templates asked for: of the sets named, of files with one a line, and as they were typed."""
    words: list[str] = []
    for asked in choices.templates:
        file = Path(asked)
        if asked not in TEMPLATE_SETS and "{}" not in asked and file.is_file():
            words += [line.strip() for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
        else:
            words.append(asked)
    return chosen_templates(words, _sets(words))


def _sets(words: Sequence[str]) -> Mapping[str, Sequence[str]]:
    if not any(word in TEMPLATE_SETS and word != "photo" for word in words):
        return dict.fromkeys(TEMPLATE_SETS, ()) | {"photo": PHOTO}
    from vitlens.models.sources.open_clip import template_sets

    return {"photo": PHOTO, **template_sets()}


def keep_language(
    folder: RunFolder,
    models: Sequence[Model],
    sets: Sequence[Sets],
    tests: Sequence[Features],
    choices: FeatureChoices,
    options: RunOptions,
) -> None:
    """Zero-shot accuracy by template and of their ensemble, and maps for the prompts, of models with a text tower."""
    rows: list[dict[str, object]] = []
    silent: list[dict[str, object]] = []
    for model, own, test in zip(models, sets, tests):
        if not has_text_tower(model):
            continue
        end = f"/{model.alias}" if len(models) > 1 else ""
        if own.test.labels is not None and own.test.classes:
            try:
                scores = _scored(model, own.test, test, choices, options)
            except (
                ModelError
            ) as error:  # a tokenizer that is not there; nobody asked for prompts, or it had been refused
                silent.append({"model": model.alias, "reason": str(error)})
            else:
                folder.metric(f"zero_shot_accuracy{end}", scores[0].accuracy)
                rows += [{"model": model.alias, **_row(score)} for score in scores]
        if choices.prompts:
            _keep_prompts(folder, model, own.shown or own.test, choices, options)
    for name, content in (("templates", rows), ("silent", silent)):
        if content:
            folder.table(name, content)


def _scored(
    model: Model, split: Split, test: Features, choices: FeatureChoices, options: RunOptions
) -> tuple[TemplateScore, ...]:
    assert split.labels is not None  # the caller has looked
    templates, names = templates_of(choices), prompt_names(split.classes)
    parts = []
    with progress(
        f"Reading prompts by {model.alias}", len(templates), unit="templates", quiet=options.quiet
    ) as advance:
        for template in templates:
            parts.append(by_template(text_tower(model), names, [template], device=model.device).cpu())
            advance(1)
    return template_scores(
        test.logits, split.labels, torch.cat(parts), templates, groups=split.groups, seed=options.seed
    )


def _row(score: TemplateScore) -> dict[str, object]:
    found, gain = score.accuracy, score.gain
    row: dict[str, object] = {"template": score.template, "accuracy": found.value, "low": found.low, "high": found.high}
    row |= {"n": found.n, "p": score.p, "p_holm": score.p_holm}
    if gain is not None:
        row |= {"gain": gain.value, "gain_low": gain.low, "gain_high": gain.high}
    return row


def _keep_prompts(folder: RunFolder, model: Model, split: Split, choices: FeatureChoices, options: RunOptions) -> None:
    """Relevance of each prompt over a few images, and how similar image and prompt are."""
    first = torch.arange(min(SHOWN, len(split)))
    chosen = first if choices.show else some(len(split), SHOWN, labels=split.labels, seed=options.seed)
    (batch,) = split.pick(chosen).batches(max(1, len(chosen)), device=model.device)
    asking = prompted(model, choices.prompts)
    maps = []
    for index in range(len(choices.prompts)):
        targets = torch.full((len(chosen),), index, device=model.device)
        maps.append(relevance(asking, batch.images, targets=targets).float().cpu())
    with torch.no_grad():
        logits = asking(batch.images).float().cpu()
    tower = text_tower(model)
    folder.arrays(
        f"prompts-{model.alias}",
        pixels=pixels(split, chosen).numpy(),
        names=np.array(names_of(split, chosen)),
        prompts=np.array(list(choices.prompts)),
        maps=torch.stack(maps, 1).numpy(),
        cosine=((logits - tower.bias) / tower.scale).numpy(),
    )
