"""What the checks of one model share: its images, their target classes, and the methods as functions."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vitlens.analysis.answers.evaluate import answers
from vitlens.analysis.faithfulness.league import Settings
from vitlens.analysis.faithfulness.masking import require_substrate
from vitlens.analysis.faithfulness.randomisation import Explain
from vitlens.attribution.explain import explain, methods_for, require_method
from vitlens.attribution.refinement import Refinement
from vitlens.attribution.registry import ATTRIBUTIONS
from vitlens.data.split import Split
from vitlens.lens.quick_passes import quick_passes
from vitlens.models.model import Model
from vitlens.names import Engine
from vitlens.shapes import Images, Labels, Masks


@dataclass(frozen=True)
class Subject:
    """A model and its images with their target classes, on its device; functions: the methods by name."""

    model: Model
    split: Split
    images: Images
    classes: Labels
    functions: Mapping[str, Explain]
    settings: Settings

    @property
    def masks(self) -> Masks | None:
        """Masks of the objects on the model's device, None where they are not known."""
        return None if self.split.masks is None else self.split.masks.to(self.model.device)

    def first(self, count: int) -> "Subject":
        """The same with at most this many images."""
        if count >= len(self.images):
            return self
        part = self.split.pick(torch.arange(count))
        return replace(self, split=part, images=self.images[:count], classes=self.classes[:count])


def subject(
    model: Model,
    split: Split,
    targets: Tensor | None,
    *,
    methods: Sequence[str] | None = None,
    settings: Settings,
    engine: Engine = "vitlens",
    refinement: Refinement | None = None,
) -> Subject:
    """What is checked. targets: class indices (n,), None: the predictions; methods: names of the registry (None: all
    that are defined for the model). Raises UnsupportedError or UnknownNameError before any work."""
    names = tuple(methods or methods_for(model, engine=engine))
    for name in names:
        require_method(model, name, engine=engine)
    require_substrate(model, settings.substrate)
    images = torch.cat([batch.images for batch in split.batches(256, device=model.device)])
    if targets is None:
        targets = answers(model, split, batch_size=settings.batch_size).argmax(-1)
    functions = method_functions(names, settings, engine, refinement)
    return Subject(model, split, images, targets.to(model.device), functions, settings)


def method_functions(
    names: Sequence[str], settings: Settings, engine: Engine, refinement: Refinement | None
) -> dict[str, Explain]:
    """The methods as functions of (model, images, targets), by name."""
    return {name: _function(name, settings, engine, refinement) for name in names}


def _function(name: str, settings: Settings, engine: Engine, refinement: Refinement | None) -> Explain:
    def maps(model: Model, images: Tensor, targets: Tensor) -> Tensor:
        size, seed = settings.batch_size, settings.seed
        with quickly(model, name):
            return explain(
                model,
                images,
                targets=targets,
                method=name,
                refinement=refinement,
                engine=engine,
                batch_size=size,
                seed=seed,
            )

    return maps


@contextmanager
def quickly(model: Model, method: str) -> Iterator[None]:
    """Inside, the passes of a method that does not observe attention are quick ones."""
    if ATTRIBUTIONS[method].needs not in (None, "cam"):
        yield
        return
    with quick_passes(model):
        yield
