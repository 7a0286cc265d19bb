"""`vitlens.look`: the prediction for single images, the evidence, and the important heads."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from vitlens.analysis.ablation.bench import Bench
from vitlens.analysis.ablation.units import require_heads, units_of
from vitlens.analysis.evaluation.evaluate import fitting_batch_size
from vitlens.analysis.heads.specialisation import HeadLabel, specialise
from vitlens.analysis.heads.statistics import Statistics, statistics
from vitlens.attribution.explain import explain, preferred_method
from vitlens.devices import evaluating
from vitlens.errors import UnsupportedError
from vitlens.inputs import takes_images
from vitlens.models.language_image import class_scores, shows_phrases, similarities
from vitlens.models.model import Model
from vitlens.names import Replacement
from vitlens.pixels import AnyImages, as_parts
from vitlens.summary import Line, Summary

TOP = 5  # classes of an image
_SHOWN = 6  # images of a summary


@dataclass(frozen=True)
class HeadEffect:
    """One head for one prediction.

    delta_loss: the rise of the loss of the prediction without the head, nats; positive: it supports
        the prediction.
    probability: the probability of the prediction without the head.
    given: the label of the head, which says to what it attends; None where it has none.
    """

    layer: int
    head: int
    delta_loss: float
    probability: float
    given: HeadLabel | None


@dataclass(frozen=True, repr=False)
class Look(Summary):
    """The predictions for n images, with maps of the evidence and the effects of heads.

    names (n, k): the most probable classes, at most five; all classes of a model of phrases.
    classes, probabilities (n, k): their indices and probabilities; of a single phrase its
        similarity.
    method: the method of the maps.
    maps (n, shown, rows, columns): raw, of the first `shown` classes (the prediction and the
        runner-up; one where there is no other; all of a model of phrases).
    similarities (n, k): cosine similarities of phrases, None for other models.
    delta_loss (n, heads): the rise of the loss of the prediction without each head, nats.
    without (n, heads): the probability of the prediction without each head.
    places: (layer, head) of each head, empty for a model without heads.
    replace: the replacement of the output of a head.
    note: a remark on the replacement, or why no head was ablated; "" for a model without heads.
    labels: the labels of the heads, by layer, from these images, empty where there are none.
    statistics: the statistics from which the labels follow, None where there are none.
    """

    names: tuple[tuple[str, ...], ...]
    classes: Int[Tensor, "n k"]
    probabilities: Float[Tensor, "n k"]
    method: str
    maps: Float[Tensor, "n shown rows columns"]
    delta_loss: Float[Tensor, "n heads"]
    without: Float[Tensor, "n heads"]
    places: tuple[tuple[int, int], ...] = ()
    replace: Replacement = "mean"
    note: str = ""
    labels: tuple[tuple[HeadLabel, ...], ...] = ()
    statistics: Statistics | None = None
    similarities: Float[Tensor, "n k"] | None = None

    def heads(self, image: int = 0, *, most: int = 3) -> tuple[HeadEffect, ...]:
        """Return the heads that matter most for the prediction of an image.

        They are those without which its loss rises most, the greatest rise first.
        """
        order = self.delta_loss[image].argsort(descending=True, stable=True).tolist()
        effects = list[HeadEffect]()
        for index in order[:most]:
            layer, head = self.places[index]
            effects.append(
                HeadEffect(
                    layer,
                    head,
                    delta_loss=float(self.delta_loss[image, index]),
                    probability=float(self.without[image, index]),
                    given=self._label(layer, head),
                )
            )
        return tuple(effects)

    def _label(self, layer: int, head: int) -> HeadLabel | None:
        """Return the label of a head, None where it has none."""
        if layer >= len(self.labels) or head >= len(self.labels[layer]):
            return None
        return self.labels[layer][head]

    def _score(self, image: int, rank: int) -> str:
        """Return the probability of a class, with its similarity if it is a phrase."""
        share = f"{100 * float(self.probabilities[image, rank]):.1f} %"
        if self.similarities is None:
            return share
        similarity = f"{float(self.similarities[image, rank]):.3f}"
        return similarity if len(self.names[image]) == 1 else f"{similarity} ({share})"

    def summary(self) -> Iterator[Line]:
        """Yield the prediction of each of the first images with the heads that matter most."""
        yield Line("method", self.method)
        for image, names in enumerate(self.names[:_SHOWN]):
            predictions = list[str]()
            for rank, name in enumerate(names):
                predictions.append(f"{name} {self._score(image, rank)}")
            yield Line(f"prediction {image}", ", ".join(predictions))
            effects = [
                f"L{effect.layer}.H{effect.head} {effect.delta_loss:+.3g}"
                for effect in self.heads(image)
            ]
            if effects:
                yield Line(f"heads {image}", ", ".join(effects), "nats")
        yield Line("note", self.note)


@takes_images
def look(model: Model, images: AnyImages, *, batch_size: int | None = None, seed: int = 0) -> Look:
    """Explain the prediction of each image by maps of the evidence and the effect of every head.

    The maps are of the predicted class and of the runner-up. Of a model of phrases
    (`Model.with_text`), the maps of all are returned. A single phrase has no probability, so no
    head is ablated.

    images: (n, 3, height, width) in [0, 1], or any form that `vitlens.images` takes; the method of
        the maps is the first by preference that the model supports (best, relevance, GradCAM;
        LeGrad of a language-image model). Heads are ablated one by one, exactly. Their outputs are
        replaced as by `ablate`: by zero for one image, which overstates their effects, by that of
        another image from two on, by the mean from eight on.
    batch_size: images at a time (None: chosen to fit).

    Raises UnsupportedError for a model without a classifier.

    >>> import vitlens
    >>> seen = vitlens.look(vitlens.load("vit-digits"), vitlens.load_data("digits", limit=2))
    >>> len(seen.names[0]), seen.method, seen.maps.shape
    (5, 'best', torch.Size([2, 2, 8, 8]))
    >>> len(seen.heads(0))  # the heads that matter most for the first image
    3
    """
    model.require_classifier()
    images = as_parts(images)
    size = batch_size or fitting_batch_size(model)
    parts = list[Tensor]()
    with evaluating(model), torch.inference_mode():
        for batch in images.split(size):
            parts.append(model(batch.to(model.device)).float().cpu())
    logits = torch.cat(parts)
    by_phrase = shows_phrases(model)
    if by_phrase:
        count = len(model.classes)
        explained = count
    else:
        count = min(TOP, logits.shape[-1])
        explained = min(2, count)  # the prediction and the runner-up
    top = class_scores(model, logits).topk(count)
    cosines = None
    if by_phrase:
        cosines = similarities(model, logits).gather(1, top.indices)
    method = preferred_method(model)
    maps = list[Tensor]()
    for rank in range(explained):
        targets = top.indices[:, rank]
        class_maps = explain(
            model, images, targets=targets, method=method, batch_size=size, seed=seed
        )
        maps.append(class_maps.cpu())
    head_statistics = None
    # none if no attention has a place in the image, or if a layer has heads of several shapes
    with suppress(UnsupportedError):
        head_statistics = statistics(model, images, batch_size=size)
    labels: tuple[tuple[HeadLabel, ...], ...] = ()
    if head_statistics is not None:
        labels = specialise(head_statistics).head_labels
    names = list[tuple[str, ...]]()
    for classes in top.indices.tolist():
        names.append(tuple(model.classes[index] for index in classes))
    no_heads = torch.zeros(len(images), 0)
    without_heads = Look(
        names=tuple(names),
        classes=top.indices,
        probabilities=top.values,
        method=method,
        maps=torch.stack(maps, 1),
        delta_loss=no_heads,
        without=no_heads,
        labels=labels,
        statistics=head_statistics,
        similarities=cosines,
    )
    if len(model.classes) == 1:
        return replace(without_heads, note="one phrase has no probability: no head was ablated")
    if not require_heads.is_met(model):
        return without_heads
    units = units_of(model, kinds=("head",))
    bench = Bench(model, images, without_heads.classes[:, 0], seed=seed, batch_size=size)
    ablations = bench.without([(unit,) for unit in units])
    # the loss is the negative log of the probability of the prediction
    probability_without = (-ablations.loss.T).exp().float()
    places = list[tuple[int, int]]()
    for unit in units:
        assert unit.head is not None  # the units are heads
        places.append((unit.layer, unit.head))
    return replace(
        without_heads,
        delta_loss=ablations.delta_loss.T.float(),
        without=probability_without,
        places=tuple(places),
        replace=ablations.replace,
        note=ablations.note,
    )
