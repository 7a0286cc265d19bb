"""The words of the command line exist: names, registries, choices, and the public API."""

import ast
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import vitlens
from tests.kit.commands import few_passes
from tests.kit.making import untrained
from tests.kit.odd import odd_images, shared_odd
from tests.kit.select import values_of
from vitlens import names
from vitlens.cli.main import run
from vitlens.commands.ablate.record import REPLACED
from vitlens.commands.run.publish import read_folder
from vitlens.errors import UnknownNameError

HOME = Path(vitlens.__file__).parent


def test_every_preset_can_be_built_and_every_bundled_model_has_its_folder():
    for name in names.PRESETS:
        if not name.endswith("-224"):
            assert untrained(name, classes=("a", "b")).parameter_count() > 0
    assert {path.name for path in (HOME / "models" / "bundled").iterdir() if path.is_dir()} == set(
        names.BUNDLED
    )


def test_public_names_are_there_documented_and_what_the_type_checker_is_told():
    stubs = {}
    for node in ast.parse((HOME / "__init__.pyi").read_text()).body:
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                name = (alias.asname or "").replace("_fit", "train")
                stubs[name] = (node.module, alias.name)
    assert stubs == vitlens._HOMES
    for name in vitlens.__all__:
        assert name == "__version__" or getattr(vitlens, name).__doc__
    modules = {path.stem for path in HOME.glob("*.py")} | {
        path.parent.name for path in HOME.glob("*/__init__.py")
    }
    # importing the module would put it in the function's place
    assert not modules & set(vitlens.__all__)
    for misspelled, meant in (("roll", "rollout"), ("statistcs", "statistics")):
        with pytest.raises(AttributeError, match=f"did you mean .*'{meant}'"):
            getattr(vitlens, misspelled)


CHOICES: dict[str, tuple[tuple[str, ...], Callable[[Any], Any]]] = {
    "fusion": (
        names.FUSIONS,
        lambda word: vitlens.rollout(shared_odd(), odd_images(), fusion=word),
    ),
    "pooling": (
        names.FEATURE_POOLS,
        lambda word: vitlens.features(shared_odd(), odd_images(), pool=word).at(),
    ),
    "replacement": (
        names.REPLACEMENTS,
        lambda word: (
            vitlens.ablate(shared_odd(), odd_images(8), "predicted", replace=word).delta_loss
        ),
    ),
}


@pytest.mark.parametrize("choice", CHOICES)
def test_every_word_of_a_choice_does_something_of_its_own_and_no_other_word_does(choice):
    words, done = CHOICES[choice]
    results = {word: done(word) for word in words}
    for one, other in combinations(words, 2):
        first = results[one]
        second = results[other]
        assert first.shape != second.shape or not torch.allclose(first, second), (one, other)
    with pytest.raises(UnknownNameError):
        done("no-such-word")


def test_every_projection_weighting_and_substrate_is_one_of_its_own(golden, tiny_vit, tmp_path):
    record = golden("features").record
    # the votes: golden/test_features
    assert set(values_of(record.depth, "weighting")) - {None} == set(names.WEIGHTINGS)
    clouds = [record.spaces["a"].points[f"{word}_images"] for word in names.PROJECTIONS]
    for pair in combinations(clouds, 2):
        assert not np.allclose(*pair)
    line = (
        f"explain {tiny_vit} --data digits --limit 2 --method saliency --verify --no-stability "
        "--no-counterfactuals"
    )
    words = (
        f"{line} --composites none --other-substrates {','.join(names.SUBSTRATES)} --device "
        "cpu --quiet --out"
    )
    assert run([*words.split(), str(tmp_path / "out")]) == 0
    rows = read_folder(tmp_path / "out").substrates
    measured = {row.substrate: row.gap.value for row in rows if row.method == "saliency"}
    assert measured.keys() - {"imputed"} == set(names.SUBSTRATES)
    assert len(set(measured.values())) == len(measured)
    assert set(REPLACED) == set(names.REPLACEMENTS)


def test_every_format_of_figures_is_written_as_such(tiny_vit, tmp_path):
    beginnings = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}
    assert set(names.FORMATS) == beginnings.keys()
    line = (
        f"profile {tiny_vit} --batch-sizes 1 --device cpu --quiet --format png,svg,pdf --out "
        f"{tmp_path / 'out'}"
    )
    with few_passes():
        assert run(line.split()) == 0
    for form, beginning in beginnings.items():
        files = list((tmp_path / "out" / "figures").glob(f"*.{form}"))
        assert files
        for file in files:
            assert file.read_bytes().startswith(beginning)


def test_every_precision_is_taken_and_no_other_word():
    model = vitlens.load("vit-digits")
    batch = vitlens.load_data("digits", limit=2)
    fp32 = vitlens.evaluate(model, batch, precision="fp32").logits
    auto = vitlens.evaluate(model, batch, precision="auto").logits
    bf16 = vitlens.evaluate(model, batch, precision="bf16").logits
    assert torch.equal(fp32, auto)
    assert not torch.equal(fp32, bf16)
    torch.testing.assert_close(bf16, fp32, atol=0.2, rtol=0.1)
    assert set(names.PRECISIONS) == {"auto", "fp32", "bf16"}
    with pytest.raises(UnknownNameError):
        vitlens.evaluate(model, batch, precision="fp16")
