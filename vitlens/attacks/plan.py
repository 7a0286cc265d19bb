"""The plan of an attack, and the clean images on which the engine runs it."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from vitlens.analysis.evaluation.evaluate import BACKWARD, fitting_batch_size
from vitlens.attacks.algorithm import Setting
from vitlens.attacks.registry import EPSILONS, PRECISION, RESTARTS, TARGETS, Attack
from vitlens.classes import PREDICTED, required_labels
from vitlens.devices import evaluating
from vitlens.errors import InputError, NonFiniteError
from vitlens.lens.quick_passes import quick_convolutions
from vitlens.models.model import Model
from vitlens.names import DEFAULT_SEED
from vitlens.pixels import Parts
from vitlens.shapes import Labels

# images at a time on a CPU: more are no faster, and a resumed run repeats at most one batch
_CPU_BATCH = 64


@dataclass(frozen=True)
class CleanImages:
    """The images before an attack.

    They are on the device of the argument, or read from a Split as they are needed.

    images: the images.
    labels: their labels.
    correct: True if the model predicts the label.
    runners_up: the other classes, the most likely first.
    indices: the indices of the images in the data set.
    notes: caveats that a report states before its curves.
    """

    images: Parts
    labels: Labels
    correct: Bool[Tensor, " batch"]
    runners_up: Int[Tensor, "batch others"]
    indices: Int[Tensor, " batch"]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class AttackPlan:
    """The settings of an attack on images.

    levels: the epsilons above 0, in ascending order.
    steps: the number of steps (None: the default of the attack).
    restarts: the number of restarts at each level.
    targets: the target classes (batch,), or None.
    seed: the seed of random starts and draws.
    batch_size: the number of images at a time (None: as many as fit into memory).
    precision: the precision of passes with gradients.
    side, aligned, maps, stride: as in `vitlens.attack`.
    keep: True to keep the adversarial images.
    downwards: True to start at the largest epsilon and to stop at the first at which an image is
        robust. The image then counts as robust at all smaller ones. This is two to three times as
        fast if many images are robust, but wrong if an attack fails only at a larger epsilon. By
        default an attack starts at the smallest epsilon and stops at its first success.

    Raises InputError for counts that are too small and for maps that are not finite.
    """

    levels: Sequence[float] = ()
    steps: int | None = None
    restarts: int = RESTARTS
    targets: Labels | None = None
    seed: int = DEFAULT_SEED
    batch_size: int | None = None
    precision: str = PRECISION
    side: int | None = None
    aligned: bool = True
    maps: Tensor | None = None
    stride: float | None = None
    keep: bool = False
    downwards: bool = False

    def __post_init__(self) -> None:
        for name, value in (
            ("steps", self.steps),
            ("restarts", self.restarts),
            ("batch size", self.batch_size),
        ):
            if value is not None and value < 1:
                raise InputError(f"expected {name} of at least 1, found {value}")
        if self.stride is not None and not 0 < self.stride < math.inf:
            raise InputError(
                f"expected a step above 0, in epsilon / steps, found {self.stride:g}; e.g. 2.5"
            )
        if self.maps is not None and not torch.isfinite(self.maps).all():
            raise InputError("expected finite maps, found NaN or infinity")

    def setting(self, attack: Attack, model: Model, clean: CleanImages) -> Setting:
        """Return the setting of the attack's algorithm for this model and images of this size."""
        count = len(clean.labels)
        height, width = clean.images.shape[2:]
        if self.maps is not None and (self.maps.ndim != 3 or len(self.maps) != count):
            raise InputError(
                f"expected maps ({count}, rows, columns), found {tuple(self.maps.shape)}"
            )
        layout = model.anatomy.layout
        token = None
        if layout is not None:
            patch_height, patch_width = layout.patch_size
            model_height, model_width = layout.image_size
            token_height = max(1, round(patch_height * height / model_height))
            token_width = max(1, round(patch_width * width / model_width))
            token = (token_height, token_width)
        return Setting(
            steps=self.steps or max(1, attack.steps),
            classes=len(model.classes),
            size=(int(height), int(width)),
            token=token,
            side=self.side,
            aligned=self.aligned,
            maps=None if self.maps is None else self.maps.detach().cpu().float(),
            stride=self.stride,
        )

    def epsilons(
        self, attack: Attack, model: Model, clean: CleanImages, epsilons: Sequence[float] | None
    ) -> tuple[float, ...]:
        """Return the epsilons of an attack, by default those of its norm.

        A patch has one, the share of the image that it covers. Raises InputError unless epsilons
        are ascending, not negative, and at most 1 in L∞.
        """
        if not attack.takes_epsilon:
            setting = self.setting(attack, model, clean)
            return (setting.square_side**2 / math.prod(setting.size),)
        if epsilons is None:
            epsilons = EPSILONS[attack.norm]
        values = tuple(map(float, epsilons))
        is_linf = attack.norm == "linf"
        for value in values:
            if not 0 <= value < math.inf or (is_linf and value > 1):
                bounds = "from 0 to 1" if is_linf else "of 0 or more"
                raise InputError(
                    f"expected epsilons {bounds} in pixel units, found {value:g}; e.g. 4 / 255"
                )
        if any(after <= before for before, after in pairwise(values)):
            listed = ", ".join(f"{value:g}" for value in values)
            raise InputError(f"expected epsilons in ascending order, found {listed}")
        return values


def clean_images(
    model: Model,
    images: Parts,
    labels: Tensor | str | None,
    *,
    indices: Sequence[int] | None = None,
    batch_size: int | None = None,
) -> CleanImages:
    """Return the clean images, with checked labels and the model's predictions.

    labels: class indices, or "predicted".

    Raises InputError for invalid labels or indices. Raises NonFiniteError, with the names of model
    and image.
    """
    model.require_classifier()
    count = len(images)
    size = batch_size or fitting_batch_size(model)
    positions = torch.arange(count) if indices is None else torch.tensor(indices, dtype=torch.int64)
    if len(positions) != count:
        raise InputError(f"expected one index per image ({count}), found {len(positions)}")
    with frozen(model), torch.no_grad():
        logits = torch.cat([model(part.to(model.device)).cpu() for part in images.split(size)])
    broken = (~logits.isfinite()).any(1).nonzero().flatten()
    if len(broken):
        raise NonFiniteError(
            f"expected finite logits, found NaN or infinity from {model.alias} on image "
            f"{int(positions[broken[0]])}"
        )
    classes = logits.shape[1]
    if classes < 2:
        raise InputError(f"expected a model of at least 2 classes to attack, found {classes}")
    predictions = logits.argmax(1)
    if isinstance(labels, str) and labels == PREDICTED:
        truth = predictions
    else:
        truth = required_labels(model, images, labels, size).detach().cpu().long()
    outside = truth[(truth < 0) | (truth >= classes)]
    if len(outside):
        raise InputError(f"expected labels from 0 to {classes - 1}, found {int(outside[0])}")
    correct = predictions == truth
    other_logits = logits.scatter(1, truth[:, None], -torch.inf)
    runners_up = other_logits.topk(min(TARGETS, classes - 1), dim=1).indices
    notes = []
    if not correct.any():
        notes.append(
            f"{model.alias} misclassifies all {count} clean images: there is nothing to attack"
        )
    return CleanImages(images, truth, correct, runners_up, positions, tuple(notes))


@contextmanager
def frozen(model: Model) -> Iterator[None]:
    """Set evaluation mode and freeze the parameters; restore both on exit.

    Passes then store no values for the gradients of parameters.
    """
    flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        with evaluating(model), quick_convolutions(model):
            model.requires_grad_(False)
            yield
    finally:
        for parameter, flag in flags:
            parameter.requires_grad_(flag)


def fitting_batch(model: Model) -> int:
    """Return the number of images whose passes with gradients fit into memory at once."""
    count = fitting_batch_size(model) // BACKWARD
    if model.device.type == "cpu":
        count = min(count, _CPU_BATCH)
    return max(1, count)
