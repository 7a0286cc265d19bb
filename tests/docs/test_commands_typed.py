"""Commands on the pages and in the README are ones that the command line takes, and their Python compiles."""

import ast
import re
import shlex
from pathlib import Path

import pytest

from vitlens.cli.main import run
from vitlens.commands.registry import COMMANDS, Command

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "commands").glob("*.md")])
BLOCK = re.compile(r"^```(?:sh|bash)\n(.*?)^```", flags=re.DOTALL | re.MULTILINE)
INLINE = re.compile(r"(?<!`)`(vitlens [^`\n]+)`(?!`)")
CALL = re.compile(r"(?:^|\s|/)vitlens (?P<arguments>.+)$")


def typed(path: Path) -> list[str]:
    """What a page says to type after the word vitlens."""
    text = path.read_text()
    blocks = "\n".join(BLOCK.findall(text)).replace("\\\n", " ")
    lines = [part for line in blocks.splitlines() for part in re.split(r" && | \| ", line)]
    lines += [_with_model(match) for match in INLINE.findall(text)]
    found = [match["arguments"] for line in lines if (match := CALL.search(line.split(" # ")[0].rstrip()))]
    return [arguments for arguments in found if '"${' not in arguments]  # of a script


def _with_model(inline: str) -> str:
    """A command within a sentence, without brackets, and with a model where it names only an option."""
    words = inline.replace("\\|", "|").replace("[", "").replace("]", "").split()
    entry = COMMANDS.get(words[1])
    if (
        entry is not None
        and entry.needs is not None
        and words[2:]
        and words[2].startswith("--")
        and "--model-file" not in words
    ):
        words.insert(2, "vit-digits")
    return " ".join(words)


@pytest.mark.parametrize("path", PAGES, ids=[str(path.relative_to(ROOT)) for path in PAGES])
def test_the_command_line_takes_what_a_page_says_to_type(path, tmp_path, monkeypatch, capsys):
    (tmp_path / "runs" / "train-build-digits").mkdir(parents=True)  # a trained model that docs/python.md names
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Command, "measure", property(lambda _: lambda _options: ()))  # parsed, checked and not run
    for arguments in typed(path):
        words = [word for word in shlex.split(arguments) if word not in ("...", "\\")]
        if words[0] not in COMMANDS and not words[0].startswith("--"):
            assert words[0] == "COMMAND", arguments  # the word for any of them
            continue
        if "..." in arguments or len(words) == 1:  # a part of a command, or a command's name
            continue
        assert run(words) == 0, f"vitlens {arguments}: {capsys.readouterr().err}"


def test_commands_are_found_at_all():
    assert sum(len(typed(path)) for path in PAGES) > 100


@pytest.mark.parametrize("path", PAGES, ids=[str(path.relative_to(ROOT)) for path in PAGES])
def test_python_on_a_page_compiles(path):
    for code in re.findall(r"^```python\n(.*?)^```", path.read_text(), flags=re.DOTALL | re.MULTILINE):
        if ">>>" not in code:  # those of docs/python.md are run by tests/public/test_examples.py
            ast.parse(code)
