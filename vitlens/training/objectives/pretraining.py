"""A training without labels as an objective of the loop, and measures of its features.

`Pretrained` is what an objective defines (mae.py, dino.py, clip.py): a module with a loss. The loop
works with `Pretraining`, the objective of one training, which builds and calls the `Pretrained`.
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
from vitlens.data.captions import Captions, captions_of
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

NEIGHBOURS: Final = 20  # neighbours of k-NN
BANK: Final = 1000  # training images among which neighbours are searched
QUERIES: Final = 1000  # test images of which features are measured
TESTED: Final = -1  # the epoch of random numbers for test images, the same at every test
MAPS: Final = 200  # images of which attention is compared with masks
_MIXING: Final = ("mixup", "cutmix", "label_smoothing")  # settings that mix labels
_RANK_TOLERANCE: Final = 1e-9  # smaller singular values, relative to the vectors, are rounding


@runtime_checkable
class Pretrained(Protocol):
    """An nn.Module around the model that an objective trains; its tensors are the run's state."""

    def inputs(self, images: Images, keys: Tensor, *, seed: int, epoch: int) -> tuple[Tensor, ...]:
        """Return the inputs of forward for augmented images.

        Random numbers depend only on (seed, epoch, key).
        """
        ...

    def losses(self, outputs: Any) -> Float[Tensor, " batch"]:
        """Return each image's loss from the outputs of forward."""
        ...

    def updated(self, progress: float, processes: Processes) -> None:
        """Follow an update of the weights; progress: the share of all steps that are done."""
        ...

    def exported(self) -> Model:
        """Return the model that is tested and saved."""
        ...

    def measures(self, outputs: Sequence[Any]) -> Mapping[str, float]:
        """Return the objective's measures of the outputs of forward for batches of test images."""
        ...


class Pretraining:
    """The training objective of a name, for the loop; the keys of images are passed as labels.

    Raises DataError for images without captions, if the objective needs them.

    train, test: the images, as in `fit`.
    settings: the changed settings of the objective.
    """

    def __init__(
        self, name: str, train: Split, test: Split, settings: Mapping[str, Any] | None = None
    ) -> None:
        self.entry: TrainingObjective = objective_named(name)
        self.settings = self.entry.changed(settings or {})
        self.train = train
        self.test = test
        self.captions: tuple[Captions, Captions] | None = None
        if self.entry.needs == "captions":
            self.captions = (captions_of(train), captions_of(test))
        self.pretrained: Any = None  # the Pretrained, after `module` was called

    def require(self, model: Model, recipe: Recipe, batch: int) -> None:
        """Raise an error for a model, images or a recipe that the objective does not take.

        batch: the smallest number of images that are compared with each other.
        """
        flag = f"--objective {self.entry.name}"
        is_vit = isinstance(model.module, VisionTransformer)
        if not is_vit or model.has_classifier or model.module.head_dist:
            raise UnsupportedError(
                f"expected a ViT of vitlens without a classifier with {flag}, found {model.alias}; "
                "try vit-micro"
            )
        for split in (self.train, self.test):
            if not len(split):
                raise DataError(
                    f"expected {split.part} images in {split.name}, found none; see vitlens data"
                )
        for name in _MIXING:
            value = getattr(recipe, name)
            if value:
                raise InputError(
                    f"expected {name} 0 with {flag}, which has no labels, found {value}"
                )
        if self.captions and self.train.labels is not None:
            # without a final norm, the lengths that the zero-shot classifier divides by are unknown
            config: Any = model.module.config
            if not (config.norm and config.norm_first):
                raise InputError(
                    f"expected a ViT with norms before its branches with {flag} on images with "
                    f"labels, found {model.alias} with norm={config.norm} and "
                    f"norm_first={config.norm_first}; try vit-micro"
                )
        if self.captions and batch < 2:
            raise InputError(
                f"expected batches of at least 2 images in each process and part with {flag}, "
                f"which compares them, found {batch}; try --batch-size 64"
            )

    def module(self, model: Model) -> nn.Module:
        """Return a new module around the model, which is trained."""
        options: dict[str, Any] = {}
        if self.captions is not None:
            train, test = self.captions

            def captions(keys: Tensor, epoch: int) -> list[str]:
                if epoch == TESTED:  # then the keys are of test images
                    return test(keys, 0)  # the captions of one epoch, at every test
                return train(keys, epoch)

            options["captions"] = captions
            options["vocabulary"] = train.vocabulary
            options["classes"] = () if self.train.labels is None else self.train.classes
        module: nn.Module = resolved(self.entry.module)(model, self.settings, **options)
        self.pretrained = module.to(model.device)
        return module

    def inputs(self, images: Images, keys: Tensor, *, seed: int, epoch: int) -> tuple[Tensor, ...]:
        """Return the module's inputs; the loop passes keys in place of labels."""
        inputs = self.pretrained.inputs(images, keys.cpu(), seed=seed, epoch=epoch)
        return tuple(tensor.to(images.device) for tensor in inputs)

    def logits(self, outputs: Any) -> None:  # noqa: ARG002
        """Return None, as no classes are predicted."""
        return

    def loss(self, outputs: Any, targets: Tensor, images: Tensor, *, smoothing: float) -> Tensor:  # noqa: ARG002
        """Return the sum of the images' losses."""
        summed: Tensor = self.pretrained.losses(outputs).sum()
        return summed

    def updated(self, progress: float, processes: Processes) -> None:
        """Follow an update of the weights."""
        self.pretrained.updated(progress, processes)

    def exported(self, model: Model) -> Model:
        """Return the model that is tested and saved, with a classifier if the module has one."""
        if self.pretrained is None:
            return model
        exported: Model = self.pretrained.exported()
        return exported

    def write_parts(self, folder: Path) -> None:
        """Write the parts of the module next to the model: a text tower."""
        if hasattr(self.pretrained, "write_parts"):
            self.pretrained.write_parts(folder)

    def identity(self) -> Mapping[str, object]:
        """Return the objective's name and settings."""
        return {"objective": {"name": self.entry.name, **self.settings}}

    def features_of(self, model: Model) -> Mapping[str, float]:
        """Return measures of a model's features on test images."""
        return measures_of(model, self.train, self.test, pool=self.entry.pool)

    def pictures(self, count: int) -> Sequence[Images]:
        """Return the first test images, masked and reconstructed by the last weights; see mae.py.

        Other objectives return none.
        """
        if not hasattr(self.pretrained, "pictures"):
            return ()
        keys = torch.arange(min(count, len(self.test)))
        images = self._test_images(keys, self.pretrained.mask_token.device)
        with evaluating(self.pretrained):
            masked, filled = self.pretrained.pictures(
                *self.inputs(images, keys, seed=0, epoch=TESTED)
            )
        return images, masked, filled

    def _test_images(self, indices: Tensor, device: torch.device) -> Images:
        (batch,) = self.test.pick(indices).batches(len(indices), device=device)
        return batch.images

    @torch.no_grad()
    def tested(self, *, precision: str, seed: int, batch_size: int, processes: Processes) -> Tested:
        """Return the mean loss on the test images, and the measures of features.

        Batches are as in training except for their size.
        """
        device = processes.device
        outputs = list[Any]()
        total = torch.zeros(1, dtype=torch.float64)
        share = process_share(torch.arange(len(self.test)), processes.index, processes.count)
        batches = share.chunk(max(1, len(share) // batch_size))  # of about equal size
        with evaluating(self.pretrained):
            for indices in batches:
                if not len(indices):  # with fewer images than processes, some have none
                    continue
                images = self._test_images(indices, device)
                inputs = self.inputs(images, indices, seed=seed, epoch=TESTED)
                with autocast(device, precision):
                    outputs.append(self.pretrained(*inputs))
                total += self.pretrained.losses(outputs[-1]).sum().cpu()
        loss = float(processes.total(total)) / len(self.test)
        if not processes.is_first:
            return Tested(loss, accuracy=None)
        model = self.pretrained.exported()
        measures = {**self.pretrained.measures(outputs), **self.features_of(model)}
        accuracy = measures.pop("accuracy", None)
        finite = {name: value for name, value in measures.items() if math.isfinite(value)}
        return Tested(loss, accuracy, finite)


def make_objective(
    name: str, train: Split, test: Split, settings: Mapping[str, Any] | None = None
) -> Pretraining | None:
    """Return the objective of that name for `fit`; None for classification, fit's default."""
    if objective_named(name).name == CLASSIFY:
        return None
    return Pretraining(name, train, test, settings)


@torch.no_grad()
def measures_of(
    model: Model, train: Split, test: Split, *, pool: FeaturePool = "cls"
) -> Mapping[str, float]:
    """Return measures of a model's features on test images.

    - "rank": the effective rank, the exponential of the entropy of the singular values (Roy 2007).
    - "spread": the mean standard deviation of features of length 1, times the root of their number.
      It is 1 for features that fill all directions, and 0 if they are the same for all images
      (SimSiam, Chen 2021).
    - "knn": the k-NN accuracy among training images, for data with labels.
    - "objectness": the intersection over union of an object's mask and an equal area of CLS
      attention, for data with masks. It is that of one head, which is chosen on other images.
    - "accuracy": the accuracy of the model's classifier, if it has one.

    pool: the tokens from which features are read.
    """
    queries = test.limit(min(QUERIES, len(test)))
    bank = train.limit(min(BANK, len(train)))
    has_cls = bool(model.layout.positions("cls"))
    if not has_cls:
        pool = "mean"
    with evaluating(model):
        query_features = extract(model, queries, layer=-1, pool=pool)
        bank_features = extract(model, bank, layer=-1, pool=pool)
        assert query_features is not None
        assert bank_features is not None
        vectors = query_features.at(-1)
        measures = {"rank": effective_rank(vectors), "spread": spread(vectors)}
        if queries.labels is not None and bank.labels is not None and len(bank) >= NEIGHBOURS:
            neighbours = nearest(vectors, bank_features.at(-1), k=NEIGHBOURS)
            bank_labels = bank.labels.cpu().long()
            predictions = vote(neighbours, bank_labels, k=NEIGHBOURS, classes=len(train.classes))
            measures["knn"] = _accuracy(predictions, queries.labels)
        if model.has_classifier and queries.labels is not None:
            measures["accuracy"] = _accuracy(query_features.logits.argmax(1), queries.labels)
        if queries.masks is not None and has_cls:
            measures["objectness"] = best_head(model, queries.limit(MAPS))
    return measures


def _accuracy(predictions: Tensor, labels: Tensor) -> float:
    return float((predictions == labels.cpu()).double().mean())


def effective_rank(vectors: Float[Tensor, "images dim"]) -> float:
    """Return the exponential of the entropy of the singular values of the centred vectors.

    It is from 1, for vectors that are all the same, to their number.
    """
    values = torch.linalg.svdvals(vectors.double() - vectors.double().mean(0))
    rounding = _RANK_TOLERANCE * max(1.0, float(vectors.double().norm()))
    if float(values.sum()) <= rounding:
        return 1.0
    return float(torch.special.entr(values / values.sum()).sum().exp())


def spread(vectors: Float[Tensor, "images dim"]) -> float:
    """Return the mean standard deviation of vectors of length 1, times the root of their size."""
    return float(unit_vectors(vectors).std(0, correction=0).mean()) * math.sqrt(vectors.shape[1])


def best_head(model: Model, split: Split) -> float:
    """Return the overlap of the last layer's best head with the objects; see `objectness`.

    It is NaN for fewer than FEWEST_MASKS images with an object.
    """
    assert split.masks is not None
    has_object = split.masks.flatten(1).any(1)
    with_objects = split.pick(has_object.nonzero()[:, 0])
    if len(with_objects) < FEWEST_MASKS or with_objects.masks is None:
        return math.nan
    (batch,) = with_objects.batches(len(with_objects), device=model.device)
    last_layer = attention(model, batch.images, rows="cls")[-1]  # (batch, heads, 1, keys)
    patch_weights = last_layer[:, :, 0, len(model.layout.prefix) :]
    patch_maps = patch_weights.unflatten(2, model.layout.grid)  # (batch, heads, rows, columns)
    return float(objectness(patch_maps.cpu(), with_objects.masks.cpu()).iou.mean())
