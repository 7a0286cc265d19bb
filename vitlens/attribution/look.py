"""`vitlens.look`: what a model predicts for single images, where the evidence lies, and which heads
matter for it.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from vitlens.analysis.ablation.bench import Bench, require_heads, units_of
from vitlens.analysis.evaluation.evaluate import fitting_batch_size
from vitlens.analysis.heads.specialisation import HeadLabel, specialise
from vitlens.analysis.heads.statistics import Statistics, statistics
from vitlens.attribution.explain import explain, preferred_method
from vitlens.devices import evaluating
from vitlens.errors import UnsupportedError
from vitlens.inputs import takes_images
from vitlens.models.model import Model
from vitlens.names import Replacement
from vitlens.pixels import AnyImages, as_parts
from vitlens.summary import Line, Summary

TOP = 5  # classes of an image
_SHOWN = 6  # images of a summary


@dataclass(frozen=True)
class HeadEffect:
    """One head for one prediction."""

    layer: int
    head: int
    # the rise of the prediction's loss without the head, nats; positive: it supports the prediction
    delta_loss: float
    probability: float  # of the prediction without the head
    given: HeadLabel | None  # what the head attends to, None where it has no label


@dataclass(frozen=True, repr=False)
class Look(Summary):
    """What a model sees in n images.

    names (n, k): the most probable classes, at most five; classes, probabilities (n, k): their
    indices and probabilities; method: whose maps these are; maps (n, shown, rows, columns): raw, of
    the first `shown` classes (the prediction and the runner-up; one where there is no other);
    delta_loss, without (n, heads): the rise of the loss of the prediction without each head, nats,
    and its probability then; places: (layer, head) of each head, empty for a model without heads;
    replace: what replaced a head's output; note: a remark on it; labels: of the heads, by layer,
    from these images, empty where there are none; statistics: what these rest on, None where there
    are none.
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

    def heads(self, image: int = 0, *, most: int = 3) -> tuple[HeadEffect, ...]:
        """Return the heads without which the loss of an image's prediction rises most, the greatest
        rise first.
        """
        order = self.delta_loss[image].argsort(descending=True, stable=True).tolist()[:most]
        known = {
            (layer, head): own
            for layer, row in enumerate(self.labels)
            for head, own in enumerate(row)
        }
        return tuple(
            HeadEffect(
                self.places[at][0],
                self.places[at][1],
                float(self.delta_loss[image, at]),
                float(self.without[image, at]),
                known.get(self.places[at]),
            )
            for at in order
        )

    def summary(self) -> Iterator[Line]:
        """Yield the prediction of each image with the heads that matter most, for the first
        images."""
        yield Line("method", self.method)
        for image, names in enumerate(self.names[:_SHOWN]):
            shares = zip(names, self.probabilities[image].tolist())
            yield Line(
                f"prediction {image}",
                ", ".join(f"{name} {100 * share:.1f} %" for name, share in shares),
            )
            found = [
                f"L{each.layer}.H{each.head} {each.delta_loss:+.3g}" for each in self.heads(image)
            ]
            if found:
                yield Line(f"heads {image}", ", ".join(found), "nats")
        yield Line("note", self.note)


@takes_images
def look(model: Model, images: AnyImages, *, batch_size: int | None = None, seed: int = 0) -> Look:
    """Return the prediction of each image, the map of the predicted class and of the runner-up, and
    the effect of every head.

    images: (n, 3, height, width) in [0, 1], or any form that `vitlens.images` takes; the method of
    the maps is the first by preference that the model supports (best, relevance, GradCAM; LeGrad of
    a language-image model). Heads are ablated one by one, exactly; their outputs are replaced as by
    `ablate`: by zero for one image, which overstates their effects, by another image's from two on,
    by the mean from eight on. batch_size: images at a time (None: chosen to fit). Raises
    UnsupportedError for a model without a classifier.

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
    with evaluating(model), torch.inference_mode():
        logits = torch.cat(
            [model(batch.to(model.device)).float().cpu() for batch in images.split(size)]
        )
    top = logits.softmax(-1).topk(min(TOP, logits.shape[-1]))
    method = preferred_method(model)
    maps = [
        explain(
            model,
            images,
            targets=top.indices[:, rank].clone(),
            method=method,
            batch_size=size,
            seed=seed,
        ).cpu()
        for rank in range(min(2, top.indices.shape[1]))
    ]
    known = None
    with suppress(
        UnsupportedError
    ):  # no attention has a place in the image, or a layer has heads of several shapes
        known = statistics(model, images, batch_size=size)
    seen = Look(
        tuple(tuple(model.classes[place] for place in places) for places in top.indices.tolist()),
        top.indices.clone(),
        top.values.clone(),
        method,
        torch.stack(maps, 1),
        torch.zeros(len(images), 0),
        torch.zeros(len(images), 0),
        labels=() if known is None else specialise(known).given,
        statistics=known,
    )
    if not require_heads.is_met(model):
        return seen
    units = units_of(model, kinds=("head",))
    bench = Bench(model, images, seen.classes[:, 0], seed=seed, batch_size=size)
    effects = bench.without([(unit,) for unit in units])
    return replace(
        seen,
        delta_loss=effects.delta_loss.T.float(),
        without=(-effects.loss.T).exp().float(),
        places=tuple((unit.layer, unit.head or 0) for unit in units),
        replace=effects.replace,
        note=effects.note,
    )
