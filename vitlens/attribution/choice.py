"""`vitlens.choose_method`: the attribution method for a model and images, by two quick checks on the images themselves.

One check is insertion minus deletion, the other localisation (ROC-AUC): on the objects where masks are known, else on
2 x 2 mosaics of the images, whose classes are the model's confident predictions. Mosaics are made of images of one half
alone, and the maps of an image in several mosaics count as one value.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from vitlens.analysis.answers.evaluate import accuracy, answers
from vitlens.analysis.answers.targets import class_targets
from vitlens.analysis.faithfulness.checks import ENOUGH
from vitlens.analysis.faithfulness.choice import LEAST, Indices, MethodChoice, choose, groups_with, halves
from vitlens.analysis.faithfulness.composites import Composites, confident_images, recognised
from vitlens.analysis.faithfulness.defaults import BASELINES, COMPOSITE_KINDS, FEWEST, CompositeKind
from vitlens.analysis.faithfulness.league import explained
from vitlens.analysis.faithfulness.localisation import has_edge, roc_auc
from vitlens.analysis.faithfulness.maps import Explain
from vitlens.analysis.faithfulness.removal import faithfulness, resized
from vitlens.attribution.explain import explain, methods_for, preferred_method, require_method
from vitlens.attribution.refinement import Refinement, require_refinement
from vitlens.attribution.registry import ATTRIBUTIONS
from vitlens.data.split import Split, as_split, takes_splits
from vitlens.devices import evaluating
from vitlens.errors import InputError
from vitlens.models.model import Model
from vitlens.models.support import needs_of, require
from vitlens.names import DEFAULT_SEED, Engine, Substrate
from vitlens.pixels import AnyImages, Targets
from vitlens.shapes import Images, Labels, Logits, Maps
from vitlens.uncertainty import Side, beyond

MOST: Final = 6  # candidates, where none are named
IMAGES: Final = 40  # of both halves together, at most
STEPS: Final = 6  # of the removal curves, which take most of the time
MOSAICS: Final = 12  # of each half, at most
REPLACED: Final[Substrate] = "mean"  # what removed patches become: not the blur by which `best` itself chooses
KIND: Final = "mosaic-2"  # of the composites
REFERENCES: Final = ("relevance", "gradcam")  # with which the chosen method is compared where they are candidates
FAITHFULNESS, LOCALISATION = "insertion_minus_deletion", "localisation"  # the checks

Values = Float[Tensor, "methods images"]


@takes_splits
def choose_method(
    model: Model,
    images: AnyImages,
    *,
    targets: Targets = "predicted",
    methods: Sequence[str] | None = None,
    refinement: Refinement | None = None,
    engine: Engine = "vitlens",
    batch_size: int | None = None,
    seed: int = DEFAULT_SEED,
) -> MethodChoice:
    """The attribution method whose maps do best on one half of these images, judged on the other half.

    images: a Split, or any form that `vitlens.images` takes; at most 40 are used, drawn by the seed, and with fewer
    than 20 (or groups) the result is the model's default method, with the reason. targets: "predicted", "label", a
    class, or class indices (n,); methods: candidates (None: the first six of the registry's that the model supports);
    refinement, engine: as for `vitlens.explain`. Raises UnsupportedError for a model without a classifier, and for a
    method that it does not have, InputError for fewer than two candidates.

    >>> import vitlens
    >>> vit, digits = vitlens.load("vit-digits"), vitlens.load_data("digits", limit=20)
    >>> choice = vitlens.choose_method(vit, digits, methods=["relevance", "gradcam"])
    >>> choice.method, choice.runner_up, len(choice.selection), len(choice.report)
    ('relevance', 'gradcam', 10, 10)
    """
    split = as_split(images)
    require(model, *needs_of("explain"))
    names = candidates_for(model, methods, refinement=refinement, engine=engine)
    classes = class_targets(targets, model, len(split), split=split)

    def function(name: str) -> Explain:
        return lambda model, images, targets: explain(
            model,
            images,
            targets=targets,
            method=name,
            refinement=refinement,
            engine=engine,
            batch_size=batch_size,
            seed=seed,
        )

    functions = {name: function(name) for name in names}
    return chosen_by_evidence(model, split, classes, functions, batch_size=batch_size, seed=seed)


def candidates_for(
    model: Model,
    methods: Sequence[str] | None = None,
    *,
    refinement: Refinement | None = None,
    engine: Engine = "vitlens",
) -> tuple[str, ...]:
    """The methods to choose from. methods: their names; None: the first MOST of the registry's candidates that the
    model, the engine and the refinement support. Raises what `choose_method` raises."""
    model.require_classifier()
    refinement = refinement or Refinement()
    for name in methods or ():
        require_method(model, name, engine=engine)
        require_refinement(model, name, refinement)
    names = tuple(dict.fromkeys(methods or _ranked(model, refinement, engine)))
    if len(names) < 2:
        raise InputError(
            f"expected at least 2 candidates to choose from for {model.alias}, found {', '.join(names) or 'none'}; "
            "name two methods or more, or leave out the choice"
        )
    return names


def _ranked(model: Model, refinement: Refinement, engine: Engine) -> Iterator[str]:
    """The registry's candidates that apply, by rank, at most MOST."""
    supported = methods_for(model, engine=engine)
    ranked = sorted((entry.candidate, name) for name, entry in ATTRIBUTIONS.items() if entry.candidate is not None)
    found = 0
    for _, name in ranked:
        try:
            require_refinement(model, name, refinement)
        except InputError:
            continue
        if name in supported and found < MOST:
            found += 1
            yield name


def chosen_by_evidence(
    model: Model,
    split: Split,
    targets: Labels | None,
    functions: Mapping[str, Explain],
    *,
    batch_size: int | None = None,
    seed: int = DEFAULT_SEED,
    advance: Callable[[int], object] = lambda _: None,
) -> MethodChoice:
    """The choice between methods given as functions of (model, images, targets). targets: class indices (n,), None for
    the predictions; advance: called with the number of methods just done, in each of the two checks."""
    order = torch.randperm(len(split), generator=torch.Generator().manual_seed(seed))[:IMAGES].sort().values
    used = split.pick(order)
    found = len(used) if used.groups is None else len(used.groups.unique())
    if found < LEAST:
        what = "images" if used.groups is None else "groups of images"
        reason = f"expected at least {LEAST} {what} to choose by, found {found}"
        method = preferred_method(model)
        default = method if method in functions else next(iter(functions))
        return MethodChoice(default, tuple(functions), reason, seed=seed)
    logits = answers(model, used, batch_size=batch_size).float().cpu()
    classes = logits.argmax(-1) if targets is None else targets.cpu()[order]
    (batch,) = used.batches(len(used), device=model.device)
    subject = _Subject(model, batch.images, classes, logits, functions, seed, advance)
    parts = halves(len(used), used.groups, seed=seed)
    maps = subject.maps(subject.images, classes)
    values = {FAITHFULNESS: subject.faithfulness(maps, batch_size)}
    located, obstacle = (_on_objects(maps, used.masks), "") if used.masks is not None else _on_mosaics(subject, parts)
    least = min(groups_with(located, part, used.groups) for part in parts)
    if not obstacle and least < ENOUGH:
        what = "images with a mask" if used.masks is not None else "confidently classified images"
        obstacle = f"expected at least {ENOUGH} {what} in each half, found {least}"
    if not obstacle:
        values[LOCALISATION] = located
    choice = choose(values, tuple(functions), BASELINES, parts, references=REFERENCES, groups=used.groups, seed=seed)
    return replace(
        choice,
        left_out={LOCALISATION: obstacle} if obstacle else {},
        localised="objects" if used.masks is not None else KIND,
        selection=tuple(order[parts[0]].tolist()),
        report=tuple(order[parts[1]].tolist()),
    )


@dataclass(frozen=True)
class _Subject:
    """A model, its images on its device, the classes that are explained, the predictions, and the candidates."""

    model: Model
    images: Images
    classes: Labels
    logits: Logits
    functions: Mapping[str, Explain]
    seed: int
    advance: Callable[[int], object]

    def maps(self, images: Images, targets: Labels) -> dict[str, Maps]:
        """The maps of every candidate and baseline."""
        return explained(self.model, self.functions, images, targets, seed=self.seed, advance=self.advance)

    def faithfulness(self, maps: Mapping[str, Maps], batch_size: int | None) -> Values:
        """Insertion minus deletion of every method, image by image."""
        curves = faithfulness(
            self.model,
            self.images,
            self.classes.to(self.model.device),
            [own.to(self.model.device) for own in maps.values()],
            substrate=REPLACED,
            steps=STEPS,
            seed=self.seed,
            batch_size=batch_size,
        )
        return torch.stack([each.gaps for each in curves]).cpu()


def _on_objects(maps: Mapping[str, Maps], masks: Tensor) -> Values:
    """ROC-AUC on the objects, NaN for an image without an object or background."""
    known = has_edge(masks.cpu())
    values = torch.full((len(maps), len(known)), torch.nan)
    if bool(known.any()):
        values[:, known] = torch.stack([roc_auc(own[known], masks.cpu()[known]) for own in maps.values()])
    return values


def _on_mosaics(subject: _Subject, parts: tuple[Indices, Indices]) -> tuple[Values, str]:
    """ROC-AUC on the cell of each explained image, its mean over the mosaics of its half; and why it judges nothing."""
    kind, images = COMPOSITE_KINDS[KIND], resized(subject.model, subject.images)
    values = torch.full((len(subject.functions) + len(BASELINES), len(images)), torch.nan)
    mosaics: list[tuple[Indices, Composites]] = []
    for part in parts:
        labels = subject.logits[part].argmax(-1)
        usable = confident_images(subject.logits[part], labels)
        classes = len(labels[usable].unique())
        if classes < max(FEWEST, kind.classes):
            return values, (
                f"expected confidently classified images of at least {kind.classes} classes in each half, found "
                f"{len(usable)} images of {classes}"
            )
        own = images[part[usable].to(images.device)]
        made = kind.make(own, labels[usable], count=MOSAICS, seed=subject.seed)
        mosaics.append((part[usable], made))
    unseen = _unseen(subject.model, [made for _, made in mosaics], kind)
    for used, made in mosaics if not unseen else ():
        maps = subject.maps(made.images[made.which.to(made.images.device)], made.targets)
        scores = torch.stack([roc_auc(own, made.masks) for own in maps.values()])
        explained = F.one_hot(made.sources.flatten(), len(used)).float()  # (maps, used): each cell is explained in turn
        counts = explained.sum(0)
        values[:, used] = (scores @ explained) / counts  # NaN for an image that is in no mosaic
    return values, unseen


def _unseen(model: Model, mosaics: Sequence[Composites], kind: CompositeKind) -> str:
    """Why mosaics judge no maps, "" where the model names their classes better than by guessing."""
    every = torch.cat([made.images for made in mosaics])
    with evaluating(model), torch.no_grad():
        logits = model(every).float().cpu()
    which = torch.arange(len(every)).repeat_interleave(kind.explained)
    named = recognised(logits[which], torch.cat([made.targets for made in mosaics]), kind.classes)
    share, guessed = accuracy(named, groups=which), min(1.0, kind.classes / len(model.classes))
    if beyond(share, guessed) is Side.ABOVE:
        return ""
    return (
        f"{model.alias} names {100 * share.value:.0f} % of the classes of mosaics, not significantly more than "
        f"by guessing ({100 * guessed:.0f} %)"
    )
