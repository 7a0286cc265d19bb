"""Next steps: each has a command line that is parsed as printed, for many models and images."""

import json
import shlex
from dataclasses import asdict, fields, replace
from pathlib import Path

import pytest
import typer

from tests.kit.claims import NEXT_STEPS, Verdict, command_of, needs_a_next_step, next_step
from tests.kit.commands import typed_line
from tests.kit.first_page import check_first_page
from vitlens.cli.main import application
from vitlens.commands.registry import COMMANDS
from vitlens.commands.run.options import ModelOptions, RunOptions
from vitlens.record import Config, ModelEntry
from vitlens.report.claims import Claim
from vitlens.report.markdown import markdown

PAIR = (ModelEntry("a", "vit-digits"), ModelEntry("b", "cnn-digits"))
TYPED = ("a=vit-digits", "b=cnn-digits")
LOADED = {
    "weights": Path("my weights.pt"),
    "random_weights": True,
    "arch": "timm:vit_tiny_patch16_224",
    "image_size": (64, 96),
    "mean": (0.4, 0.5, 0.25),
    "std": (0.2, 0.3, 1.0),
    "classes": Path("names.txt"),
    "text": ("a dog", "a van"),
    "model_file": ("my.py:build",),
}


def config(**options: object) -> Config:
    return Config(models=PAIR, options={"models": TYPED, **options})


@pytest.fixture(scope="module")
def parser() -> typer.core.TyperGroup:
    return typer.main.get_command(application())


def parse(parser: typer.core.TyperGroup, line: str) -> None:
    """Parse a command line as the shell gives it; an unknown option or a wrong value raises."""
    words = shlex.split(line)
    assert words[0] == "vitlens"
    command = parser.commands[words[1]]
    command.make_context(words[1], words[2:])


@pytest.mark.parametrize("question", NEXT_STEPS)
def test_every_command_is_parsed_as_it_is_printed(question, parser):
    for options in ({"data": "digits"}, {"data": "my photos/of cats"}, {}):
        line = command_of(NEXT_STEPS[question], "a and b", config(**options))
        parse(parser, line)
    only_images = command_of(NEXT_STEPS[question], "a", config(images=("one cat.jpg", "dogs")))
    if only_images:
        parse(parser, only_images)
    assert NEXT_STEPS[question].command.split()[1] in COMMANDS


def test_a_claim_that_fails_or_surprises_leads_to_a_command_on_its_own_models_and_images():
    weak = Claim("robustness", "b", verdict=Verdict("warn", "too weak", "robustness"))
    assert needs_a_next_step(weak)
    assert "vitlens attack a=vit-digits b=cnn-digits --data shapes --attack auto" in next_step(
        weak, config(data="shapes")
    )
    fault = Claim("dead heads", "b", "They are dead.", kind="hidden fault")
    assert "vitlens ablate b=cnn-digits --data shapes" in next_step(fault, config(data="shapes"))
    assert not needs_a_next_step(Claim("robustness", "b", verdict=Verdict("pass", "measured")))
    assert next_step(Claim("head L3.H1", "a"), config(data="digits")).endswith(
        "vitlens stats a=vit-digits --data digits --names`"
    )
    # it needs labels
    assert next_step(Claim("calibration", "a"), config(images=("cat.jpg",))) == ""


@pytest.mark.parametrize(
    ("families", "has_step"), [(("vit", "cnn"), True), (("vit", "vit"), False), (("vit",), False)]
)
def test_an_order_of_a_vit_and_a_cnn_is_tested_only_after_a_run_of_both(families, has_step):
    models = tuple(
        replace(entry, family=family) for entry, family in zip(PAIR, families, strict=False)
    )
    typed = TYPED[: len(models)]
    run = Config(models=models, options={"models": typed, "data": "digits"})
    claim = Claim("accuracy", "a", verdict=Verdict("fail", "measured"))
    assert bool(next_step(claim, run)) == has_step


@pytest.mark.parametrize("field", [field.name for field in fields(ModelOptions)])
def test_the_command_loads_the_model_as_the_run_did(field, parser):
    loaded = ModelOptions(**{field: LOADED[field]})
    saved = json.loads(json.dumps(asdict(loaded), default=str))  # as in config.json
    options = {"model": "my.py:build", "data": "digits", "model_options": saved}
    run = Config(models=(ModelEntry("a", "my.py:build"),), options=options)
    lines = []
    for step in NEXT_STEPS.values():
        if "{model" in step.command:
            lines.append(command_of(step, "a", run))
    lines = list(filter(None, lines))
    assert len(lines) > len(NEXT_STEPS) // 3
    for line in lines:
        assert typed_line("", loaded).removeprefix("vitlens  ") in line
        parse(parser, line)


def test_the_command_names_the_code_of_its_own_models_only():
    options = {"models": ("a.py:build", "old=b.py:build", "runs/x")}
    entries = [ModelEntry("a"), ModelEntry("old"), ModelEntry("x")]
    files = ("a.py:build", "b.py:build", "c.py:build")
    run = Config(models=tuple(entries), options={**options, "model_options": {"model_file": files}})
    step = NEXT_STEPS["attention health"]
    lines = {alias: command_of(step, alias, run) for alias in ("a", "old", "x")}
    assert lines["a"] == "vitlens ablate a.py:build --model-file a.py:build"
    assert lines["old"] == "vitlens ablate old=b.py:build --model-file b.py:build"
    # a folder may have been trained from code that no model names
    assert lines["x"] == "vitlens ablate runs/x --model-file c.py:build"


def test_the_command_reads_the_images_as_the_run_did():
    read = RunOptions(labels=Path("my labels.csv"), data_dir=Path("sets"), seed=3)
    line = command_of(NEXT_STEPS["calibration"], "a", config(data="photos", run=asdict(read)))
    assert line.endswith("--data photos --labels 'my labels.csv' --data-dir sets")
    unlabelled = config(data="photos", predicted=True)
    assert command_of(NEXT_STEPS["calibration"], "a", unlabelled) == ""
    assert command_of(NEXT_STEPS["dead heads"], "a", unlabelled).endswith("photos --predicted")


def test_random_weights_and_those_of_code_keep_their_seed():
    seeded = config(model_options={"random_weights": True}, run={"seed": 3})
    line = command_of(NEXT_STEPS["dead heads"], "a", seeded)
    assert line == "vitlens ablate a=vit-digits --random-weights --seed 3"
    first = command_of(NEXT_STEPS["dead heads"], "a", config(run={"seed": 0}))
    assert first == "vitlens ablate a=vit-digits"


@pytest.mark.parametrize("name", ["attack", "stats", "evaluate", "compare"])
def test_failing_claims_of_reports_have_their_next_step(name, golden):
    run = golden(name)
    failing = [claim for claim in run.document.claims if needs_a_next_step(claim)]
    for claim in failing:
        assert claim.next_step
    check_first_page(run.document)
    said = markdown(run.document, run.record)
    assert bool(run.document.first.next or any(part.next for part in run.document.sections)) == (
        "What to test next" in said
    )
