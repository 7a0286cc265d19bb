"""The attribution methods, for ViT and CNN. One table, free of torch, that commands, reports, docs and tests read.

To add one, write its function (a model, images and target classes in, raw maps out) and one entry here. An attention
method (analysis/attention/registry.py) becomes an attribution by an entry that names it.

Attention-aware LRP (AttnLRP, Achtibat 2024) is not included: its library, LXT, is under the Clear BSD licence, which
grants no patent rights, whereas ours, Apache-2.0, does, so LXT cannot be a dependency; LRP itself is patented (US
12061966 B2, EP 3271863 B1). The closest methods here are relevance (Chefer 2021) and libra-relevance.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from vitlens.analysis.attention.registry import ATTENTION_METHODS
from vitlens.attribution.defaults import CHANNELS, COALITIONS, MASKS, PATCHES, SAMPLES, STEPS
from vitlens.attribution.entry import Attribution as Attribution
from vitlens.errors import UnknownNameError


def _from_attention(name: str, **fields: Any) -> Attribution:
    """An attention method as an attribution, with its default settings."""
    method = ATTENTION_METHODS[name]
    return Attribution(
        name=name,
        title=method.title,
        description=method.description,
        paper=method.paper,
        function="vitlens.analysis.attention.methods:method_maps",
        arguments={"method": name},
        options=(*method.options, *(("readout",) if method.needs == "chain" else ())),
        resolution="patch",
        signed=False,
        needs=method.needs,
        families=("vit", "windowed", "other"),
        needs_class=method.gradients,
        forwards=method.forwards,
        backwards=method.backwards,
        **fields,
    )


def _cam(name: str, *, rule: str, **fields: Any) -> Attribution:
    """A class activation map by a rule on activations and gradients, "module:function"."""
    return Attribution(
        name=name,
        function="vitlens.attribution.cam:cam_maps",
        arguments={"rule": rule},
        resolution="patch",
        signed=True,
        needs="cam",
        backwards=1,
        **fields,
    )


_ENTRIES: Final = (
    _from_attention("relevance", default=True, studied=True, preference=1, candidate=2),
    _from_attention("rollout", default=True, studied=True),
    _from_attention("libra-relevance", candidate=4),
    _from_attention("gradient-rollout", candidate=5),
    _from_attention("attention", preference=3),
    Attribution(
        name="legrad",
        title="LeGrad",
        description="the attention of each block that raises the target's logit of the block's output, over all blocks",
        paper="Bousselham 2025",
        function="vitlens.attribution.legrad:legrad",
        options=("start_layer", "readout"),
        resolution="patch",
        signed=False,
        needs="depths",
        families=("vit",),
        backwards=1,
        preference_with_texts=-1,
        candidate=6,
    ),
    Attribution(
        name="best",
        title="combined map (best)",
        description="where gradient-weighted rollout, GradCAM and HiResCAM agree, tested on the image",
        paper="vitlens (docs/explain.md), from Chefer 2021, Selvaraju 2017, Draelos 2020, Mehri 2025, "
        "Sundararajan 2017",
        function="vitlens.attribution.best:best_maps",
        resolution="patch",
        refined=True,
        signed=False,
        needs="chain",
        families=("vit",),
        forwards=6,
        backwards=3,
        default=True,
        studied=True,
        preference=0,
        preference_with_texts=2,
        candidate=1,
    ),
    _cam(
        "gradcam",
        title="GradCAM",
        description="channels weighted by their mean gradient",
        paper="Selvaraju 2017",
        rule="vitlens.attribution.cam:gradcam",
        package="GradCAM",
        default=True,
        studied=True,
        preference=2,
        candidate=3,
    ),
    _cam(
        "gradcam++",
        title="GradCAM++",
        description="channels weighted by their positive gradients, rare ones more",
        paper="Chattopadhyay 2018",
        rule="vitlens.attribution.cam:gradcam_plus_plus",
        package="GradCAMPlusPlus",
        candidate=9,
    ),
    _cam(
        "layercam",
        title="LayerCAM",
        description="activations times their positive gradients, cell by cell",
        paper="Jiang 2021",
        rule="vitlens.attribution.cam:layercam",
        package="LayerCAM",
        preference=5,
        candidate=7,
    ),
    _cam(
        "hirescam",
        title="HiResCAM",
        description="activations times their gradients, cell by cell",
        paper="Draelos 2020",
        rule="vitlens.attribution.cam:hirescam",
        package="HiResCAM",
        candidate=8,
    ),
    _cam(
        "xgradcam",
        title="XGradCAM",
        description="channels weighted by the activation-weighted mean of their gradients",
        paper="Fu 2020",
        rule="vitlens.attribution.cam:xgradcam",
        package="XGradCAM",
        candidate=10,
    ),
    Attribution(
        name="eigencam",
        title="EigenCAM",
        description="the first principal component of the activations; the same for every class",
        paper="Muhammad 2020",
        function="vitlens.attribution.cam:eigencam_maps",
        resolution="patch",
        signed=True,
        needs="cam",
        package="EigenCAM",
        needs_class=False,
        forwards=1,
    ),
    Attribution(
        name="scorecam",
        title="ScoreCAM",
        description="channels weighted by the target's logit for the image masked with them",
        paper="Wang 2020",
        function="vitlens.attribution.cam:scorecam",
        resolution="patch",
        signed=True,
        needs="cam",
        package="ScoreCAM",
        forwards=CHANNELS,
    ),
    Attribution(
        name="ablationcam",
        title="AblationCAM",
        description="channels weighted by the fall of the target's logit without them",
        paper="Desai 2020",
        function="vitlens.attribution.cam:ablationcam",
        resolution="patch",
        signed=True,
        needs="cam",
        package="AblationCAM",
        forwards=CHANNELS,
    ),
    Attribution(
        name="saliency",
        title="saliency",
        description="the largest absolute gradient of the three channels",
        paper="Simonyan 2014",
        function="vitlens.attribution.gradients:saliency",
        resolution="pixel",
        signed=False,
        backwards=1,
        preference=6,
        candidate=11,
    ),
    Attribution(
        name="input-x-gradient",
        title="input x gradient",
        description="pixel times gradient: the first-order fall of the logit if the pixel turned black",
        paper="Shrikumar 2016",
        function="vitlens.attribution.gradients:input_x_gradient",
        resolution="pixel",
        signed=True,
        backwards=1,
    ),
    Attribution(
        name="smoothgrad",
        title="SmoothGrad",
        description="saliency of the mean gradient over noisy copies",
        paper="Smilkov 2017",
        function="vitlens.attribution.gradients:smoothgrad",
        options=("samples", "noise", "seed"),
        resolution="pixel",
        signed=False,
        backwards=SAMPLES,
    ),
    Attribution(
        name="integrated-gradients",
        title="integrated gradients",
        description="gradients summed along the path from black to the image",
        paper="Sundararajan 2017",
        function="vitlens.attribution.gradients:integrated_gradients",
        options=("steps", "baseline"),
        resolution="pixel",
        signed=True,
        complete=True,
        backwards=STEPS,
        default=True,
    ),
    Attribution(
        name="occlusion",
        title="occlusion",
        description="the fall of the target's logit when a patch is replaced by the image's mean colour",
        paper="Zeiler & Fergus 2014",
        function="vitlens.attribution.occlusion:occlusion",
        resolution="patch",
        signed=True,
        forwards=PATCHES,
        default=True,
        studied=True,
        preference=4,
    ),
    Attribution(
        name="rise",
        title="RISE",
        description="the target's mean probability over random masks in which a pixel is visible",
        paper="Petsiuk 2018",
        function="vitlens.attribution.rise:rise",
        options=("masks", "seed"),
        resolution="pixel",
        signed=False,
        forwards=MASKS,
    ),
    Attribution(
        name="kernel-shap",
        title="KernelSHAP",
        description="each patch's Shapley value for the target's logit",
        paper="Lundberg & Lee 2017",
        function="vitlens.attribution.shap:kernel_shap",
        options=("coalitions", "seed"),
        resolution="patch",
        signed=True,
        forwards=COALITIONS,
    ),
)

ATTRIBUTIONS: Final[Mapping[str, Attribution]] = MappingProxyType({entry.name: entry for entry in _ENTRIES})


def attribution(name: str) -> Attribution:
    """The attribution method of this name. Raises UnknownNameError, which lists the known ones."""
    if name not in ATTRIBUTIONS:
        raise UnknownNameError("method", name, ATTRIBUTIONS)
    return ATTRIBUTIONS[name]


def default_methods() -> tuple[str, ...]:
    """The methods that `vitlens explain` runs by default, where the model supports them."""
    return tuple(name for name, entry in ATTRIBUTIONS.items() if entry.default)
