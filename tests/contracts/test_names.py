"""The words that the command line offers are those that are there: names, registries, choices, the public API."""

import ast
from collections.abc import Callable
from io import BytesIO
from itertools import combinations
from pathlib import Path
from typing import Any

import jaxtyping
import pytest
import torch
from matplotlib.figure import Figure
from torch import Tensor

import vitlens
from tests.lens.tiny import images, ours
from vitlens import names
from vitlens.analysis.attention.methods import fused
from vitlens.analysis.attention.registry import MethodSettings
from vitlens.analysis.faithfulness.removal import Variants
from vitlens.analysis.features.embedding import embed
from vitlens.analysis.features.neighbours import Neighbours, vote
from vitlens.devices import autocast
from vitlens.errors import UnknownNameError
from vitlens.models.configs import VIT_PRESETS
from vitlens.training.recipe import RECIPES


def test_every_preset_can_be_built():
    from vitlens.models.loading import untrained

    for name in names.PRESETS:
        if not name.endswith("-224"):
            assert untrained(name, classes=("a", "b")).parameter_count() > 0
    assert {name for name in names.PRESETS if name.startswith("vit")} == set(VIT_PRESETS)


def test_every_preset_has_a_recipe():
    assert {name for name in RECIPES if "/" not in name} == set(names.PRESETS)
    assert {name.partition("/")[0] for name in RECIPES} == set(names.PRESETS)


def test_the_public_names_are_what_the_type_checker_is_told():
    tree = ast.parse(Path(vitlens.__file__).with_suffix(".pyi").read_text())
    told = {
        (alias.asname or "").replace("_fit", "train"): (node.module, alias.name)
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert told == vitlens._HOMES


@pytest.mark.parametrize("name", vitlens.__all__)
def test_every_public_name_is_there_and_documented(name):
    found = getattr(vitlens, name)
    assert name == "__version__" or found.__doc__


def test_no_public_name_is_that_of_a_module():
    """Importing the module would put it in the function's place."""
    folder = Path(vitlens.__file__).parent
    modules = {path.stem for path in folder.glob("*.py")} | {path.parent.name for path in folder.glob("*/__init__.py")}
    assert not modules & set(vitlens.__all__)


def test_an_unknown_public_name_says_the_known_ones():
    with pytest.raises(AttributeError, match=r"has no attribute 'roll'; it has .*rollout"):
        vitlens.roll  # noqa: B018


def substituted(substrate: Any) -> Tensor:
    model = ours()
    removed = torch.tensor([[True] + [False] * 11])
    first = torch.zeros(1, dtype=torch.int64)
    return Variants(model, images(model.input_size), substrate=substrate).logits(first, removed)


def voted(weighting: Any) -> Tensor:
    """One near neighbour against two far ones."""
    found = Neighbours(torch.tensor([[0, 1, 2]]), torch.tensor([[0.99, 0.1, 0.1]], dtype=torch.float64))
    return vote(found, torch.tensor([0, 1, 1]), k=3, classes=2, weighting=weighting)


def as_file(form: str) -> bytes:
    file = BytesIO()
    Figure((1, 1)).savefig(file, format=form)
    return file.getvalue()[:8]


WEIGHTS = torch.rand(1, 3, 4, 4, generator=torch.Generator().manual_seed(0)).softmax(-1)
POINTS = torch.rand(12, 6, generator=torch.Generator().manual_seed(0))
CHOICES: dict[str, tuple[tuple[str, ...], Callable[[Any], Any]]] = {
    "fusion": (names.FUSIONS, lambda word: fused(WEIGHTS, MethodSettings("rollout", word).fusion)),
    "substrate": (names.SUBSTRATES, substituted),
    "pooling": (names.FEATURE_POOLS, lambda word: vitlens.features(ours(), images((32, 48)), pool=word).at()),
    "weighting": (names.WEIGHTINGS, voted),
    "projection": (names.PROJECTIONS, lambda word: embed(POINTS, method=word, perplexity=2.0).points),
    "format": (names.FORMATS, as_file),
}


@pytest.mark.parametrize("choice", CHOICES)
def test_every_word_of_a_choice_does_something_of_its_own_and_no_other_word_does(choice, monkeypatch):
    known, done = CHOICES[choice]
    results = {word: done(word) for word in known}
    for one, other in combinations(known, 2):
        first, second = results[one], results[other]
        same = first == second if isinstance(first, bytes) else first.shape == second.shape and first.equal(second)
        assert not same, (one, other)
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # the tests' own check of types would be first
    with pytest.raises((UnknownNameError, ValueError), match="no-such-word"):
        done("no-such-word")


def test_every_precision_is_taken_and_no_other_word():
    cpu = torch.device("cpu")
    for word, lowered in {"auto": False, "fp32": False, "bf16": True}.items():
        with autocast(cpu, word):
            assert torch.is_autocast_enabled("cpu") == lowered
    assert set(names.PRECISIONS) == {"auto", "fp32", "bf16"}
    with pytest.raises(UnknownNameError, match="no-such-word"):
        autocast(cpu, "no-such-word")


def test_every_bundled_model_has_its_folder():
    folder = Path(vitlens.__file__).parent / "models" / "bundled"
    assert {path.name for path in folder.iterdir() if path.is_dir()} == set(names.BUNDLED)


def test_everything_that_can_be_removed_has_a_word():
    from vitlens.commands.ablate.record import REPLACED

    assert set(REPLACED) == set(names.REPLACEMENTS)
