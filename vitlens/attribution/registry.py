"""Every attribution by name, for ViT and CNN: one function, one list, so that any command can ask for any of them.

Attention-aware LRP (AttnLRP, Achtibat 2024) is not among them: its library, LXT, comes under the Clear BSD licence,
which grants no patent rights, where ours, Apache-2.0, does; so it can be no dependency. Relevance (Chefer 2021) stands
nearest.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal, Protocol, runtime_checkable

import torch

from vitlens.analysis.answers.evaluate import fitting_batch_size
from vitlens.attribution.attention import followed
from vitlens.attribution.cam import ablationcam, eigencam, from_gradients, gradcam, scorecam
from vitlens.attribution.gradients import BACKWARD, input_x_gradient, integrated_gradients, saliency, smoothgrad
from vitlens.attribution.occlusion import occlusion
from vitlens.attribution.rise import rise
from vitlens.attribution.shap import kernel_shap
from vitlens.devices import evaluating
from vitlens.errors import InputError, UnknownNameError, UnsupportedError
from vitlens.models.model import Family, Model
from vitlens.models.support import NEEDS, meets, require
from vitlens.pixels import takes_images
from vitlens.shapes import Images, Labels, Maps


@runtime_checkable
class Attribution(Protocol):
    """Maps (batch, rows, columns) of images for target classes (batch,); seed: of what is random."""

    def __call__(self, model: Model, images: Images, targets: Labels, *, seed: int = 0) -> Maps:
        """Raw maps in float32, one an image, whatever the others in the batch."""
        ...


@dataclass(frozen=True)
class Method:
    """One attribution.

    families: of the models that can have it; resolution: "patch" (a ViT's patches, a CNN's last map or as many cells
    as a ViT would have) or "pixel" (of the images handed in); signed: whether negative values mean something, against
    the target; source: where it is defined; function: the maps; needs_class: whether it explains a class, which a model
    without a classifier does not have.
    """

    name: str
    title: str
    families: tuple[Family, ...]
    resolution: Literal["patch", "pixel"]
    signed: bool
    source: str
    function: Callable[..., Maps]
    needs_class: bool = True


def _unseeded(function: Callable[[Model, Images, Labels], Maps]) -> Attribution:
    """A method without anything random, called like those that have it."""

    def maps(model: Model, images: Images, targets: Labels, *, seed: int = 0) -> Maps:  # noqa: ARG001
        return function(model, images, targets)

    return maps


_ANY: Final[tuple[Family, ...]] = ("vit", "windowed", "cnn", "other")
_MAPPED: Final[tuple[Family, ...]] = ("vit", "windowed", "cnn")
_ATTENTIVE: Final[tuple[Family, ...]] = ("vit", "windowed")
_CHAINED: Final = ("relevance", "rollout", "gradient-rollout")  # need every layer to be followed

_LIST: Final = (
    Method(
        "relevance", "relevance", _ATTENTIVE, "patch", False,
        "Chefer 2021, generic attention explainability", _unseeded(followed("relevance")),
    ),
    Method(
        "rollout", "rollout", _ATTENTIVE, "patch", False,
        "Abnar & Zuidema 2020", _unseeded(followed("rollout")), needs_class=False,
    ),
    Method(
        "gradient-rollout", "gradient-weighted rollout", _ATTENTIVE, "patch", False,
        "Abnar & Zuidema 2020 with Chefer 2021's weights", _unseeded(followed("gradient-rollout")),
    ),
    Method(
        "attention", "attention of the last layer", _ATTENTIVE, "patch", False,
        "the model's own weights", _unseeded(followed("attention")), needs_class=False,
    ),
    Method("gradcam", "GradCAM", _MAPPED, "patch", True, "Selvaraju 2017", _unseeded(gradcam)),
    Method(
        "gradcam++", "GradCAM++", _MAPPED, "patch", True,
        "Chattopadhyay 2018", _unseeded(from_gradients("GradCAMPlusPlus")),
    ),
    Method("layercam", "LayerCAM", _MAPPED, "patch", True, "Jiang 2021", _unseeded(from_gradients("LayerCAM"))),
    Method("hirescam", "HiResCAM", _MAPPED, "patch", True, "Draelos 2020", _unseeded(from_gradients("HiResCAM"))),
    Method("xgradcam", "XGradCAM", _MAPPED, "patch", True, "Fu 2020", _unseeded(from_gradients("XGradCAM"))),
    Method("eigencam", "EigenCAM", _MAPPED, "patch", True, "Muhammad 2020", _unseeded(eigencam), needs_class=False),
    Method("scorecam", "ScoreCAM", _MAPPED, "patch", True, "Wang 2020", _unseeded(scorecam)),
    Method("ablationcam", "AblationCAM", _MAPPED, "patch", True, "Desai 2020", _unseeded(ablationcam)),
    Method("saliency", "saliency", _ANY, "pixel", False, "Simonyan 2014", _unseeded(saliency)),
    Method(
        "input-x-gradient", "input x gradient", _ANY, "pixel", True,
        "Shrikumar 2016", _unseeded(input_x_gradient),
    ),
    Method("smoothgrad", "SmoothGrad", _ANY, "pixel", False, "Smilkov 2017", smoothgrad),
    Method(
        "integrated-gradients", "integrated gradients", _ANY, "pixel", True,
        "Sundararajan 2017", _unseeded(integrated_gradients),
    ),
    Method("occlusion", "occlusion", _ANY, "patch", True, "Zeiler & Fergus 2014", _unseeded(occlusion)),
    Method("rise", "RISE", _ANY, "pixel", False, "Petsiuk 2018", rise),
    Method("kernel-shap", "KernelSHAP", _ANY, "patch", True, "Lundberg & Lee 2017", kernel_shap),
)  # fmt: skip

METHODS: Final[Mapping[str, Method]] = MappingProxyType({method.name: method for method in _LIST})


def methods_for(model: Model) -> tuple[str, ...]:
    """Names of the methods that this model has, in the registry's order."""
    able = [name for name, method in METHODS.items() if model.anatomy.family in method.families]
    if "rollout" in able and not meets(model, "chain"):
        able = [name for name in able if name not in _CHAINED]
    if "gradcam" in able and not meets(model, "cam"):
        able = [name for name in able if not name.endswith(("cam", "cam++"))]
    return tuple(name for name in able if model.has_classifier or not METHODS[name].needs_class)


@takes_images
def explain(
    model: Model,
    images: Images,
    *,
    targets: Labels | None = None,
    method: str = "relevance",
    batch_size: int | None = None,
    seed: int = 0,
) -> Maps:
    """What of each image speaks for its target class, by any method: raw maps (batch, rows, columns), signed where the
    method is.

    images: pixels in [0, 1]; targets: class indices (batch,), None: the predicted classes; method: a name of
    `methods_for(model)`; batch_size: images at a time (None: chosen to fit); seed: of SmoothGrad, RISE and
    KernelSHAP. Raises UnknownNameError for no such method, UnsupportedError for one that this model has not (without
    a classifier none that explains a class), and InputError for a class that is not there.

    >>> import torch, vitlens
    >>> cnn = vitlens.load("cnn-digits")
    >>> vitlens.explain(cnn, torch.rand(2, 3, 32, 32), method="gradcam").shape
    torch.Size([2, 8, 8])
    """
    require(model, *NEEDS["explain"])
    require_method(model, method)
    size = batch_size or max(1, fitting_batch_size(model) // BACKWARD)
    asked = _checked(model, images, targets) if targets is not None else _predicted(model, images, size)
    maps = []
    for start in range(0, len(images), size):
        batch, own = images[start : start + size].to(model.device), asked[start : start + size]
        maps.append(METHODS[method].function(model, batch, own.to(model.device), seed=seed).float())
    return torch.cat(maps)


def require_method(model: Model, method: str) -> None:
    """Raise UnknownNameError unless there is such a method, UnsupportedError unless this model has it."""
    if method not in METHODS:
        raise UnknownNameError("method", method, METHODS)
    if METHODS[method].needs_class:
        model.require_classifier()
    able = methods_for(model)
    if method not in able:
        raise UnsupportedError(
            f"expected a method that {model.alias} ({model.anatomy.family}) has, found {method!r}; "
            f"it has {', '.join(able)}"
        )


def _predicted(model: Model, images: Images, size: int) -> Labels:
    if not model.has_classifier:  # the methods that it has leave the targets aside
        return torch.zeros(len(images), dtype=torch.int64)
    with evaluating(model), torch.no_grad():
        return torch.cat([model(part.to(model.device)).argmax(-1) for part in images.split(size)])


def _checked(model: Model, images: Images, targets: Labels) -> Labels:
    model.require_classifier()
    if len(targets) != len(images):
        raise InputError(f"expected one target an image ({len(images)}), found {len(targets)}")
    wrong = [int(target) for target in targets if not 0 <= target < len(model.classes)]
    if wrong:
        raise InputError(f"expected target classes from 0 to {len(model.classes) - 1}, found {wrong[0]}")
    return targets
