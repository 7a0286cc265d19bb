"""Self-distillation (DINO, Caron 2021): a student learns the outputs of its moving average.

The moving average, the teacher, sees other crops of the image. Centring and sharpening of the
teacher's outputs keep them from becoming the same for every image. The crops depend only on (seed,
epoch, key of the image). The centre is the mean over all processes.
"""

import math
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any, Final, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from vitlens.errors import InputError, set_option
from vitlens.models.model import Model
from vitlens.processes import Processes
from vitlens.shapes import Images
from vitlens.training.augment import uniforms

STREAM: Final = 11  # of random numbers, different from those of other augmentations
GLOBAL: Final = 2  # global crops of an image
# smallest and largest area of a crop, as shares of the image
_GLOBAL_AREA: Final = (0.6, 1.0)
_LOCAL_AREA: Final = (0.3, 0.6)
_ASPECT: Final = 4 / 3  # largest width over height, and height over width
# random numbers of a crop, in the order in which `cropped` and `_recolour` read them: area, aspect,
# horizontal and vertical place, brightness, contrast, colour or grey, saturation, order of the
# channels, angle
# the columns of the random numbers of a crop
_AREA, _STRETCH, _HORIZONTAL, _VERTICAL = range(4)
_GAIN, _CONTRAST, _IS_GREY, _SATURATION, _CHANNELS, _ANGLE = range(4, 10)
_NUMBERS: Final = 10
_CENTRE: Final = 0.9  # momentum of the centre (Caron 2021, table 7)
# widths of the projection head
_HIDDEN = 256
_BOTTLENECK = 64
# probability that a crop has no colour: the colour of a drawn object says nothing about its class
_GREY: Final = 0.5

Outputs = Float[Tensor, "crops batch outputs"]


class CropLogits(NamedTuple):
    """The logits of crops.

    student: the student's logits for all crops, global ones first.
    teacher: the teacher's logits for the global crops.
    """

    student: Outputs
    teacher: Outputs


class SelfDistillation(nn.Module):
    """A student with its projection head, its teacher, and the centre of the teacher's outputs.

    Raises InputError for crops that patches do not divide. These are the settings:

    - local_crops: the number of local crops of an image.
    - local_size: the side of local crops in pixels.
    - outputs: the number of outputs of the projection head.
    - momentum: the momentum of the teacher at the beginning, which rises to 1.
    - centring: whether the teacher's outputs are centred.
    - student_temperature, teacher_temperature: the temperatures of the outputs.
    - jitter: the largest change of brightness, contrast and colour, as a share.
    - turn: the largest rotation in degrees.
    """

    def __init__(self, model: Model, settings: Mapping[str, Any]) -> None:
        super().__init__()
        self.settings = settings
        _require_valid(settings, model.layout.patch_size)
        self.student = Projected(model, settings["outputs"])
        self.teacher = deepcopy(self.student).requires_grad_(False).eval()
        self.register_buffer("centre", torch.zeros(settings["outputs"]))
        self.centre: Tensor
        # the sum of the teacher's outputs in this process since the last update, then their number
        self.register_buffer("output_sum", torch.zeros(settings["outputs"] + 1), persistent=False)
        self.output_sum: Tensor

    def train(self, mode: bool = True) -> "SelfDistillation":
        """Set the student's mode; the teacher has no dropout or stochastic depth (Caron 2021)."""
        super().train(mode)
        self.teacher.eval()
        return self

    def inputs(self, images: Images, keys: Tensor, *, seed: int, epoch: int) -> tuple[Tensor, ...]:
        """Return the global crops (2, batch, 3, height, width) and the local ones, in [0, 1]."""
        local_crops = self.settings["local_crops"]
        count = (GLOBAL + local_crops) * _NUMBERS
        drawn = uniforms(keys, count, STREAM, seed=seed, epoch=epoch)
        by_crop = drawn.to(images.device).view(len(images), -1, _NUMBERS)  # (batch, crops, numbers)
        crop_draws = by_crop.unbind(1)

        def crop_all(
            draws: Sequence[Tensor], size: tuple[int, int], area: tuple[float, float]
        ) -> Tensor:
            jitter = self.settings["jitter"]
            turn = self.settings["turn"]
            crops = [
                cropped(images, numbers, size=size, area=area, jitter=jitter, turn=turn)
                for numbers in draws
            ]
            return torch.stack(crops)

        size = self.student.model.input_size
        global_crops = crop_all(crop_draws[:GLOBAL], size, _GLOBAL_AREA)
        if not local_crops:
            return (global_crops,)
        local_size = self.settings["local_size"]
        side = (local_size, local_size)
        return global_crops, crop_all(crop_draws[GLOBAL:], side, _LOCAL_AREA)

    def forward(self, global_crops: Tensor, local_crops: Tensor | None = None) -> CropLogits:
        """Return the outputs on the crops."""
        shape = global_crops.shape[:2]  # (crops, batch)
        with torch.no_grad():
            teacher = self.teacher(global_crops.flatten(0, 1)).unflatten(0, shape)
        student = self.student(global_crops.flatten(0, 1)).unflatten(0, shape)
        if local_crops is not None:
            local_shape = local_crops.shape[:2]
            local_logits = self.student(local_crops.flatten(0, 1)).unflatten(0, local_shape)
            student = torch.cat((student, local_logits))
        return CropLogits(student, teacher)

    def losses(self, outputs: Any) -> Float[Tensor, " batch"]:
        """Return each image's loss in nats.

        In training, the teacher's outputs count for the next centre.
        """
        student, teacher = outputs
        student = student.float()
        teacher = teacher.float()
        if self.training:
            flat = teacher.detach().flatten(0, 1)
            count = flat.new_tensor([len(flat)])
            self.output_sum += torch.cat((flat.sum(0), count))
        return agreement(
            student,
            self.probabilities(teacher).detach(),
            temperature=self.settings["student_temperature"],
        )

    def probabilities(self, teacher: Outputs) -> Outputs:
        """Return the teacher's probabilities, centred (if the settings say so) and sharpened."""
        if self.settings["centring"]:
            teacher = teacher - self.centre
        return torch.softmax(teacher / self.settings["teacher_temperature"], -1)

    @torch.no_grad()
    def updated(self, progress: float, processes: Processes) -> None:
        """Move the teacher towards the student, and the centre towards its mean output.

        The momentum rises to 1 as a cosine (Caron 2021, section 3.1).

        progress: the share of all steps that are done.
        """
        momentum = 1 - (1 - self.settings["momentum"]) * (math.cos(math.pi * progress) + 1) / 2
        student_parameters = dict(self.student.named_parameters())
        for name, parameter in self.teacher.named_parameters():
            parameter.lerp_(student_parameters[name], 1 - momentum)
        total = processes.total(self.output_sum).to(self.output_sum.device)
        mean = total[:-1] / total[-1]  # the sum over the number of outputs
        self.centre.lerp_(mean.to(self.centre), 1 - _CENTRE)
        self.output_sum.zero_()

    def exported(self) -> Model:
        """Return the teacher, whose features are the better ones (Caron 2021, section 5.2)."""
        return self.teacher.model

    def measures(self, outputs: Sequence[Any]) -> Mapping[str, float]:
        """Return the teacher's entropy, and the information on the image in its outputs, in nats.

        The information is the entropy of the mean probabilities over images minus the mean entropy.
        It is 0 for a teacher with the same outputs for every image.
        """
        probabilities = torch.cat(
            [self.probabilities(batch.teacher.float()).flatten(0, 1) for batch in outputs]
        )
        entropy = entropies(probabilities).mean()
        return {
            "teacher_entropy": float(entropy),
            "teacher_information": float(entropies(probabilities.mean(0)) - entropy),
        }


def _require_valid(settings: Mapping[str, Any], patch: tuple[int, int]) -> None:
    """Raise InputError for invalid settings, and for crops that patches do not divide."""
    local_crops = settings["local_crops"]
    outputs = settings["outputs"]
    momentum = settings["momentum"]
    if local_crops < 0 or outputs < 2 or not 0 <= momentum < 1:
        raise InputError(
            "expected local_crops from 0, outputs from 2 and momentum in [0, 1), found "
            f"{local_crops}, {outputs} and {momentum}"
        )
    if min(settings["student_temperature"], settings["teacher_temperature"]) <= 0:
        raise InputError("expected temperatures above 0, found one of 0 or less")
    size = settings["local_size"]
    is_divisible = size >= max(patch) and all(size % side == 0 for side in patch)
    if local_crops and not is_divisible:
        step = math.lcm(*patch)
        raise InputError(
            f"expected local crops divisible into patches of {patch[0]}x{patch[1]} px, found "
            f"{size} px; try {set_option('local_size', max(round(size / step), 1) * step)}"
        )


class Projected(nn.Module):
    """A ViT and its projection head.

    Three layers compute a vector of length 1. The outputs are its cosines with the vectors of the
    last layer.
    """

    def __init__(self, model: Model, outputs: int) -> None:
        super().__init__()
        vit: Any = model.module
        self.model = model
        dim = vit.config.dim
        self.head = nn.Sequential(
            nn.Linear(dim, _HIDDEN),
            nn.GELU(),
            nn.Linear(_HIDDEN, _HIDDEN),
            nn.GELU(),
            nn.Linear(_HIDDEN, _BOTTLENECK),
        )
        self.last = nn.Linear(_BOTTLENECK, outputs, bias=False)

    def forward(self, crops: Images) -> Float[Tensor, "batch outputs"]:
        """Return logits of crops in [0, 1], of any size that patches divide.

        Position embeddings are interpolated.
        """
        vit: Any = self.model.module
        features = vit.pool(vit.forward_features((crops - self.model.mean) / self.model.std))
        vectors = F.normalize(self.head(features), dim=-1)
        return F.linear(vectors, F.normalize(self.last.weight, dim=-1))


def agreement(
    student: Outputs, teacher: Float[Tensor, "global batch outputs"], *, temperature: float
) -> Float[Tensor, " batch"]:
    """Return the cross-entropy of the student with the teacher on other crops, in nats.

    It is the mean over all pairs of a global crop of the teacher's probabilities and another crop
    of the student's outputs (Caron 2021, equation 3).
    """
    log_probabilities = (student / temperature).log_softmax(-1)
    agreements = []
    for teacher_crop in range(len(teacher)):
        for student_crop in range(len(student)):
            if student_crop != teacher_crop:
                products = teacher[teacher_crop] * log_probabilities[student_crop]
                agreements.append(products.sum(-1))
    return -torch.stack(agreements).mean(0)


def entropies(probabilities: Float[Tensor, "*batch outputs"]) -> Float[Tensor, "*batch"]:
    """Return the entropy in nats."""
    entropy: Tensor = torch.special.entr(probabilities).sum(-1)
    return entropy


def cropped(
    images: Images,
    draws: Float[Tensor, "batch numbers"],
    *,
    size: tuple[int, int],
    area: tuple[float, float],
    jitter: float,
    turn: float,
) -> Float[Tensor, "batch 3 _ _"]:
    """Return each image's crop of a random area, aspect and angle, in random colours.

    Crops are resized (bilinear).

    draws: _NUMBERS numbers in [0, 1) for each image, by the columns _AREA to _ANGLE.
    size: the (height, width) of the crops in pixels.
    area: the smallest and the largest area, as shares of the image.
    jitter: the largest change of brightness, contrast and saturation, as a share.
    turn: the largest angle, in degrees.
    """
    # coordinates are from -1 to 1 in the image, and in the crop
    signed = 2 * draws - 1  # in [-1, 1)
    share = area[0] + (area[1] - area[0]) * draws[:, _AREA]
    stretch = torch.exp(signed[:, _STRETCH] * math.log(_ASPECT) / 2)
    width = (share.sqrt() * stretch).clamp(max=1)
    height = (share.sqrt() * (1 / stretch)).clamp(max=1)
    # of the centre, so that the crop is in the image
    horizontal = signed[:, _HORIZONTAL] * (1 - width)
    vertical = signed[:, _VERTICAL] * (1 - height)
    angle = math.radians(turn) * signed[:, _ANGLE]
    cos = angle.cos()
    sin = angle.sin()
    # the two rows of a 2x3 matrix: pixel (x, y) of the crop is read from the image at
    #   horizontal + cos (width x) - sin (height y)
    #   vertical + sin (width x) + cos (height y)
    entries = (width * cos, -height * sin, horizontal, width * sin, height * cos, vertical)
    affine = torch.stack(entries, 1).view(-1, 2, 3)
    grid = F.affine_grid(affine, [len(images), 3, *size], align_corners=False)
    crop = F.grid_sample(
        images, grid, mode="bilinear", padding_mode="reflection", align_corners=False
    )
    return _recolour(crop, draws, jitter=jitter)


def _recolour(
    crops: Images, draws: Float[Tensor, "batch numbers"], *, jitter: float
) -> Float[Tensor, "batch 3 _ _"]:
    """Return crops with random brightness, contrast, saturation and order of the channels.

    draws, jitter: as in `cropped`.
    """
    signed = 2 * draws - 1  # in [-1, 1)
    gain = 1 + jitter * signed[:, _GAIN, None, None, None]
    contrast = 1 + jitter * signed[:, _CONTRAST, None, None, None]
    mean = crops.mean((1, 2, 3), keepdim=True)
    crops = (mean + contrast * (crops - mean)) * gain
    # the channels are rotated: red, green, blue may become blue, red, green
    channel_orders = torch.stack([crops.roll(shift, 1) for shift in range(3)])
    shifts = (3 * draws[:, _CHANNELS]).long()
    rotated = channel_orders[shifts, torch.arange(len(crops))]
    grey = crops.mean(1, keepdim=True)
    saturation = torch.where(draws[:, _IS_GREY] < _GREY, 0.0, 1 + jitter * signed[:, _SATURATION])
    return (grey + saturation[:, None, None, None] * (rotated - grey)).clamp(0, 1)
