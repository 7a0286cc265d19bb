"""Next steps: each has a command line that is parsed as printed, for many models and images."""

import shlex

import pytest
import typer

from tests.kit.claims import NEXT_STEPS, Verdict, command_of, needs_a_next_step, next_step
from tests.kit.first_page import check_first_page
from vitlens.cli.main import application
from vitlens.commands.registry import COMMANDS
from vitlens.record import Config, ModelEntry
from vitlens.report.claims import Claim
from vitlens.report.markdown import markdown

PAIR = (ModelEntry("a", "vit-digits"), ModelEntry("b", "cnn-digits"))
TYPED = ("a=vit-digits", "b=cnn-digits")


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
