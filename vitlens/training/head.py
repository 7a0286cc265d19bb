"""Train a head on a frozen backbone, whose output for each image is computed once and cached.

The loop is that of `fit`, with features in place of images.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from vitlens.analysis.evaluation.evaluate import fitting_batch_size
from vitlens.data.split import Split
from vitlens.devices import autocast, evaluating
from vitlens.errors import InputError, UnsupportedError, argument, by_caller, set_option
from vitlens.models.anatomy import Anatomy
from vitlens.models.derived import classifiers
from vitlens.models.hooks import Arguments, watching
from vitlens.models.model import Model, first_output, two_classes
from vitlens.models.saved import fingerprint
from vitlens.shapes import Images, Logits
from vitlens.training.distill import StandardObjective
from vitlens.training.feed import portions
from vitlens.training.loop import Training, running
from vitlens.training.metrics import Tested, TrainingResult
from vitlens.training.recipe import Recipe
from vitlens.training.task import Task
from vitlens.training.updates import Updates

# largest difference between the logits of the head and those of the model by rounding; if the head
# is not the last step, they differ by far more
_TOLERANCE: Final = 1e-3
_RELATIVE_TOLERANCE_BF16: Final = 0.05

# the inputs of the classifiers: one, or two in a distilled model
HeadInputs = Float[Tensor, "batch heads dim"]
Cached = Float[Tensor, "views images heads dim"]
Advance = Callable[[int], object]  # called with the number of images just read


def fit_head(
    task: Task, *, views: int = 1, reading: AbstractContextManager[Advance] | None = None
) -> TrainingResult:
    """Train a model's head on the cached features of its frozen backbone.

    The steps are those of `fit` with only the classifier trainable: same orders, same gradients.
    Weights are written only at the end. Raises what `fit` raises, and UnsupportedError for a head
    that is not the model's last step.

    views: the number of views of each training image that are augmented by the recipe and cached.
        Each epoch uses one of them, in turn. 1 is the unchanged image.
    reading: a context for the time in which features are computed. It yields a function of the
        number of images just read.
    """
    with running(replace(task, train_last=0, checkpoint_every=None, keep_every=None)) as (
        backbone_task,
        accelerator,
        precision_note,
    ):
        model = backbone_task.model
        device = backbone_task.processes.device
        precision = backbone_task.precision
        head = _head_of(model)
        objective = StandardObjective(
            about={"frozen": {"backbone": fingerprint(model.module), "views": views}}
        )
        # Whole is the model that is saved, and model the head that is trained on features. The head
        # is trained in fp32: its steps are cheap.
        head_task = replace(
            backbone_task,
            model=head,
            whole=model,
            objective=objective,
            precision="fp32",
            train_last=None,
        )
        with reading or nullcontext(lambda _: None) as advance:
            train_views = cached_features(
                head_task, head_task.train, precision, advance, views=views
            )
            test_views = cached_features(head_task, head_task.test, precision, advance)
        train_views = train_views.to(device)
        test_features = test_views[0].to(device)  # the only view

        def batches(epoch: int, shares: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
            features = train_views[epoch % views]
            for share in shares:
                yield features[share.to(device)], head_task.labels(share)

        @torch.inference_mode()
        def test() -> Tested:
            """Return loss and accuracy on all test images; every process evaluates all of them."""
            assert head_task.test.labels is not None
            labels = head_task.test.labels.cpu().long()
            with autocast(device, "fp32"):
                logits = head.module(test_features).float().cpu()
            accuracy = (logits.argmax(1) == labels).double().mean()
            return Tested(F.cross_entropy(logits, labels).item(), accuracy.item())

        form = "unchanged" if views == 1 else f"in {views} augmented views"
        megabytes = (train_views.nbytes + test_features.nbytes) / 1e6
        note = (
            f"the backbone frozen and its features computed once (images {form}, "
            f"{megabytes:.1f} MB)"
        )
        return Training(head_task, Updates(head_task, accelerator), batches, test).run(
            notes=(precision_note, note)
        )


def _head_of(model: Model) -> Model:
    """Return the head as a model for a Task. It is run on features, not on images.

    It shares its parameters with the model.
    """
    return Model(
        HeadOnly(model),
        alias=model.alias,
        anatomy=Anatomy("other", ()),
        preprocessing=model.preprocessing,
        classes=model.classes,
        provenance=model.provenance,
        architecture=model.architecture,
    )


def _frozen() -> str:
    """Return the argument or option that freezes the backbone, for a message."""
    return by_caller(python="train_last=0", command="--freeze-backbone")


def _remedy() -> str:
    """Return the end of a message: train the last block as well, for which nothing is cached."""
    return f"train it with {argument('train_last', 1)} in place of {_frozen()}"


def require_cacheable(recipe: Recipe, *, views: int) -> None:
    """Raise InputError for a recipe with features that cannot be computed once and cached.

    views: as in `fit_head`.
    """
    if views < 1:
        raise InputError(
            f"expected {argument('views', flag='cached-views')} at least 1, found {views}"
        )
    # settings that combine images of a batch, with their largest value for cached features
    for name, largest in (("mixup", 0), ("cutmix", 0), ("views", 1)):
        value = getattr(recipe, name)
        if value > largest:
            raise InputError(
                f"expected features that are computed once with {_frozen()}, found a recipe with "
                f"{name} {value}; add {set_option(name, largest)}, or train with "
                f"{argument('train_last', 1)}"
            )
    augmentations = [
        name for name in ("crop_padding", "flip", "randaugment", "erasing") if getattr(recipe, name)
    ]
    if augmentations and views == 1:
        raise InputError(
            f"expected unchanged images with {_frozen()}, found a recipe with "
            f"{', '.join(augmentations)}; add {argument('views', 4, flag='cached-views')} to cache "
            "four views of each image, or disable the augmentation"
        )


class HeadOnly(nn.Module):
    """A model's classifiers, from their inputs to logits.

    They share their parameters with the model.
    """

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.heads = nn.ModuleList(
            [model.module.get_submodule(name) for name in classifiers(model)]
        )
        self.read_output = two_classes if model.has_single_logit else first_output

    def forward(self, features: HeadInputs) -> Logits:
        """Return logits (batch, classes); of a distilled model, the mean of its two heads."""
        outputs = [head(features[:, index]) for index, head in enumerate(self.heads)]
        return self.read_output(torch.stack(outputs).mean(0))


@torch.no_grad()
def read_features(model: Model, images: Images, *, precision: str = "fp32") -> HeadInputs:
    """Return the classifiers' inputs for these images: fp32, on the model's device.

    Raises UnsupportedError if the classifiers, run on them, do not give the model's logits.
    """
    names = classifiers(model)
    inputs = list[Tensor]()

    def before(_name: str, arguments: Arguments) -> None:
        inputs.append(arguments[0])

    with evaluating(model), autocast(model.device, precision):
        with watching(model.module, names, before=before):
            logits = model(images).float()
        if any(vectors.ndim != 2 for vectors in inputs) or len(inputs) != len(names):
            shapes = ", ".join(str(tuple(vectors.shape)) for vectors in inputs) or "nothing"
            raise UnsupportedError(
                f"expected a head of {model.alias} that reads one vector per image, found "
                f"{shapes}; {_remedy()}"
            )
        features = torch.stack([vectors.float() for vectors in inputs], 1)
        head_logits = HeadOnly(model)(features).float()
    tolerance = _TOLERANCE if precision == "fp32" else _RELATIVE_TOLERANCE_BF16
    if not torch.allclose(head_logits, logits, rtol=tolerance, atol=_TOLERANCE):
        raise UnsupportedError(
            f"expected the head of {model.alias} to be its last step, found logits that differ by "
            f"{(head_logits - logits).abs().max():.2g}; {_remedy()}"
        )
    return features


def cached_features(
    task: Task, split: Split, precision: str, advance: Advance, *, views: int = 1
) -> Cached:
    """Return the head's inputs for every image of a split, on the CPU.

    Each process computes its share. Several views are augmented as the first epochs of a training
    without a cache would augment them.

    advance: called with the number of images just read, in each view.
    """
    processes = task.processes
    model = task.whole
    device = task.processes.device
    assert model is not None
    indices = torch.arange(processes.index, len(split), processes.count)
    batches = indices.split(fitting_batch_size(model))
    features_by_view = []
    for view in range(views):
        features = []
        source = split.source if views == 1 else task.source(view)
        for pixels, keys in portions(source, batches, pin=device.type == "cuda"):
            if views == 1:
                images = pixels.to(device, non_blocking=True).float().div_(255)
            else:
                images = task.augmented(pixels, keys, view)
            features.append(read_features(model, images, precision=precision).cpu())
            advance(len(images))
        features_by_view.append(processes.gathered(torch.cat(features)))
    return torch.stack(features_by_view)
