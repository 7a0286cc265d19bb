"""Facts on the pages and in the README: links, commands, Python code and cited works."""

import ast
import re
import shlex
from pathlib import Path

import pytest

from docs.make.references import citations, works
from docs.make.site import REPOSITORY, outward
from vitlens.analysis.attention.registry import ATTENTION_METHODS
from vitlens.analysis.heads.registry import STATISTICS
from vitlens.attacks.registry import ATTACKS
from vitlens.attribution.registry import ATTRIBUTIONS
from vitlens.cli.main import run
from vitlens.commands.registry import COMMANDS, Command

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "reports/README.md",
    *sorted(DOCS.glob("*.md")),
    *sorted(DOCS.glob("commands/*.md")),
    *sorted(DOCS.glob("parts/*.md")),
]
TYPED = [
    page for page in PAGES if page.parent in (DOCS, DOCS / "commands") or page == ROOT / "README.md"
]
BLOCKS = r"^```{}\n(.*?)^```"


def on(pages: list[Path]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        "path", pages, ids=[str(path.relative_to(ROOT)) for path in pages]
    )


def blocks(path: Path, kind: str) -> list[str]:
    return re.findall(BLOCKS.format(kind), path.read_text(), flags=re.DOTALL | re.MULTILINE)


def prose(path: Path) -> str:
    """Return a page without its blocks of code."""
    return re.sub(r"^```.*?^```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)


def anchors(path: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and MyST form them."""
    titles = re.findall(r"^#+ (.+?)\s*$", prose(path), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@on(PAGES)
def test_every_link_of_a_page_is_there_on_github_as_in_the_site(path):
    text = re.sub(r"`[^`\n]*`", "``", prose(path))
    for image, said, target in re.findall(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)", text):
        place, _, anchor = target.partition("#")
        if "://" in target:
            continue
        destination = (path.parent / place).resolve() if place else path
        assert destination.exists(), target
        assert ROOT in (destination, *destination.parents), f"{target} leaves the repository"
        if anchor and destination.suffix == ".md":
            assert anchor in anchors(destination), target
        assert not image or len(said) > 10, f"{target}: an image needs an alternative text"


def test_every_page_is_in_the_table_of_contents():
    listed = set(re.findall(r"^[\w/-]+$", (DOCS / "index.md").read_text(), flags=re.MULTILINE))
    assert {path.stem for path in DOCS.glob("*.md")} - {"index"} | {"commands/index"} <= listed


def test_a_link_that_leaves_the_site_becomes_an_address_of_the_repository():
    text = (
        "[a]({}/reports/x/report.md#b), ![a figure](../reports/x/figures/y.png), [c](stats.md), "
        "[d](https://e.f/g)"
    )
    assert outward(text.format(".."), "") == text.format(REPOSITORY)
    below = outward("[a](../stats.md) [b](../../README.md)", "commands")
    assert below == f"[a](../stats.md) [b]({REPOSITORY}/README.md)"


def typed(path: Path) -> list[str]:
    """Return what a page says to type after the word vitlens."""
    code = "\n".join(blocks(path, "(?:sh|bash)")).replace("\\\n", " ")
    lines = re.split(r" && | \| |\n", code)
    lines += [
        with_model(inline)
        for inline in re.findall(r"(?<!`)`(vitlens [^`\n]+)`(?!`)", path.read_text())
    ]
    matches = [
        re.search(r"(?:^|\s|/)vitlens (.+)$", line.split(" # ")[0].rstrip()) for line in lines
    ]
    # which is of a script
    return [match[1] for match in matches if match and '"${' not in match[1]]


def with_model(inline: str) -> str:
    """Return a command of a sentence without brackets, with a model if it names only an option."""
    words = inline.replace("\\|", "|").replace("[", "").replace("]", "").split()
    entry = COMMANDS.get(words[1])
    option = words[2:] and words[2].startswith("--")
    if entry is not None and entry.needs is not None and option and "--model-file" not in words:
        words.insert(2, "vit-digits")
    return " ".join(words)


@on(TYPED)
def test_the_command_line_takes_what_a_page_says_to_type(path, tmp_path, monkeypatch, capsys):
    # a trained model that docs/python.md names
    (tmp_path / "runs" / "train-my-digits").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    # parsed, checked and not run
    monkeypatch.setattr(Command, "measure", property(lambda _: lambda _options: ()))
    for arguments in typed(path):
        words = [word for word in shlex.split(arguments) if word not in ("...", "\\")]
        if words[0] not in COMMANDS and not words[0].startswith("--"):
            assert words[0] == "COMMAND", arguments  # the word for any of them
        elif "..." not in arguments and len(words) > 1:
            # neither a part of a command nor only its name
            assert run(words) == 0, f"vitlens {arguments}: {capsys.readouterr().err}"


def test_commands_are_found_and_python_on_a_page_compiles():
    assert sum(len(typed(path)) for path in TYPED) > 100
    for path in TYPED:
        for code in blocks(path, "python"):
            # those of docs/python.md are run by tests/public/test_examples.py
            if ">>>" not in code:
                ast.parse(code)


def test_every_work_is_cited_once_by_one_key():
    keys = [paper.key for paper in works()]
    assert len(keys) == len(set(keys)) > 50
    # none was lost while reading
    assert (DOCS / "references.bib").read_text().count("@misc{") == len(keys)
    for paper in works():
        assert re.fullmatch(r"(\d{4}\.\d{4,5})?", paper.arxiv)


def test_registries_and_pages_cite_known_works():
    paper_keys = {paper.key for paper in works()}
    texts = {
        **{f"attack {name}": attack.paper for name, attack in ATTACKS.items()},
        **{f"attribution {name}": method.paper for name, method in ATTRIBUTIONS.items()},
        **{f"method {name}": method.paper for name, method in ATTENTION_METHODS.items()},
        **{f"statistic {name}": statistic.source for name, statistic in STATISTICS.items()},
        **{f"command {word}": command.help for word, command in COMMANDS.items()},
        **{
            path.name: path.read_text()
            for path in DOCS.glob("*.md")
            if path.name != "references.md"
        },
    }
    cited = {where: set(citations(text)) for where, text in texts.items()}
    assert sum(map(len, cited.values())) > 100
    # a venue
    missing = {
        where: [key for key in keys - paper_keys if key[0] != "ICLR"]
        for where, keys in cited.items()
    }
    assert not any(missing.values()), missing
    for name in ATTRIBUTIONS:
        if name != "attention":
            assert cited[f"attribution {name}"]
