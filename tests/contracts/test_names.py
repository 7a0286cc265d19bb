"""The words that the command line offers are those that are there: names, registries, choices, the public API."""

import ast
from pathlib import Path
from typing import get_args

import pytest

import vitlens
from vitlens import names
from vitlens.cli.main import EXAMPLES
from vitlens.commands.registry import COMMANDS
from vitlens.models.vit_config import VIT_PRESETS
from vitlens.training.recipe import RECIPES


def test_every_preset_can_be_built():
    from vitlens.models.zoo import untrained

    for name in names.PRESETS:
        if not name.endswith("-224"):
            assert untrained(name, classes=("a", "b")).parameter_count() > 0
    assert {name for name in names.PRESETS if name.startswith("vit")} == set(VIT_PRESETS)


def test_every_preset_has_a_recipe():
    assert {name for name in RECIPES if "/" not in name} == set(names.PRESETS)
    assert {name.partition("/")[0] for name in RECIPES} == set(names.PRESETS)


def test_every_command_has_its_files():
    folder = Path(vitlens.__file__).parent
    assert {command.__name__ for command in EXAMPLES} | set(COMMANDS) == set(names.COMMANDS)
    for word in set(names.COMMANDS) - set(COMMANDS):
        assert (folder / "cli" / f"{word}.py").is_file()
        assert (folder / "runs" / f"{word}.py").is_file()
    for word in COMMANDS:
        parts = {path.stem for path in (folder / "commands" / word).iterdir()}
        assert {"options", "measure"} <= parts


def test_the_public_names_are_what_the_type_checker_is_told():
    tree = ast.parse(Path(vitlens.__file__).read_text())
    told = {
        alias.asname: (node.module, alias.name)
        for block in tree.body
        if isinstance(block, ast.If)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert told == vitlens._HOMES
    assert set(vitlens.__all__) == {*told, "__version__"}


@pytest.mark.parametrize("name", vitlens.__all__)
def test_every_public_name_is_there_and_documented(name):
    found = getattr(vitlens, name)
    assert name == "__version__" or found.__doc__


def test_an_unknown_public_name_says_the_known_ones():
    with pytest.raises(AttributeError, match=r"has no attribute 'roll'; it has .*rollout"):
        vitlens.roll  # noqa: B018


@pytest.mark.parametrize(
    ("literal", "known"),
    [
        (names.PresetName, names.PRESETS),
        (names.BundledName, names.BUNDLED),
        (names.Fusion, names.FUSIONS),
        (names.AttentionMethod, names.ATTENTION_METHODS),
        (names.AttributionName, names.ATTRIBUTIONS),
        (names.Substrate, names.SUBSTRATES),
        (names.AttackName, names.ATTACK_NAMES),
        (names.FeaturePool, names.FEATURE_POOLS),
        (names.Weighting, names.WEIGHTINGS),
        (names.Projection, names.PROJECTIONS),
        (names.CommandName, names.COMMANDS),
        (names.FigureFormat, names.FORMATS),
        (names.TrackerName, names.TRACKERS),
        (names.StudyKind, names.STUDY_KINDS),
        (names.TemplateSet, names.TEMPLATE_SETS),
        (names.DistillKind, names.DISTILL_KINDS),
        (names.Precision, names.PRECISIONS),
    ],
)
def test_no_name_stands_twice(literal, known):
    assert get_args(literal) == known
    assert len(set(known)) == len(known)


def test_every_speciality_has_its_colour_and_code():
    from vitlens.analysis.heads.specialisation import LABELS
    from vitlens.figures.specialisation import KINDS

    assert set(KINDS) == set(LABELS)


def test_every_method_of_attention_has_its_entry():
    from vitlens.analysis.attention.methods import METHODS

    assert tuple(METHODS) == names.ATTENTION_METHODS


def test_every_attribution_has_its_entry():
    from vitlens.attribution.registry import METHODS

    assert tuple(METHODS) == names.ATTRIBUTIONS


def test_every_attack_has_its_entry():
    from vitlens.attacks.registry import ATTACKS

    assert tuple(ATTACKS) == names.ATTACK_NAMES


def test_everything_that_can_be_removed_has_a_word():
    from vitlens.runs.ablate_draw import REPLACED

    assert set(REPLACED) == set(names.REPLACEMENTS)
