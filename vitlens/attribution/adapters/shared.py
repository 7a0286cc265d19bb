"""What adapters share: the entry of a library's method, and the copy of a model that it runs on.

Libraries set modes, clear gradients, merge weights and, when an exception stops them, leave hooks.
They therefore get a frozen copy of the network, and the model is out of their reach.
"""

import copy
import math
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from vitlens.attribution.adapters.registry import Library, note_of
from vitlens.attribution.registry import Attribution
from vitlens.errors import UnsupportedError, flags_are_typed, in_one_line
from vitlens.lens.trace import probe_images
from vitlens.models.hooks import is_within_context
from vitlens.models.model import Model
from vitlens.models.requirement import Requirement
from vitlens.models.token_order import reordered
from vitlens.shapes import Images, Labels, Logits, Maps
from vitlens.turns import turn

# Rules of LRP conserve relevance: the pixels sum to what the target starts with. A pixel that is
# 1 / eps times as large as that sum leaves no digit of it in float32.
_LARGEST_RELEVANCE: Final = 1 / torch.finfo(torch.float32).eps


@dataclass(frozen=True, kw_only=True)
class LibraryMethod(Attribution):
    """A method of a library, as an entry of the registry.

    It supports a model on which it explains one image of noise. A slow one is not tried.
    """

    @property
    def requirement(self) -> Requirement:
        """Return the requirement that the method runs on the model."""
        return Requirement(self.name, self._try)

    def _try(self, model: Model) -> None:
        images = probe_images(model, 1)
        if self.slow or images.is_meta:
            return
        target = torch.zeros(1, dtype=torch.long, device=images.device)
        self.maps(model, images, target, **self.arguments)


def library_method(library: Library, variant: str, **fields: Any) -> LibraryMethod:
    """Return the entry of one method of a library.

    variant: its name as the library writes it. The adapter's `library_maps` gets it, and the full
        name of the method.
    fields: further fields of the entry.
    """
    name = f"{library.name}:{kebab(variant)}"
    package = f"{library.package} {library.version}"
    description = fields.pop("description", f"{variant} of {package}")
    return LibraryMethod(
        name=name,
        title=f"{variant} ({library.package})",
        description=description,
        paper=package,
        function=f"{library.adapter}:library_maps",
        arguments={"name": name, "variant": variant},
        **fields,
    )


class Network(nn.Module):
    """A frozen copy of a model's network, from prepared images to logits.

    ReLUs do not work in place, because rules of libraries need their inputs.

    share: True for a copy that shares the memory of the weights.
    """

    def __init__(self, model: Model, *, share: bool = True) -> None:
        super().__init__()
        memo = {}  # of deepcopy: the copies that it takes, by the id of the original
        if share:
            for parameter in model.module.parameters():
                memo[id(parameter)] = nn.Parameter(parameter.detach(), requires_grad=False)
        self.module = copy.deepcopy(model.module, memo).eval().requires_grad_(False)
        for module in self.module.modules():
            if getattr(module, "inplace", False):
                vars(module)["inplace"] = False
        self.read_output = model.read_output
        self.reordering = model.anatomy.reordering

    def forward(self, prepared: Tensor) -> Logits:
        """Return logits (batch, classes) of images that are resized and normalised."""
        with reordered(self.module, self.reordering):
            logits: Logits = self.read_output(self.module(prepared))
        return logits

    def has(self, *types: type[nn.Module]) -> bool:
        """Return True if it has a module of one of these classes."""
        return any(isinstance(module, types) for module in self.module.modules())


@contextmanager
def running(library: Library, model: Model, name: str) -> Iterator[None]:
    """Run a method of a library: its errors become one line, and its remarks are not shown.

    Gradients are enabled, mixed precision is not. Raises UnsupportedError inside contexts that
    change the model.
    """
    if is_within_context(model.module):
        raise UnsupportedError(
            f"expected an unchanged {model.alias} for {name}, which copies it, found it "
            "changed by a context such as intervene; inside the context use a method of "
            "vitlens"
        )
    full_precision = torch.autocast(model.device.type, enabled=False)
    title = f"a model that {library.package} can explain by {name}"
    hint = f"use another method for {model.alias}"
    with (
        turn(model),
        in_one_line(title, hint, UnsupportedError),
        warnings.catch_warnings(),
        torch.enable_grad(),
        full_precision,
    ):
        for remark in library.remarks:
            warnings.filterwarnings("ignore", message=remark)
        yield


def prepared(model: Model, images: Images) -> Tensor:
    """Return images as the network takes them, a leaf that requires a gradient."""
    return model.prepare(images.detach().clone()).detach().requires_grad_()


def one_hot(targets: Labels, logits: Logits) -> Tensor:
    """Return 1 for the target of each image, 0 for the other classes."""
    mask = torch.zeros_like(logits)
    return mask.scatter(1, targets[:, None], 1.0)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed torch's and NumPy's global generators, which libraries use; restored on exit."""
    state = np.random.get_state()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        np.random.seed(seed)
        try:
            yield
        finally:
            np.random.set_state(state)


def image_by_image(
    explain: Callable[[Tensor, Labels], Maps], inputs: Tensor, targets: Labels, *, seed: int | None
) -> Maps:
    """Return the maps of a function that explains one prepared image at a time.

    seed: where every image's draws start, so that a map does not depend on the batch; None for a
        method without draws.
    """
    maps = []
    for image, target in zip(inputs.split(1), targets.split(1)):
        leaf = image.detach().requires_grad_()
        with nullcontext() if seed is None else seeded(seed):
            maps.append(explain(leaf, target))
    return torch.cat(maps)


def require_conserved(maps: Maps, start: float, *, model: Model, name: str) -> None:
    """Raise UnsupportedError for maps of LRP in which sums near zero, or zero, divided relevance.

    maps: (batch, height, width).
    start: the largest relevance that a target starts with.
    """
    largest = float(maps.abs().max())
    if math.isnan(largest) or largest > _LARGEST_RELEVANCE * start:
        raise UnsupportedError(
            f"expected relevance near that of the target, {start:.3g}, for {name}, found "
            f"{largest:.3g} at a pixel of {model.alias}: its rule divides by sums near zero; use "
            "autolrp:composite"
        )


@cache
def note_once(name: str) -> None:
    """Warn with the note of a method, once in a process.

    The command line prints it itself.
    """
    if not flags_are_typed():
        warnings.warn(note_of(name), stacklevel=2)


def kebab(name: str) -> str:
    """Return the name of a class or a composite in lower case, words joined by hyphens.

    What ends in CAM is one word, as papers write it: KPCA_CAM is kpca-cam, GradCAMPlusPlus
    gradcam-plus-plus.

    >>> kebab("IntegratedGradients"), kebab("EigenGradCAM"), kebab("epsilon_plus")
    ('integrated-gradients', 'eigengradcam', 'epsilon-plus')
    """
    head, cam, tail = name.rpartition("CAM")
    words = re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "-", tail)
    parts = [part for part in (head + cam, words) if part]
    return "-".join(parts).replace("_", "-").lower()
