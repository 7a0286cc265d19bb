"""The attribution methods, for ViT and CNN, in one table; free of torch.

Commands, reports, docs and tests read it. To add a method, write its function (a model, images and
target classes in, raw maps out) and one entry here. An attention method
(analysis/attention/registry.py) becomes an attribution by an entry that names it. Methods of other
libraries (adapters/registry.py) have an entry only while their library is in use.

Layer-wise relevance propagation (LRP) is not implemented here: it is patented (US 12061966 B2,
EP 3271863 B1). Adapters run it by other libraries. The closest methods here are relevance (Chefer
2021) and libra-relevance.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal

from vitlens.analysis.attention.registry import ATTENTION_METHODS
from vitlens.attribution.adapters.registry import is_of_library, library_method
from vitlens.errors import UnknownNameError
from vitlens.references import resolved

if TYPE_CHECKING:
    from vitlens.models.model import Model
    from vitlens.models.requirement import Requirement

# settings of methods by default, and the sizes from which their numbers of passes are estimated
SAMPLES: Final = 25  # noisy copies of SmoothGrad
NOISE: Final = 0.15  # its standard deviation, as a share of each image's range of values
STEPS: Final = 50  # of integrated gradients
BASELINE: Final = 0.0  # value of the pixels of its baseline image: black
MASKS: Final = 512  # of RISE
COALITIONS: Final = 512  # of KernelSHAP; four per patch where that is more
PATCHES: Final = 196  # that occlusion removes one by one: 14 x 14 of a ViT at 224 px
# channels of the target layer, at least: ScoreCAM and AblationCAM run one forward for each
CHANNELS: Final = 192
LAST_BLOCKS: Final = 2  # the blocks of a language-image model that LeGrad sums
# "module:requirement" by `Attribution.needs`
_REQUIREMENTS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "chain": "vitlens.analysis.attention.chain:require_chain",
        "maps": "vitlens.analysis.attention.weights:require_maps",
        "cam": "vitlens.attribution.cam:require_target_layer",
        "depths": "vitlens.attribution.legrad:require_legrad",
    }
)


@dataclass(frozen=True, kw_only=True)
class Attribution:
    """One attribution method.

    title: in figures and tables.
    description: the description of its maps, in a sentence.
    paper: in which it is defined.
    function: "module:function" of (model, images, targets) that gives maps (batch, rows, columns).
    resolution: the patches of a ViT, the last map of a CNN or the cells of a ViT, or the pixels of
        the input.
    signed: whether it has negative values, which are evidence against the target.
    forwards, backwards: about how many passes of the model one image takes.

    arguments: further arguments of every call of the function.
    options: further arguments that the user may set in `vitlens.explain`; "seed" where the method
        draws random numbers.
    needs: what the model must have.
    families: the families of the models that support it.
    needs_class: whether it explains a class, so that the model needs a classifier.
    complete: whether a map sums to F(image) - F(black), so that its completeness error is reported.
    refined: whether its maps are refined by the attention between patches already.

    default: whether `vitlens explain` runs it where no method is named.
    studied: whether `vitlens study` checks it.
    preference: its rank for comparisons, which take the first methods that a model supports; None:
        not used.
    preference_with_texts: its rank for a language-image model, if that differs.
    candidate: its rank for `--auto`; only methods that explain a class and are not slow have one.
    """

    name: str
    title: str
    description: str
    paper: str
    function: str
    resolution: Literal["patch", "pixel"]
    signed: bool
    forwards: int | float = 0
    backwards: int | float = 0
    arguments: Mapping[str, object] = field(default_factory=dict)
    options: tuple[str, ...] = ()
    needs: Literal["chain", "maps", "cam", "depths"] | None = None
    families: tuple[str, ...] = ("vit", "windowed", "cnn", "other")
    needs_class: bool = True
    complete: bool = False
    refined: bool = False
    default: bool = False
    studied: bool = False
    preference: int | None = None
    preference_with_texts: int | None = None
    candidate: int | None = None

    @property
    def requirement(self) -> "Requirement | None":
        """Return the requirement on the model; None where there is none."""
        if self.needs is None:
            return None
        requirement: Requirement = resolved(_REQUIREMENTS[self.needs])
        return requirement

    def is_supported_by(self, model: "Model") -> bool:
        """Return True if the method applies to a model of this family and structure.

        Its classes do not count.
        """
        if model.anatomy.family not in self.families:
            return False
        return self.requirement is None or self.requirement.is_met(model)

    @property
    def gradients(self) -> bool:
        """Return True if it needs gradients."""
        return self.backwards > 0

    @property
    def random(self) -> bool:
        """Return True if its maps depend on a seed."""
        return "seed" in self.options

    @property
    def slow(self) -> bool:
        """Return True if it takes so many passes that a run without it is much shorter."""
        return self.forwards + self.backwards > PATCHES / 2

    @property
    def maps(self) -> Callable[..., Any]:
        """Return the function."""
        return resolved(self.function)  # type: ignore[no-any-return]


def _from_attention(name: str, **fields: Any) -> Attribution:
    """Return an attention method as an attribution, with its default settings."""
    method = ATTENTION_METHODS[name]
    options = method.options
    if method.needs == "chain":
        options = (*options, "readout")
    return Attribution(
        name=name,
        title=method.title,
        description=method.description,
        paper=method.paper,
        function="vitlens.analysis.attention.methods:method_maps",
        arguments={"method": name},
        options=options,
        resolution="patch",
        signed=False,
        needs=method.needs,
        families=("vit", "windowed", "other"),
        needs_class=method.gradients,
        forwards=method.forwards,
        backwards=method.backwards,
        **fields,
    )


def _cam(
    *,
    name: str,
    function: str = "cam_maps",
    arguments: Mapping[str, object] | None = None,
    backwards: int = 1,
    **fields: Any,
) -> Attribution:
    """Return a class activation map, by default one of the rules of cam.py."""
    if arguments is None:
        arguments = {"rule": name}
    return Attribution(
        name=name,
        function=f"vitlens.attribution.cam:{function}",
        arguments=arguments,
        backwards=backwards,
        resolution="patch",
        signed=True,
        needs="cam",
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
        function="vitlens.attribution.legrad:legrad",
        title="LeGrad",
        description=(
            "the attention of each block that raises the target's logit of the block's output, "
            "over all blocks"
        ),
        paper="Bousselham 2025",
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
        function="vitlens.attribution.best:best_maps",
        title="combined map (best)",
        description=(
            "where gradient-weighted rollout, GradCAM and HiResCAM agree, in one of three "
            "versions, by a test on the image"
        ),
        paper=(
            "vitlens (docs/explain.md), from Chefer 2021, Selvaraju 2017, Draelos 2020, Mehri "
            "2025, Sundararajan 2017"
        ),
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
        name="gradcam",
        title="GradCAM",
        description="channels weighted by their mean gradient",
        paper="Selvaraju 2017",
        default=True,
        studied=True,
        preference=2,
        candidate=3,
    ),
    _cam(
        name="gradcam++",
        title="GradCAM++",
        description="channels weighted by their positive gradients, rare ones more",
        paper="Chattopadhyay 2018",
        candidate=9,
    ),
    _cam(
        name="layercam",
        title="LayerCAM",
        description="activations times their positive gradients, cell by cell",
        paper="Jiang 2021",
        preference=5,
        candidate=7,
    ),
    _cam(
        name="hirescam",
        title="HiResCAM",
        description="activations times their gradients, cell by cell",
        paper="Draelos 2020",
        candidate=8,
    ),
    _cam(
        name="xgradcam",
        title="XGradCAM",
        description="channels weighted by the activation-weighted mean of their gradients",
        paper="Fu 2020",
        candidate=10,
    ),
    _cam(
        name="eigencam",
        title="EigenCAM",
        description="the first principal component of the activations; the same for every class",
        paper="Muhammad 2020",
        function="eigencam_maps",
        arguments={},
        needs_class=False,
        forwards=1,
        backwards=0,
    ),
    _cam(
        name="scorecam",
        title="ScoreCAM",
        description="channels weighted by the target's logit for the image masked with them",
        paper="Wang 2020",
        function="scorecam",
        arguments={},
        forwards=CHANNELS,
        backwards=0,
    ),
    _cam(
        name="ablationcam",
        title="AblationCAM",
        description="channels weighted by the fall of the target's logit without them",
        paper="Desai 2020",
        function="ablationcam",
        arguments={},
        forwards=CHANNELS,
        backwards=0,
    ),
    Attribution(
        name="saliency",
        function="vitlens.attribution.gradients:saliency",
        title="saliency",
        description="the largest absolute gradient of the three channels",
        paper="Simonyan 2014",
        resolution="pixel",
        signed=False,
        backwards=1,
        preference=6,
        candidate=11,
    ),
    Attribution(
        name="input-x-gradient",
        function="vitlens.attribution.gradients:input_x_gradient",
        title="input x gradient",
        description=(
            "pixel times gradient: the fall of the logit, to first order, if the pixel turned black"
        ),
        paper="Shrikumar 2016",
        resolution="pixel",
        signed=True,
        backwards=1,
    ),
    Attribution(
        name="smoothgrad",
        function="vitlens.attribution.gradients:smoothgrad",
        title="SmoothGrad",
        description="saliency of the mean gradient over noisy copies",
        paper="Smilkov 2017",
        options=("samples", "noise", "seed"),
        resolution="pixel",
        signed=False,
        backwards=SAMPLES,
    ),
    Attribution(
        name="integrated-gradients",
        function="vitlens.attribution.gradients:integrated_gradients",
        title="integrated gradients",
        description="gradients summed along the path from black to the image",
        paper="Sundararajan 2017",
        options=("steps", "baseline"),
        resolution="pixel",
        signed=True,
        complete=True,
        backwards=STEPS,
        default=True,
    ),
    Attribution(
        name="occlusion",
        function="vitlens.attribution.masked:occlusion",
        title="occlusion",
        description=(
            "the fall of the target's logit when a patch is replaced by the image's mean colour"
        ),
        paper="Zeiler & Fergus 2014",
        resolution="patch",
        signed=True,
        forwards=PATCHES,
        default=True,
        studied=True,
        preference=4,
    ),
    Attribution(
        name="rise",
        function="vitlens.attribution.masked:rise",
        title="RISE",
        description="the target's mean probability over random masks in which a pixel is visible",
        paper="Petsiuk 2018",
        options=("masks", "seed"),
        resolution="pixel",
        signed=False,
        forwards=MASKS,
    ),
    Attribution(
        name="kernel-shap",
        function="vitlens.attribution.masked:kernel_shap",
        title="KernelSHAP",
        description="each patch's Shapley value for the target's logit",
        paper="Lundberg & Lee 2017",
        options=("coalitions", "seed"),
        resolution="patch",
        signed=True,
        forwards=COALITIONS,
    ),
)

ATTRIBUTIONS: Final[Mapping[str, Attribution]] = MappingProxyType(
    {entry.name: entry for entry in _ENTRIES}
)


def attribution(name: str) -> Attribution:
    """Return the attribution method of this name, or of another library as LIBRARY:NAME.

    Raises UnknownNameError for an unknown name, InputError for a library that is not installed.
    """
    if is_of_library(name):
        return library_method(name)
    if name not in ATTRIBUTIONS:
        raise UnknownNameError("method", name, ATTRIBUTIONS)
    return ATTRIBUTIONS[name]


def method_title(name: str) -> str:
    """Return the title of a method; its name for one of another library, which is not imported."""
    entry = ATTRIBUTIONS.get(name)
    return name if entry is None else entry.title


def default_methods() -> tuple[str, ...]:
    """Return the methods that `vitlens explain` runs by default, where the model supports them."""
    return tuple(name for name, entry in ATTRIBUTIONS.items() if entry.default)
