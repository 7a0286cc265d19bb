"""What the table of attribution methods (registry.py) says of each; free of torch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from vitlens.attribution.defaults import PATCHES
from vitlens.references import resolved

ANY_FAMILY: Final = ("vit", "windowed", "cnn", "other")


@dataclass(frozen=True, kw_only=True)
class Attribution:
    """One attribution method.

    title: in figures and tables; description: what its maps show, in a sentence; paper: where it is defined.
    function: "module:function" of (model, images, targets) that gives maps (batch, rows, columns); arguments: further
    ones that it is always called with; options: further ones that it takes by name, also through `vitlens.explain`,
    "seed" where something is random.
    resolution: "patch" (a ViT's patches, a CNN's last map or as many cells as a ViT would have) or "pixel" (of the
    input images); signed: whether it has negative values, which are evidence against the target.
    refined: whether its maps are refined by the attention between patches already.
    needs: the requirement that the model must meet (models/support.py); families: of the models that support it.
    needs_class: whether it explains a class, so that the model needs a classifier; complete: whether a map sums to
    F(image) - F(black), so that its completeness error is reported.
    forwards, backwards: about how many passes of the model one image takes.
    default: whether `vitlens explain` runs it where no method is named; studied: whether `vitlens study` checks it;
    preference: its rank among those of which a comparison takes the best of a model's first ones; None: not used;
    preference_with_texts: that of a language-image model, where it is another.
    candidate: its rank among those of which `--auto` chooses, the first few that a model supports: methods that explain
    a class and are not slow; None: not among them.
    package: its class in the grad-cam package, None where the package has none.
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
    families: tuple[str, ...] = ANY_FAMILY
    needs_class: bool = True
    complete: bool = False
    refined: bool = False
    default: bool = False
    studied: bool = False
    preference: int | None = None
    preference_with_texts: int | None = None
    candidate: int | None = None
    package: str | None = None

    @property
    def gradients(self) -> bool:
        """Whether it needs gradients."""
        return self.backwards > 0

    @property
    def random(self) -> bool:
        """Whether its maps depend on a seed."""
        return "seed" in self.options

    @property
    def slow(self) -> bool:
        """Whether it takes so many passes that a run without it is much shorter."""
        return self.forwards + self.backwards > PATCHES / 2

    @property
    def maps(self) -> Callable[..., Any]:
        """Its function."""
        return resolved(self.function)  # type: ignore[no-any-return]
