"""Self-distillation (DINO, Caron 2021): a student learns what its own moving average says of other
crops of the image.

Centring and sharpening of the teacher's outputs keep them from becoming the same for every image.
Where and how an image is cropped depends only on (seed, epoch, key of the image); the centre is the
mean over all processes.
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

STREAM: Final = 11  # of random numbers
GLOBAL: Final = 2  # global crops
_AREAS: Final = ((0.6, 1.0), (0.3, 0.6))  # of global and of local crops, as shares of the image
_ASPECT: Final = 4 / 3  # largest width over height, and height over width
_NUMBERS: Final = 10  # random ones of a crop
_CENTRE: Final = 0.9  # momentum of the centre (Caron 2021, table 7)
# widths of the projection head
_HIDDEN = 256
_BOTTLENECK = 64
# chance that a crop has no colour: that of a drawn object says nothing about its class
_GREY: Final = 0.5

Outputs = Float[Tensor, "crops batch outputs"]


class Said(NamedTuple):
    """What student and teacher say: logits of all crops, global ones first, and of the global
    crops.
    """

    student: Outputs
    teacher: Outputs


class SelfDistillation(nn.Module):
    """A student with its projection head, its teacher, and the centre of the teacher's outputs.

    settings: local_crops and their local_size in px; outputs; momentum of the teacher at the
    beginning, which rises to 1; centring; the temperatures; jitter of brightness, contrast and
    colour, as a share; turn in degrees. Raises InputError for crops that patches do not divide.
    """

    def __init__(self, model: Model, settings: Mapping[str, Any]) -> None:
        super().__init__()
        self.settings = settings
        size = settings["local_size"]
        patch = model.layout.patch_size
        if (
            settings["local_crops"] < 0
            or settings["outputs"] < 2
            or not 0 <= settings["momentum"] < 1
        ):
            raise InputError(
                "expected local_crops from 0, outputs from 2 and momentum in [0, 1), found "
                f"{settings['local_crops']}, {settings['outputs']} and {settings['momentum']}"
            )
        if min(settings["student_temperature"], settings["teacher_temperature"]) <= 0:
            raise InputError("expected temperatures above 0, found one of 0 or less")
        if settings["local_crops"] and (size < max(patch) or any(size % side for side in patch)):
            step = math.lcm(*patch)
            raise InputError(
                f"expected local crops divisible into patches of {patch[0]}x{patch[1]} px, found "
                f"{size} px; try {set_option('local_size', max(round(size / step), 1) * step)}"
            )
        self.student = Projected(model, settings["outputs"])
        self.teacher = deepcopy(self.student).requires_grad_(False).eval()
        self.register_buffer("centre", torch.zeros(settings["outputs"]))
        self.centre: Tensor
        # of the teacher's outputs since the last update: their sum and their number, in this
        # process
        self.register_buffer("seen", torch.zeros(settings["outputs"] + 1), persistent=False)
        self.seen: Tensor

    def train(self, mode: bool = True) -> "SelfDistillation":
        """Set the student's mode; the teacher stays without dropout and stochastic depth (Caron
        2021).
        """
        super().train(mode)
        self.teacher.eval()
        return self

    def inputs(self, images: Images, keys: Tensor, *, seed: int, epoch: int) -> tuple[Tensor, ...]:
        """Return the global crops (2, batch, 3, height, width) and the local ones, in [0, 1]."""
        local = self.settings["local_crops"]
        size = self.settings["local_size"]
        drawn = uniforms(keys, (GLOBAL + local) * _NUMBERS, STREAM, seed=seed, epoch=epoch)
        crops = drawn.to(images.device).view(len(images), -1, _NUMBERS).unbind(1)
        cut = ((crops[:GLOBAL], self.student.model.input_size), (crops[GLOBAL:], (size, size)))
        how = {name: self.settings[name] for name in ("jitter", "turn")}
        return tuple(
            torch.stack([cropped(images, each, size=side, area=area, **how) for each in draws])
            for (draws, side), area in zip(cut, _AREAS)
            if len(draws)
        )

    def forward(self, whole: Tensor, local: Tensor | None = None) -> Said:
        """Return the outputs on the crops."""
        count, batch = whole.shape[:2]
        with torch.no_grad():
            teacher = self.teacher(whole.flatten(0, 1)).unflatten(0, (count, batch))
        student = self.student(whole.flatten(0, 1)).unflatten(0, (count, batch))
        if local is not None:
            student = torch.cat(
                (student, self.student(local.flatten(0, 1)).unflatten(0, local.shape[:2]))
            )
        return Said(student, teacher)

    def losses(self, outputs: Any) -> Float[Tensor, " batch"]:
        """Return each image's loss in nats; in training the teacher's outputs count for the next
        centre.
        """
        student, teacher = (each.float() for each in outputs)
        if self.training:
            flat = teacher.detach().flatten(0, 1)
            self.seen += torch.cat((flat.sum(0), flat.new_tensor([len(flat)])))
        return agreement(
            student,
            self.probabilities(teacher).detach(),
            temperature=self.settings["student_temperature"],
        )

    def probabilities(self, teacher: Outputs) -> Outputs:
        """Return the teacher's probabilities: centred where the settings say so, and sharpened by
        its temperature.
        """
        centred = teacher - self.centre if self.settings["centring"] else teacher
        return torch.softmax(centred / self.settings["teacher_temperature"], -1)

    @torch.no_grad()
    def updated(self, progress: float, processes: Processes) -> None:
        """Move the teacher towards the student, and the centre towards the mean of what the teacher
        said.

        progress: share of the steps that are done; the momentum rises to 1 as a cosine (Caron 2021,
        section 3.1).
        """
        momentum = 1 - (1 - self.settings["momentum"]) * (math.cos(math.pi * progress) + 1) / 2
        mine = dict(self.student.named_parameters())
        for name, value in self.teacher.named_parameters():
            value.lerp_(mine[name], 1 - momentum)
        total = processes.total(self.seen).to(self.seen.device)
        self.centre.lerp_((total[:-1] / total[-1]).to(self.centre), 1 - _CENTRE)
        self.seen.zero_()

    def exported(self) -> Model:
        """Return the teacher, whose features are the better ones (Caron 2021, section 5.2)."""
        return self.teacher.model

    def measures(self, outputs: Sequence[Any]) -> Mapping[str, float]:
        """Return the teacher's entropy, and the information about the image in what it says, in
        nats.

        The entropy of its probabilities' mean over images minus their mean entropy is 0 where it
        says the same of every image, be it one output or all of them equally.
        """
        said = torch.cat(
            [self.probabilities(each.teacher.float()).flatten(0, 1) for each in outputs]
        )
        entropy = entropies(said).mean()
        return {
            "teacher_entropy": float(entropy),
            "teacher_information": float(entropies(said.mean(0)) - entropy),
        }


class Projected(nn.Module):
    """A ViT and its projection head: three layers to a vector of length 1, and its cosines with
    each output's.
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
        """Logits of crops in [0, 1] of any size that patches divide; positions are interpolated."""
        vit: Any = self.model.module
        features = vit.pool(vit.forward_features((crops - self.model.mean) / self.model.std))
        return F.linear(
            F.normalize(self.head(features), dim=-1), F.normalize(self.last.weight, dim=-1)
        )


def agreement(
    student: Outputs, teacher: Float[Tensor, "whole batch outputs"], *, temperature: float
) -> Float[Tensor, " batch"]:
    """Return the cross-entropy of the student's outputs on one crop with the teacher's
    probabilities on another, in nats: the mean over all pairs of a global crop and another crop
    (Caron 2021, equation 3).
    """
    said = (student / temperature).log_softmax(-1)
    pairs = [
        (wanted, crop)
        for wanted in range(len(teacher))
        for crop in range(len(student))
        if crop != wanted
    ]
    return -torch.stack([(teacher[wanted] * said[crop]).sum(-1) for wanted, crop in pairs]).mean(0)


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
    """Return each image's crop of a random area, aspect and angle, resized (bilinear), in random
    brightness, contrast, colour.

    draws: ten numbers in [0, 1) an image; area: smallest and largest, as shares of the image;
    jitter: largest change, as a share; turn: largest angle, in degrees.
    """
    share = area[0] + (area[1] - area[0]) * draws[:, 0]
    stretch = torch.exp((2 * draws[:, 1] - 1) * math.log(_ASPECT) / 2)
    wide, tall = ((share.sqrt() * each).clamp(max=1) for each in (stretch, 1 / stretch))
    across, down = ((2 * draws[:, at] - 1) * (1 - side) for at, side in ((2, wide), (3, tall)))
    zero = torch.zeros_like(wide)
    angle = math.radians(turn) * (2 * draws[:, 9] - 1)
    cos = angle.cos()
    sin = angle.sin()
    affine = torch.stack((wide * cos, -tall * sin, across, wide * sin, tall * cos, down), 1).view(
        -1, 2, 3
    )
    grid = F.affine_grid(affine, [len(images), 3, *size], align_corners=False)
    crop = F.grid_sample(
        images, grid, mode="bilinear", padding_mode="reflection", align_corners=False
    )
    gain, contrast = (1 + jitter * (2 * draws[:, at, None, None, None] - 1) for at in (4, 5))
    mean = crop.mean((1, 2, 3), keepdim=True)
    crop = (mean + contrast * (crop - mean)) * gain
    grey = crop.mean(1, keepdim=True)
    colour = torch.where(draws[:, 6] < _GREY, zero, 1 + jitter * (2 * draws[:, 7] - 1))[
        :, None, None, None
    ]
    turned = torch.stack([crop.roll(shift, 1) for shift in range(3)])[
        (3 * draws[:, 8]).long(), torch.arange(len(crop))
    ]
    return (grey + colour * (turned - grey)).clamp(0, 1)
