"""What the latents of a dictionary stand for: classes that they separate, tested by intervention.

A latent is named as a head is (naming/writes.py). Its score for an image is its mean over the
patches, and its label is the class or attribute of the highest AUC. The label is tested by setting
the latent to zero. It is confirmed if the log-odds of the class label then fall more in images with
the label than in others.

An attribute may have the name of a class as its value, such as "hue = 3". It points to that class,
and the log-odds are those of that class: a cue that misleads costs the true label nothing.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Final, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from vitlens.analysis.ablation.outcomes import Outcomes
from vitlens.analysis.dictionary.dictionary import Dictionary
from vitlens.analysis.dictionary.measures import Activity, activity
from vitlens.analysis.dictionary.rows import STATES, ClassLatentRow, LatentRow
from vitlens.analysis.dictionary.tokens import read_tokens
from vitlens.analysis.evaluation.evaluate import fitting_batch_size
from vitlens.analysis.evaluation.log_odds import log_odds
from vitlens.analysis.naming.rows import OfHead
from vitlens.analysis.naming.writes import (
    FEWEST,
    Writes,
    at_random,
    means_by_source,
    source_count,
    tested_concepts,
    writes,
)
from vitlens.classes import label_columns
from vitlens.data.catalogue import read_split
from vitlens.errors import InputError
from vitlens.inputs import with_labels
from vitlens.lens.capture import capture
from vitlens.lens.replay import replay
from vitlens.models.model import Model
from vitlens.pixels import AnyImages, Parts, Streamed
from vitlens.shapes import Images
from vitlens.summary import Line, Table
from vitlens.uncertainty import Estimate, mean_points, student_mean, welch

TESTED: Final = 32  # latents that are removed and doubled, by default
MATTERING: Final = 10  # most latents that are listed for a class
PUSHED: Final = 3  # most classes that are listed for a latent
TWICE: Final = 2.0  # the factor that doubles a latent
VALUE: Final = " = "  # between the name of an attribute and its value, "hue = 3"
_LATENTS_AT_ONCE: Final = 8  # latents of which changed tokens are in memory
_AT_ONCE: Final = 16  # images of which gradients are in memory, for all patches and latents

Advance = Callable[[int], object]


@dataclass(frozen=True, eq=False)
class LabelledImages:
    """Images with the classes and attributes that latents may stand for.

    images: the images.
    labels (n,): the classes, as columns of the logits.
    attributes: attributes by name, (n,) True or False.
    groups (n,): the source of each image, None if images are independent.
    """

    images: Parts
    labels: Int[Tensor, " images"]
    attributes: Mapping[str, Tensor] = field(default_factory=dict)
    groups: Tensor | None = None


def estimated_effects(
    dictionary: Dictionary, sample: LabelledImages, advance: Advance = lambda _: None
) -> Float[Tensor, "images latents"]:
    """Return the fall of the log-odds of each image's label without each latent, to first order.

    It is the gradient of the log-odds along a latent's direction times the latent, summed over
    patches (attribution patching, Nanda 2023). One pass serves all latents.
    """
    model = dictionary.model
    effects = []
    for start in range(0, len(sample.images), _AT_ONCE):
        rows = slice(start, min(start + _AT_ONCE, len(sample.images)))
        images = sample.images[rows].to(model.device)
        captured = capture(model, images, dictionary.patches, graph=True)
        tokens = captured[dictionary.patches]
        odds = log_odds(captured.logits, sample.labels[rows])
        (gradient,) = torch.autograd.grad(odds.sum(), tokens)
        latents = dictionary.encode(tokens.detach())  # (images, patches, latents)
        gradient_of_latents = gradient.float() @ dictionary.autoencoder.directions.T
        effects.append((gradient_of_latents * latents).sum(1).cpu())
        advance(len(images))
    return torch.cat(effects)


class _Outcome(NamedTuple):
    """What the model says of all images, with one latent changed or none.

    logits: the logits.
    log_odds: the log-odds of each image's label.
    correct (images,): True if the label is predicted.
    """

    logits: Float[Tensor, "images classes"]
    log_odds: Float[Tensor, " images"]
    correct: Tensor


def _outcome(logits: Float[Tensor, "images classes"], sample: LabelledImages) -> _Outcome:
    return _Outcome(
        logits=logits,
        log_odds=log_odds(logits, sample.labels),
        correct=logits.argmax(1) == sample.labels,
    )


@dataclass(frozen=True, eq=False)
class _Tests:
    """The outcomes of the tests of some latents.

    clean: the outcome of the unchanged model.
    removed: the outcome without each latent.
    doubled: the outcome with twice each latent.
    """

    clean: _Outcome
    removed: list[_Outcome]
    doubled: list[_Outcome]


def _changes(
    dictionary: Dictionary, images: Images, latents: Sequence[int]
) -> Iterator[list[dict[str, Tensor]]]:
    """Yield the changes of tokens that remove each latent and double it, some latents at a time.

    For each latent there are two changes, without it and with twice of it, each by place. The
    tokens are encoded once.
    """
    place = dictionary.patches
    tokens = capture(dictionary.model, images, place)[place]
    encoded = dictionary.encode(tokens)
    for start in range(0, len(latents), _LATENTS_AT_ONCE):
        changes = []
        for latent in latents[start : start + _LATENTS_AT_ONCE]:
            # what the latent adds to each token (images, patches, dim)
            added = encoded[..., latent, None] * dictionary.directions[latent]
            changes.append({place: tokens - added})
            changes.append({place: tokens + (TWICE - 1) * added})
        yield changes


def _run_tests(
    dictionary: Dictionary, sample: LabelledImages, latents: Sequence[int], advance: Advance
) -> _Tests:
    """Remove and double every latent, in one replay for each batch from the dictionary's layer on.

    advance: called with the number of images just done.
    """
    model = dictionary.model
    size = fitting_batch_size(model)
    clean_parts = []
    changed_parts = []
    for start in range(0, len(sample.images), size):
        images = sample.images[start : start + size].to(model.device)
        with replay(model, images) as run:
            clean_parts.append(run.logits.float().cpu())
            changed_logits = []  # (changes, images, classes), for some latents at a time
            for changes in _changes(dictionary, images, latents):
                changed_logits.append(run.run(changes).float().cpu())
            changed_parts.append(torch.cat(changed_logits))
        advance(len(images))
    clean = _outcome(torch.cat(clean_parts), sample)
    outcomes = [_outcome(logits, sample) for logits in torch.cat(changed_parts, 1)]
    # the changes of each latent follow each other: without it, then with twice of it
    return _Tests(clean, removed=outcomes[::2], doubled=outcomes[1::2])


@dataclass(frozen=True, eq=False, repr=False)
class NamedLatents(Table):
    """The tested latents in order of their effect, and the latents that matter for each class."""

    latents: tuple[LatentRow, ...]
    classes: tuple[ClassLatentRow, ...]
    notes: tuple[str, ...] = ()

    def summary(self) -> Iterator[Line]:
        """Yield how many latents were tested, and how many have each state."""
        yield Line("latents", len(self.latents))
        for state in dict.fromkeys(STATES.values()):
            yield Line(state, sum(row.state == state for row in self.latents))
        for note in self.notes:
            yield Line("note", note)

    def records(self) -> Iterator[dict[str, object]]:
        """Yield a row for each tested latent."""
        for row in self.latents:
            yield asdict(row)


def name_latents(
    sae: Dictionary,
    images: AnyImages,
    labels: Tensor | None = None,
    *,
    attributes: Mapping[str, Tensor] | None = None,
    tested: int = TESTED,
    chosen: Sequence[int] = (),
    seed: int = 0,
) -> NamedLatents:
    """Return what the latents of a dictionary stand for, each label tested by an intervention.

    images: images that the dictionary was not trained on, in any form that `vitlens.images` takes.
    labels: class indices (n,) (None: those of the Split or the class folders).
    attributes: attributes of the images by name, (n,) True or False.
    tested: the number of latents that are tested: those with the largest estimated effects.
    chosen: latents that are tested in any case.
    seed: the seed of the control with permuted labels.

    Raises DataError for images without labels.

    >>> import torch, vitlens
    >>> vit = vitlens.load("vit-digits")
    >>> digits = vitlens.load_data("digits", limit=40)
    >>> plan = vitlens.DictionaryPlan(k=4, expansion=1, tokens=4096)
    >>> sae = vitlens.fit_sae(vit, digits, "blocks.2.residual", plan)
    >>> names = vitlens.name_latents(sae, digits, tested=2)
    >>> len(names.latents), names.latents[0].state in ("confirmed", "correlates", "several", "none")
    (2, True)
    """
    model = sae.model
    model.require_classifier()
    split = with_labels(read_split(images, model.preprocessing), labels, model)
    columns = label_columns(model.classes, split)
    for latent in chosen:
        require_latent(latent, len(sae))
    with torch.inference_mode(mode=False):  # effects are estimated by gradients
        latent_activity = activity(sae.autoencoder, read_tokens(model, split, sae.place))
        sample = LabelledImages(
            images=Streamed(split, model.pixel_dtype),
            labels=columns,
            attributes=attributes or {},
            groups=split.groups,
        )
        return label_latents(sae, sample, latent_activity, tested=tested, chosen=chosen, seed=seed)


def label_latents(
    dictionary: Dictionary,
    sample: LabelledImages,
    of_images: Activity,
    *,
    tested: int = TESTED,
    chosen: Sequence[int] = (),
    seed: int = 0,
    monosemanticity: Tensor | None = None,
    estimating: Advance = lambda _: None,
    advance: Advance = lambda _: None,
) -> NamedLatents:
    """Return the chosen latents and those with the largest estimated effects, named and tested.

    of_images: the activity of the dictionary on these images.
    tested, chosen, seed: see `name_latents`.
    monosemanticity (latents,): scores for the rows.
    estimating: called with the number of images just done while effects are estimated.
    advance: called with the number of images just done while latents are tested.
    """
    effects = estimated_effects(dictionary, sample, estimating)
    mean_size = effects.abs().mean(0)
    order = mean_size.argsort(descending=True, stable=True).tolist()
    active = [latent for latent in order if float(of_images.frequency[latent]) > 0]
    chosen = list(dict.fromkeys(chosen))
    different = list(dict.fromkeys((*chosen, *active)))
    latents = different[: max(tested, len(chosen))]
    classes = tuple(_class_rows(dictionary, sample, effects))
    if not latents:  # a dead dictionary
        return NamedLatents(latents=(), classes=classes, notes=("no latent is active",))
    tests = _run_tests(dictionary, sample, latents, advance)
    labels, note = _labels(dictionary, sample, of_images, latents, tests, seed)
    rows = []
    for index, latent in enumerate(latents):
        fields = _fields_of_effect(
            dictionary, sample, of_images, latent, tests.clean, tests.removed[index]
        )
        if labels:
            fields |= _fields_of_label(
                labels[index], sample, tests.clean, tests.doubled[index], dictionary.model
            )
        if monosemanticity is not None and bool(monosemanticity[latent].isfinite()):
            fields["monosemanticity"] = float(monosemanticity[latent])
        rows.append(LatentRow(**fields))  # type: ignore[arg-type]
    rows.sort(key=lambda row: -abs(row.effect.value) if row.effect else 0.0)
    notes = (note,) if note else ()
    return NamedLatents(latents=tuple(rows), classes=classes, notes=notes)


def _labels(
    dictionary: Dictionary,
    sample: LabelledImages,
    of_images: Activity,
    latents: Sequence[int],
    tests: _Tests,
    seed: int,
) -> tuple[list[Writes], str]:
    """Return the label of every tested latent, and "". Without concepts: no labels, and a note."""
    classes = dictionary.model.classes
    concepts = tested_concepts(sample.labels, classes, sample.attributes, sample.groups)
    if not concepts.classes and not concepts.attributes:
        return [], (
            f"latents are not named: no class or attribute is present in {FEWEST} images "
            f"and absent from {FEWEST} others"
        )
    columns = [sample.labels == number for number in concepts.classes]
    columns += [sample.attributes[name].bool() for name in concepts.attributes]
    truth = torch.stack(columns, 1)
    # (images, latents, concepts): a latent has the same score for all concepts
    scores = of_images.mean[:, list(latents), None].expand(-1, -1, truth.shape[1])
    # The outcomes without each latent, as `writes` takes those without heads. It reads only the
    # labels, the log-odds and `correct`.
    outcomes = Outcomes(
        sets=tuple(() for _ in latents),
        replace="zero",
        labels=sample.labels,
        clean_log_odds=tests.clean.log_odds,
        clean_correct=tests.clean.correct,
        log_odds=torch.stack([outcome.log_odds for outcome in tests.removed]),
        correct=torch.stack([outcome.correct for outcome in tests.removed]),
        forward_equivalents=0.0,
    )
    names = [*(classes[number] for number in concepts.classes), *concepts.attributes]
    # latents take the place of heads; the layer is not used
    units = [OfHead(model=dictionary.model.alias, layer=0, head=latent) for latent in latents]
    control = at_random(scores, truth, sample.groups, seed=seed)
    falls_of_pointed_class = {}  # by the index of the concept, (latents, images)
    for concept, name in enumerate(names):
        target = _class_of(name, sample, classes)
        if target is not None:
            clean = _odds_of(tests.clean, target)
            falls = [clean - _odds_of(outcome, target) for outcome in tests.removed]
            falls_of_pointed_class[concept] = torch.stack(falls)
    labels = writes(
        units,
        scores,
        truth,
        names,
        outcomes,
        control=control,
        groups=sample.groups,
        pointed=falls_of_pointed_class,
    )
    return labels, ""


def _class_of(name: str, sample: LabelledImages, classes: Sequence[str]) -> int | None:
    """Return the index of the class to which an attribute points; None for none.

    "hue = 3" points to the class "3".
    """
    if name not in sample.attributes or VALUE not in name:
        return None
    value = name.split(VALUE)[-1]
    if value not in classes:
        return None
    return classes.index(value)


def _odds_of(outcome: _Outcome, target: int) -> Tensor:
    """Return the log-odds of one class in all images."""
    return log_odds(outcome.logits, torch.full((len(outcome.logits),), target))


def _fields_of_effect(
    dictionary: Dictionary,
    sample: LabelledImages,
    of_images: Activity,
    latent: int,
    clean: _Outcome,
    removed: _Outcome,
) -> dict[str, object]:
    """Return the fields of a latent's row that need no label."""
    is_active = of_images.largest[:, latent] > 0
    groups = None if sample.groups is None else sample.groups[is_active]
    fields: dict[str, object] = {
        "model": dictionary.model.alias,
        "latent": latent,
        "frequency": float(of_images.frequency[latent]),
        "images": float(is_active.double().mean()),
    }
    if not bool(is_active.any()):
        return fields
    falls = (clean.log_odds - removed.log_odds)[is_active]
    points = 100 * (clean.correct.double() - removed.correct.double())[is_active]
    fields["effect"] = student_mean(falls.numpy(), groups=groups, unit="nats")
    fields["lost"] = mean_points(points.numpy(), groups=groups)
    # what the latent adds to the logit of each class, beyond the mean of all classes
    pushes = (clean.logits - removed.logits)[is_active].mean(0)
    pushes = pushes - pushes.mean()
    largest = pushes.topk(min(PUSHED, len(pushes)))
    pushed = list[str]()
    for number, push in zip(largest.indices.tolist(), largest.values.tolist()):
        if push > 0:
            pushed.append(dictionary.model.classes[number])
    fields["pushes"] = tuple(pushed)
    return fields


def _fields_of_label(
    label: Writes,
    sample: LabelledImages,
    clean: _Outcome,
    doubled: _Outcome,
    model: Model,
) -> dict[str, object]:
    """Return the fields of a latent's row that come from its label and its tests."""
    fields: dict[str, object] = {
        "state": STATES[label.state],
        "word": label.word,
        "best": label.best,
        "auc": label.auc,
        "control": label.control,
        "margin": label.margin,
        "p": label.p,
    }
    if label.word is None:
        return fields
    has_any = torch.zeros(len(sample.labels), dtype=torch.bool)  # of the concepts of the label
    for name in label.alike:
        if name in sample.attributes:
            has_any |= sample.attributes[name].bool()
        else:
            has_any |= sample.labels == model.classes.index(name)
    rises = doubled.log_odds - clean.log_odds
    if len(label.alike) == 1:
        target = _class_of(label.alike[0], sample, model.classes)
        if target is not None:
            fields["points_to"] = model.classes[target]
            rises = _odds_of(doubled, target) - _odds_of(clean, target)
    fields["gain"] = _margin(rises, has_any, sample.groups)
    return fields


def _margin(rises: Tensor, has: Tensor, groups: Tensor | None) -> Estimate | None:
    """Return the mean of images with a label minus that of the others; None for too few."""
    if min(source_count(has, groups), source_count(~has, groups)) < FEWEST:
        return None
    margin, _ = welch(
        means_by_source(rises, has, groups), means_by_source(rises, ~has, groups), unit="nats"
    )
    return margin


def _class_rows(
    dictionary: Dictionary, sample: LabelledImages, effects: Float[Tensor, "images latents"]
) -> list[ClassLatentRow]:
    """Return the latents with the largest mean effects on the images of each class."""
    rows = []
    for number in sample.labels.unique().tolist():
        mean = effects[sample.labels == number].mean(0)
        largest = mean.topk(min(MATTERING, len(mean)))
        pairs = zip(largest.indices.tolist(), largest.values.tolist())
        for rank, (latent, effect) in enumerate(pairs, 1):
            if effect <= 0:
                break  # all others are smaller
            rows.append(
                ClassLatentRow(
                    model=dictionary.model.alias,
                    name=dictionary.model.classes[number],
                    rank=rank,
                    latent=latent,
                    effect=effect,
                )
            )
    return rows


def require_latent(latent: int, count: int) -> None:
    """Raise InputError for a number that is not one of `count` latents."""
    if not 0 <= latent < count:
        raise InputError(f"expected a latent from 0 to {count - 1}, found {latent}")
