"""The changed model is the model: inside `intervene`, a user's hook or another forward, every function of a model gives
what it gives for a model whose modules are really changed."""

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import fields, is_dataclass
from functools import cache

import pytest
import torch
from torch import Tensor

from tests.contracts.entries import ENTRIES, MODELS, batch_of, shared
from tests.kit.changed import changed_places, intervened, is_output, really_changed
from vitlens import Model
from vitlens.errors import UnsupportedError

WAYS = ("intervene", "hook", "forward")
Case = tuple[str, str, str, str]  # entry, model, place, way


def every_case() -> Iterator[Case]:
    for name, entry in ENTRIES.items():
        for on in entry.models:
            for place in changed_places(shared(on)):
                for way in WAYS if is_output(shared(on), place) else WAYS[:1]:
                    yield name, on, place, way


def test_x():
    pass
