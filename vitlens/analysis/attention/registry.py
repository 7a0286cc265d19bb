"""The attention methods, which map attention to the image. One table, free of torch.

To add one, write its function, from a chain and settings to maps, and one entry here: `vitlens rollout`, its
report and the tests take it from there. An entry of vitlens/attribution/registry.py that names it makes it an
attribution as well.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, Literal

from vitlens.errors import UnknownNameError
from vitlens.references import resolved

_WITH_WEIGHTS: Final = 2.0  # cost, in forward passes, of a pass that computes all attention weights


@dataclass(frozen=True)
class AttentionMethod:
    """One attention method.

    title: in figures and tables; description: of its maps, in a sentence; paper: where it is defined.
    function: "module:function" that takes a chain (chain.py) and the options by name, and returns maps.
    needs: the requirement of the model (models/support.py), "chain" where the method goes through all layers.
    forwards, backwards: about how many passes of the model an image takes; with backward passes the chain has
    gradients, and the maps are those of a target class. options: the `MethodSettings` that the function takes.
    check: "module:function" of model and images that raises where the method cannot run although `needs` is met.
    default: whether `vitlens rollout` runs it by default; rules: of the backward pass, plain gradients or LibraGrad's.
    """

    name: str
    title: str
    description: str
    paper: str
    function: str
    needs: Literal["chain", "maps"]
    forwards: int | float
    backwards: int | float
    options: tuple[str, ...]
    check: str | None = None
    default: bool = False
    rules: Literal["plain", "libra"] = "plain"

    @property
    def gradients(self) -> bool:
        """Whether it needs gradients, and so a target class."""
        return self.backwards > 0

    @property
    def maps(self) -> Callable[..., Any]:
        """Its function."""
        return resolved(self.function)  # type: ignore[no-any-return]


_ENTRIES: Final = (
    AttentionMethod(
        name="rollout",
        title="rollout",
        description="attention propagated through all layers; the same for every class",
        paper="Abnar & Zuidema 2020",
        function="vitlens.analysis.attention.rollout:rollout_maps",
        needs="chain",
        forwards=_WITH_WEIGHTS,
        backwards=0,
        options=("fusion", "discard", "alpha", "start_layer"),
        default=True,
    ),
    AttentionMethod(
        name="relevance",
        title="relevance",
        description="attention that raises the target's logit, propagated through all layers (Chefer 2021)",
        paper="Chefer 2021, generic attention explainability",
        function="vitlens.analysis.attention.relevance:relevance_maps",
        needs="chain",
        forwards=0,
        backwards=1.5,
        options=("start_layer",),
        default=True,
    ),
    AttentionMethod(
        name="libra-relevance",
        title="Libra relevance",
        description="relevance with LibraGrad's gradients, which count attention, norms and activations once",
        paper="Mehri 2025 (LibraGrad) with Chefer 2021's rule",
        function="vitlens.analysis.attention.relevance:relevance_maps",
        needs="chain",
        forwards=0,
        backwards=1.5,
        options=("start_layer",),
        rules="libra",
    ),
    AttentionMethod(
        name="gradient-rollout",
        title="gradient-weighted rollout",
        description="rollout of the attention that raises the target's logit",
        paper="Abnar & Zuidema 2020 with Chefer 2021's weights",
        function="vitlens.analysis.attention.relevance:gradient_rollout_maps",
        needs="chain",
        forwards=0,
        backwards=1.5,
        options=("alpha", "start_layer"),
    ),
    AttentionMethod(
        name="attention",
        title="attention of the last layer",
        description="the mean of one layer's heads, the last by default",
        paper="the model's own weights",
        function="vitlens.analysis.attention.weights:layer_maps",
        needs="maps",
        forwards=_WITH_WEIGHTS,
        backwards=0,
        options=("layer",),
    ),
    AttentionMethod(
        name="flow",
        title="attention flow",
        description="the maximum flow from the readout to each patch (only for few tokens)",
        paper="Abnar & Zuidema 2020, section 3",
        function="vitlens.analysis.attention.flow:flow_maps",
        needs="chain",
        forwards=_WITH_WEIGHTS,
        backwards=0,
        options=("alpha",),
        check="vitlens.analysis.attention.flow:require_flow",
    ),
)

ATTENTION_METHODS: Final[Mapping[str, AttentionMethod]] = MappingProxyType({entry.name: entry for entry in _ENTRIES})


def attention_method(name: str) -> AttentionMethod:
    """The attention method of this name. Raises UnknownNameError, which lists the known ones."""
    if name not in ATTENTION_METHODS:
        raise UnknownNameError("method", name, ATTENTION_METHODS)
    return ATTENTION_METHODS[name]
