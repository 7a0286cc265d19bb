"""A training without labels as an objective of the loop, and what is measured of its features on
the way.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from vitlens.analysis.attention.weights import attention
from vitlens.analysis.features.features import extract
from vitlens.analysis.features.neighbours import nearest, unit_vectors, vote
from vitlens.analysis.features.objectness import FEWEST_MASKS, objectness
from vitlens.data.captions import captions_of
from vitlens.data.split import Split
from vitlens.devices import autocast, evaluating
from vitlens.errors import DataError, InputError, UnsupportedError
from vitlens.models.model import Model
from vitlens.models.vit import VisionTransformer
from vitlens.names import FeaturePool
from vitlens.processes import Processes
from vitlens.references import resolved
from vitlens.shapes import Images
from vitlens.training.feed import process_share
from vitlens.training.metrics import Tested
from vitlens.training.objectives.registry import CLASSIFY, TrainingObjective, objective_named
from vitlens.training.recipe import Recipe

NEIGHBOURS: Final = 20  # of k-NN
BANK: Final = 1000  # training images in which neighbours are looked for
QUERIES: Final = 1000  # test images whose features are measured
TESTED: Final = -1  # the epoch of the draws for test images, the same at every test
MAPS: Final = 200  # images whose attention is compared with their masks
_MIXING: Final = ("mixup", "cutmix", "label_smoothing")  # of labels


@runtime_checkable
class Pretrained(Protocol):
    """What an objective trains, an nn.Module around the model: its parameters and buffers are the
    state of a run.
    """

    def inputs(self, images: Images, keys: Tensor, *, seed: int, epoch: int) -> tuple[Tensor, ...]:
        """Return what forward is given for augmented images; every draw is from (seed, epoch,
        key)."""
        ...

    def losses(self, outputs: Any) -> Float[Tensor, " batch"]:
        """Return each image's loss of what forward returned."""
        ...

    def updated(self, progress: float, processes: Processes) -> None:
        """After an update of the weights; progress: the share of all steps that are done."""
        ...

    def exported(self) -> Model:
        """Return the model that is tested and saved."""
        ...

    def measures(self, outputs: Sequence[Any]) -> Mapping[str, float]:
        """Numbers of the objective itself, of what forward returned for batches of test images."""
        ...


class Pretraining:
    """The objective of that name for the loop; the images' keys stand in the place of labels.

    settings: changes to the entry's; train, test: as they are given to `fit`. Raises what `of` its
    captions raises.
    """

    def __init__(
        self, name: str, train: Split, test: Split, settings: Mapping[str, Any] | None = None
    ) -> None:
        self.entry: TrainingObjective = objective_named(name)
        self.settings = self.entry.changed(settings or {})
        self.train = train
        self.test = test
        self.captions = (
            (captions_of(train), captions_of(test)) if self.entry.needs == "captions" else None
        )
        self.built: Any = None

    def require(self, model: Model, recipe: Recipe, batch: int) -> None:
        """Raise InputError for a model, images or a recipe that it cannot be trained with; batch:
        least number of images that are compared with each other.
        """
        flag = f"--objective {self.entry.name}"
        if (
            not isinstance(model.module, VisionTransformer)
            or model.has_classifier
            or model.module.head_dist
        ):
            raise UnsupportedError(
                f"expected a ViT of vitlens without a classifier with {flag}, found {model.alias}; "
                "try vit-micro"
            )
        for split in (self.train, self.test):
            if not len(split):
                raise DataError(
                    f"expected {split.part} images in {split.name}, found none; see vitlens data"
                )
        changed = next((name for name in _MIXING if getattr(recipe, name)), None)
        if changed is not None:
            raise InputError(
                f"expected {changed} 0 with {flag}, which has no labels, found "
                f"{getattr(recipe, changed)}"
            )
        if self.captions and batch < 2:
            raise InputError(
                f"expected batches of at least 2 images in each process and part with {flag}, "
                "which tells them apart, "
                f"found {batch}; try --batch-size 64"
            )

    def module(self, model: Model) -> nn.Module:
        """Return what is trained, made anew around the model."""
        more: dict[str, Any] = {}
        if self.captions is not None:
            train, test = self.captions
            more = {
                "captions": lambda keys, epoch: (
                    test(keys, 0) if epoch == TESTED else train(keys, epoch)
                ),
                "vocabulary": train.vocabulary,
                "classes": self.train.classes if self.train.labels is not None else (),
            }
        made: nn.Module = resolved(self.entry.module)(model, self.settings, **more)
        self.built = made.to(model.device)
        return made

    def inputs(
        self, images: Images, targets: Tensor, *, seed: int, epoch: int
    ) -> tuple[Tensor, ...]:
        """Return what the module is given; targets: the images' keys."""
        given: tuple[Tensor, ...] = self.built.inputs(images, targets.cpu(), seed=seed, epoch=epoch)
        return tuple(each.to(images.device) for each in given)

    def logits(self, outputs: Any) -> None:  # noqa: ARG002
        """No classes are predicted."""
        return

    def loss(self, outputs: Any, targets: Tensor, images: Tensor, *, smoothing: float) -> Tensor:  # noqa: ARG002
        """Return the sum of the images' losses."""
        summed: Tensor = self.built.losses(outputs).sum()
        return summed

    def updated(self, progress: float, processes: Processes) -> None:
        """After an update of the weights."""
        self.built.updated(progress, processes)

    def exported(self, model: Model) -> Model:
        """Return the model that is tested and saved: a part of what is trained, which has a
        classifier where it can.
        """
        return model if self.built is None else self.built.exported()

    def write_beside(self, folder: Path) -> None:
        """Write what the module has beside the model: a text tower."""
        if hasattr(self.built, "write_beside"):
            self.built.write_beside(folder)

    def identity(self) -> Mapping[str, object]:
        """Return its name and settings."""
        return {"objective": {"name": self.entry.name, **self.settings}}

    def features_of(self, model: Model) -> Mapping[str, float]:
        """Return what the features of a model tell about test images."""
        return measures_of(model, self.train, self.test, pool=self.entry.pool)

    def pictures(self, count: int) -> Sequence[Images]:
        """Reconstructions of the first test images (see mae.py), by the last weights; none of other
        objectives.
        """
        if not hasattr(self.built, "pictures"):
            return ()
        keys = torch.arange(min(count, len(self.test)))
        images = next(
            self.test.pick(keys).batches(len(keys), device=self.built.mask_token.device)
        ).images
        with evaluating(self.built):
            masked, filled = self.built.pictures(*self.inputs(images, keys, seed=0, epoch=TESTED))
        return images, masked, filled

    @torch.no_grad()
    def tested(self, *, precision: str, seed: int, batch_size: int, processes: Processes) -> Tested:
        """Return the mean loss on the test images, in batches as in training but for their size,
        and what features tell.
        """
        device = processes.device
        outputs = list[Any]()
        total = torch.zeros(1, dtype=torch.float64)
        share = process_share(torch.arange(len(self.test)), processes.index, processes.count)
        with evaluating(self.built):
            for part in share.chunk(
                max(1, len(share) // batch_size)
            ):  # none much smaller than the others
                images = next(self.test.pick(part).batches(len(part), device=device)).images
                with autocast(device, precision):
                    outputs.append(self.built(*self.inputs(images, part, seed=seed, epoch=TESTED)))
                total += self.built.losses(outputs[-1]).sum().cpu()
        loss = float(processes.total(total)) / len(self.test)
        if not processes.is_first:
            return Tested(loss, None, {})
        model = self.exported(self.built)
        own = {**self.built.measures(outputs), **self.features_of(model)}
        accuracy = own.pop("accuracy", None)
        return Tested(
            loss, accuracy, {name: value for name, value in own.items() if math.isfinite(value)}
        )


def make_objective(
    name: str, train: Split, test: Split, settings: Mapping[str, Any] | None = None
) -> Pretraining | None:
    """Return the objective of that name for `fit`; None for classification, which is fit's own."""
    return (
        None if objective_named(name).name == CLASSIFY else Pretraining(name, train, test, settings)
    )


@torch.no_grad()
def measures_of(
    model: Model, train: Split, test: Split, *, pool: FeaturePool = "cls"
) -> Mapping[str, float]:
    """Return what the features of a model tell about test images, each a number that does not need
    a classifier.

    rank: effective rank, the exponential of the entropy of the singular values (Roy 2007); spread:
    mean standard deviation of the features of length 1, times the root of their number, 1 where
    they fill all directions, 0 where all images have the same (Chen 2021, SimSiam); knn: k-NN
    accuracy among training images, where there are labels; objectness: intersection over union of
    an object's mask and as large an area of the CLS attention of one head, which is chosen on other
    images, where there are masks; accuracy: of a classifier.
    """
    some = test.limit(min(QUERIES, len(test)))
    others = train.limit(min(BANK, len(train)))
    pool = pool if model.layout.positions("cls") else "mean"
    with evaluating(model):
        read = extract(model, some, layer=-1, pool=pool)
        bank = extract(model, others, layer=-1, pool=pool)
        assert read is not None
        assert bank is not None
        vectors = read.at(-1)
        found = {"rank": effective_rank(vectors), "spread": spread(vectors)}
        if some.labels is not None and others.labels is not None and len(others) >= NEIGHBOURS:
            near = nearest(vectors, bank.at(-1), k=NEIGHBOURS)
            said = vote(near, others.labels.cpu().long(), k=NEIGHBOURS, classes=len(train.classes))
            found["knn"] = float((said == some.labels.cpu()).double().mean())
        if model.has_classifier and some.labels is not None:
            found["accuracy"] = float((read.logits.argmax(1) == some.labels.cpu()).double().mean())
        if some.masks is not None and model.layout.positions("cls"):
            found |= {"objectness": best_head(model, some.limit(MAPS))}
    return found


def effective_rank(vectors: Float[Tensor, "images dim"]) -> float:
    """Return the exponential of the entropy of the singular values of the centred vectors, from 1
    to their number; 1 where all vectors are the same.
    """
    values = torch.linalg.svdvals(vectors.double() - vectors.double().mean(0))
    if float(values.sum()) <= 1e-9 * max(1.0, float(vectors.double().norm())):
        return 1.0
    return float(torch.special.entr(values / values.sum()).sum().exp())


def spread(vectors: Float[Tensor, "images dim"]) -> float:
    """Return the mean standard deviation of vectors scaled to length 1, times the root of their
    number of dimensions.
    """
    return float(unit_vectors(vectors).std(0, correction=0).mean()) * math.sqrt(vectors.shape[1])


def best_head(model: Model, split: Split) -> float:
    """Return how far the attention of the last layer's best head overlaps the objects, see
    `objectness`; NaN for fewer than four images with an object.
    """
    assert split.masks is not None
    shown = split.pick(split.masks.flatten(1).any(1).nonzero()[:, 0])
    if len(shown) < FEWEST_MASKS or shown.masks is None:
        return math.nan
    batch = next(shown.batches(len(shown), device=model.device))
    rows = attention(model, batch.images, rows="cls")[-1][:, :, 0, len(model.layout.prefix) :]
    return float(
        objectness(rows.unflatten(2, model.layout.grid).cpu(), shown.masks.cpu()).iou.mean()
    )
