"""Every command and option that a report advises can be typed as it is printed."""

import re
import shlex

import pytest

from tests.kit.golden import LINES
from vitlens.cli.main import run
from vitlens.commands.registry import COMMANDS, Command

CODE = re.compile(r"`([^`\n]+)`")
OWN = ("--out", "--device")  # options of the run itself that its advice does not repeat


def words_typed(line: str) -> list[str]:
    """Return the words of the line that began a run, without the folder that the run wrote."""
    words = shlex.split(line)[1:]
    advised = []
    skip = False
    for word in words:
        if not skip and word not in OWN:
            advised.append(word)
        skip = word in OWN
    return advised


@pytest.mark.parametrize("name", LINES)
def test_each_command_that_a_report_advises_is_understood_as_printed(
    name, golden, monkeypatch, capsys
):
    report = (
        (golden(name).folder / "report.md")
        .read_text(encoding="utf-8")
        .partition("How to read it")[0]
    )
    begun = golden(name).record.config.command_line
    monkeypatch.setattr(Command, "measure", property(lambda _: lambda _: ()))
    # the run's own line wrote its folder
    for code in dict.fromkeys(CODE.findall(report.replace(begun, ""))):
        words = shlex.split(code) if code.startswith(("vitlens ", "--")) else []
        if len(words) > 2 and words[0] == "vitlens" and words[1] in COMMANDS:
            assert run(words[1:]) == 0, (code, capsys.readouterr().err)
        elif words and words[0] != "vitlens" and run([*words_typed(begun), *words]) != 0:
            error = capsys.readouterr().err
            # the reader chooses the value
            only_named = len(words) == 1 and "requires an argument" in error
            assert only_named, (code, error)
