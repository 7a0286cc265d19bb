"""A run of the command line shows what it does from its first seconds to its end."""

import io
import sys

import pytest
from rich.console import Console

from tests.kit.commands import impatient, shown_now
from vitlens.cli.main import run
from vitlens.commands.registry import COMMANDS, Command

ARGUMENTS = {
    "head": ["vit-digits", "L0.H0"],
    "report": ["folder"],
    "demo": [],
    "models": [],
    "data": [],
    "look": ["cat.jpg"],
    "reversal": [],
}


def words_of(command: Command) -> list[str]:
    """Return a line of the command, without the run."""
    return [command.word, *ARGUMENTS.get(command.word, ["vit-digits"])]


@pytest.mark.parametrize("word", [word for word, command in COMMANDS.items() if not command.serves])
def test_each_command_is_announced_until_it_ends(word, monkeypatch, capsys):
    outputs = []

    def measure(_):
        outputs.append(shown_now(capsys))

    monkeypatch.setattr(Command, "measure", property(lambda _: measure))
    with impatient():
        assert run(words_of(COMMANDS[word])) == 0
    assert f"vitlens {word}: " in outputs[0]


@pytest.mark.parametrize("word", ["predict", "evaluate"])
def test_results_go_to_stdout_while_a_terminal_shows_a_bar(word, monkeypatch, capsys):
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=80)

    def measure(_):
        shown_now(capsys)
        sys.stdout.write("a result\n")
        return ()

    monkeypatch.setattr(Command, "measure", property(lambda _: measure))
    monkeypatch.setattr("vitlens.commands.run.progress.Console", lambda **_: console)
    monkeypatch.setattr("vitlens.commands.run.progress.PATIENCE", 0.0)
    assert run([word, "vit-digits"]) == 0
    assert capsys.readouterr().out == "a result\n"
    assert f"vitlens {word}" in stream.getvalue()
