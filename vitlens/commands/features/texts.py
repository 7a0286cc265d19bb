"""Language-image models: zero-shot classification, and the relevance of images for prompts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitlens.analysis.attention.chain import require_chain
from vitlens.analysis.attention.methods import relevance
from vitlens.analysis.features.features import Features
from vitlens.analysis.features.rows import TemplateRow
from vitlens.analysis.features.zero_shot import chosen_templates, template_rows
from vitlens.commands.features.images import Subject, batch_of, names_of
from vitlens.commands.features.options import FeaturesOptions
from vitlens.commands.features.record import PromptRow
from vitlens.commands.run.progress import progress
from vitlens.errors import ModelError
from vitlens.models.language_image import (
    PHOTO,
    PLACE,
    by_template,
    has_prompts,
    has_text_tower,
    is_language_image,
    prompt_names,
    similarities,
    text_tower,
    with_prompts,
    with_text,
)
from vitlens.models.model import Model
from vitlens.names import TEMPLATE_SETS

_CLASS: Final = "{}"  # placeholder of the class in a template
_BATCH: Final = 64  # images
_DEFAULT_TEMPLATES: Final = next(
    field.default for field in fields(FeaturesOptions) if field.name == "templates"
)


def require_texts(models: Sequence[Model], options: FeaturesOptions) -> None:
    """Raise an error if prompts or templates are given that no model, or not every tokenizer, can
    read.
    """
    has_templates = options.templates != _DEFAULT_TEMPLATES
    with_texts = [model for model in models if has_text_tower(model)]
    if (options.prompts or has_templates) and not with_texts:
        text_tower(models[0])  # raises an error that names models with a text tower
    for model in with_texts:
        if options.prompts:
            text_tower(model).tokens(list(options.prompts))
            require_chain(model)
        if has_templates:
            text_tower(model).tokens(
                [template.replace(_CLASS, "thing") for template in _templates(options)]
            )


def _templates(options: FeaturesOptions) -> tuple[str, ...]:
    """Return the templates of the options: of named sets, of files with one per line, and as
    typed."""
    texts: list[str] = []
    for name in options.templates:
        file = Path(name)
        if name not in TEMPLATE_SETS and _CLASS not in name and file.is_file():
            lines = [line.strip() for line in file.read_text("utf-8").splitlines()]
            texts += [line for line in lines if line]
        else:
            texts.append(name)
    sets: Mapping[str, Sequence[str]] = dict.fromkeys(TEMPLATE_SETS, ())
    if set(texts) & set(TEMPLATE_SETS) - {"photo"}:
        from vitlens.models.sources.open_clip import template_sets

        sets = template_sets()
    return chosen_templates(texts, {**sets, "photo": PHOTO})


@dataclass(frozen=True)
class ZeroShot:
    """The zero-shot accuracy of the ensemble of templates and of each template.

    reason: for missing rows; "" for a model without a text tower or for images without labels.
    """

    rows: tuple[TemplateRow, ...] = ()
    reason: str = ""

    def fields(self, classes: int) -> dict[str, Any]:
        """Return the fields of FeaturesRow about zero-shot classification among this many
        classes."""
        if not self.rows:
            return {"no_zero_shot": self.reason}
        return {"zero_shot": self.rows[0].accuracy, "candidates": classes, "chance": 1 / classes}


def classify_zero_shot(subject: Subject, test: Features) -> ZeroShot:
    """Classify the test images by the names of their classes."""
    split = subject.test
    if not has_text_tower(subject.model) or split.labels is None or not split.classes:
        return ZeroShot()
    try:
        templates = _templates(subject.options)
        embeddings = _embed_classes(subject, templates)
    except ModelError as error:  # no tokenizer; with --prompt an error was raised before
        return ZeroShot(reason=str(error))
    rows = template_rows(
        subject.alias,
        _embed_images(subject, test),
        split.labels,
        embeddings,
        templates,
        groups=split.groups,
        seed=subject.seed,
    )
    return ZeroShot(rows)


def unknown_words_note(subject: Subject) -> str:
    """Return a note on words of the prompts that the text tower was not trained on; "" for none."""
    if not has_text_tower(subject.model):
        return ""
    texts = list(subject.options.prompts)
    if subject.test.labels is not None and subject.test.classes:
        texts += [*_templates(subject.options), *prompt_names(subject.test.classes)]
    unknown = text_tower(subject.model).unknown_words(texts)
    if not unknown:
        return ""
    words = ", ".join(repr(word) for word in unknown)
    return (
        f"The captions on which {subject.alias} was trained lack {words}: its text tower has not "
        "learned what that means"
    )


def _embed_images(subject: Subject, test: Features) -> Tensor:
    """Return the embeddings of the test images: the outputs of a model without a classifier, those
    of another pass of one with a classifier.
    """
    model = subject.model
    if is_language_image(model) and not has_prompts(model):
        return test.logits
    tower = with_prompts(model, (), None)
    parts = []
    for batch in subject.test.batches(subject.options.run.batch_size or _BATCH):
        with torch.no_grad():
            parts.append(tower(batch.images.to(model.device)).float().cpu())
    return torch.cat(parts)


def _embed_classes(subject: Subject, templates: Sequence[str]) -> Tensor:
    """Return the embeddings of all classes by each template, on the CPU."""
    model = subject.model
    tower = text_tower(model)
    names = prompt_names(subject.test.classes)
    embeddings = []
    what = f"Reading prompts by {subject.alias}"
    with progress(
        what, len(templates), unit="templates", quiet=subject.options.run.quiet
    ) as advance:
        for template in templates:
            embeddings.append(by_template(tower, names, [template], device=model.device).cpu())
            advance(1)
    return torch.cat(embeddings)


@dataclass(frozen=True)
class PromptRelevance:
    """The similarity of drawn images to each prompt, and maps of its relevance (images, prompts,
    rows, columns).
    """

    rows: tuple[PromptRow, ...] = ()
    maps: NDArray[np.floating] | None = None


def explain_prompts(subject: Subject) -> PromptRelevance:
    """Return the relevance of the drawn images for each prompt.

    Returns nothing without prompts or a text tower.
    """
    model = subject.model
    prompts = subject.options.prompts
    if not prompts or not has_text_tower(model):
        return PromptRelevance()
    indices = subject.indices_to_draw
    images = batch_of(subject.to_draw, indices, model)
    classifier = with_text(model, prompts, templates=(PLACE,))
    maps = []
    for prompt in range(len(prompts)):
        targets = torch.full((len(indices),), prompt, device=model.device)
        maps.append(relevance(classifier, images, targets=targets).float().cpu())
    with torch.no_grad():
        cosines = similarities(classifier, classifier(images)).cpu()
    rows = []
    for image, name in enumerate(names_of(subject.to_draw, indices)):
        for number, prompt_text in enumerate(prompts):
            rows.append(
                PromptRow(subject.alias, image, name, prompt_text, float(cosines[image, number]))
            )
    return PromptRelevance(tuple(rows), torch.stack(maps, 1).numpy())
