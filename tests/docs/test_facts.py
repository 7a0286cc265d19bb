"""Facts on the pages and in the README: links, commands, Python code and cited works."""

import ast
import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from docs.make.pages import reference_pages
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
# pages that are generated and not committed
REFERENCES = (
    *(f"commands/{name}.md" for name in ("index", "shared", *COMMANDS)),
    "glossary.md",
    "readable.md",
    "references.bib",
    "references.md",
)
COMMITTED = [
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "reports/README.md",
    *(f"docs/{path.name}" for path in sorted(DOCS.glob("*.md")) if path.name not in REFERENCES),
    *(f"docs/parts/{path.name}" for path in sorted(DOCS.glob("parts/*.md"))),
]
GENERATED = [f"docs/{name}" for name in REFERENCES if name.endswith(".md")]
SITE = [name for name in (*COMMITTED, *GENERATED) if re.match(r"docs/(commands/)?[^/]+$", name)]
TYPED = ["README.md", *SITE]
BLOCKS = r"^```{}\n(.*?)^```"


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    """Return the text of every page by its path: committed ones, and those that docs.make makes."""
    committed = {name: (ROOT / name).read_text() for name in COMMITTED}
    return committed | {f"docs/{name}": text for name, text in reference_pages().items()}


def blocks(text: str, kind: str) -> list[str]:
    return re.findall(BLOCKS.format(kind), text, flags=re.DOTALL | re.MULTILINE)


def prose(text: str) -> str:
    """Return a page without its blocks of code."""
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def anchors(text: str) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and MyST form them."""
    names = set()
    for title in re.findall(r"^#+ (.+?)\s*$", prose(text), flags=re.MULTILINE):
        words = re.sub(r"[^\w\- ]", "", title.lower())
        names.add(words.replace(" ", "-"))
    return names


def links(text: str) -> Iterator[tuple[str, str, str]]:
    """Yield "!" for an image or "", the text and the target of each link within the repository."""
    without_code = re.sub(r"`[^`\n]*`", "``", prose(text))
    pattern = r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)"
    for image, words, target in re.findall(pattern, without_code):
        if "://" not in target:
            yield image, words, target


def destination_of(target: str, page: str) -> str:
    """Return the path, from the root, of the file that a page links to."""
    place = target.partition("#")[0]
    return os.path.normpath(ROOT / page / ".." / place).removeprefix(f"{ROOT}/") if place else page


def test_the_generated_pages_are_those_that_git_ignores():
    assert set(reference_pages()) == set(REFERENCES)
    names = [f"docs/{name}" for name in REFERENCES]
    ignored = subprocess.run(
        ["git", "check-ignore", "--no-index", *names], cwd=ROOT, capture_output=True, text=True
    )
    assert ignored.stdout.split() == names
    tracked = subprocess.run(["git", "ls-files", *names], cwd=ROOT, capture_output=True, text=True)
    assert tracked.stdout == ""


@pytest.mark.parametrize("page", COMMITTED)
def test_every_link_of_a_committed_page_leads_to_a_committed_file(page, texts):
    for image, words, target in links(texts[page]):
        destination = destination_of(target, page)
        assert (ROOT / destination).exists(), target
        assert destination not in GENERATED, f"{target} is not on GitHub"
        assert not destination.startswith(("/", "..")), f"{target} leaves the repository"
        anchor = target.partition("#")[2]
        if anchor and destination.endswith(".md"):
            text = texts.get(destination) or (ROOT / destination).read_text()
            assert anchor in anchors(text), target
        assert not image or len(words) > 10, f"{target}: an image needs an alternative text"


@pytest.mark.parametrize("page", SITE)
def test_every_link_of_a_page_of_the_site_is_there(page, texts):
    folder = str(Path(page).parent.relative_to("docs")).removeprefix(".")
    for image, _, target in links(outward(texts[page], folder)):
        destination = destination_of(target, page)
        is_page = destination in texts
        assert is_page or (ROOT / destination).is_file(), target
        anchor = target.partition("#")[2]
        assert not anchor or anchor in anchors(texts[destination]), target
        assert is_page or image or destination.startswith("docs/"), target


@pytest.mark.parametrize("page", SITE)
def test_no_heading_of_a_page_skips_a_level(page, texts):
    level = 0
    for marks in re.findall(r"^(#+) ", prose(texts[page]), re.MULTILINE):
        assert 1 <= len(marks) <= level + 1
        level = len(marks)
    assert level


def test_every_page_is_in_the_table_of_contents(texts):
    listed = set(re.findall(r"^[\w/-]+$", texts["docs/index.md"], flags=re.MULTILINE))
    pages = {Path(name).stem for name in SITE if name.count("/") == 1}
    assert pages - {"index"} | {"commands/index"} <= listed
    commands = set(re.findall(r"^[\w/-]+$", texts["docs/commands/index.md"], flags=re.MULTILINE))
    assert commands == {"shared", *COMMANDS}


def test_a_link_that_leaves_the_site_becomes_an_address_of_the_repository():
    text = (
        "[a]({}/reports/x/report.md#b), ![a figure](../reports/x/figures/y.png), [c](stats.md), "
        "[d](https://e.f/g)"
    )
    assert outward(text.format(".."), "") == text.format(REPOSITORY)
    below = outward("[a](../stats.md) [b](../../README.md)", "commands")
    assert below == f"[a](../stats.md) [b]({REPOSITORY}/README.md)"


def test_a_link_to_the_source_of_a_generated_page_leads_to_that_page_on_the_site():
    on_a_page = "[a](../tests/kit/readable.py#masks) [b](parts/look.md) [c](parts)"
    assert outward(on_a_page, "") == "[a](readable.md#masks) [b](commands/look.md) [c](commands)"
    on_a_command = "[a](shared.md#options) [b](../../vitlens/report/glossary.toml)"
    assert outward(on_a_command, "commands") == "[a](shared.md#options) [b](../glossary.md)"


def typed(text: str) -> list[str]:
    """Return what a page says to type after the word vitlens."""
    code = "\n".join(blocks(text, "(?:sh|bash)")).replace("\\\n", " ")
    lines = re.split(r" && | \| |\n", code)
    for inline in re.findall(r"(?<!`)`(vitlens [^`\n]+)`(?!`)", text):
        lines.append(with_model(inline))
    arguments = []
    for line in lines:
        without_comment = line.split(" # ")[0].rstrip()
        match = re.search(r"(?:^|\s|/)vitlens (.+)$", without_comment)
        if match and '"${' not in match[1]:  # a variable of a script
            arguments.append(match[1])
    return arguments


def with_model(inline: str) -> str:
    """Return a command of a sentence without brackets, with a model if it names only an option."""
    words = inline.replace("\\|", "|").replace("[", "").replace("]", "").split()
    entry = COMMANDS.get(words[1])
    option = words[2:] and words[2].startswith("--")
    if entry is not None and entry.needs is not None and option and "--model-file" not in words:
        words.insert(2, "vit-digits")
    return " ".join(words)


@pytest.mark.parametrize("page", TYPED)
def test_the_command_line_takes_what_a_page_says_to_type(
    page, texts, tmp_path, monkeypatch, capsys
):
    # a trained model that docs/python.md names
    (tmp_path / "runs" / "train-my-digits").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    # parsed, checked and not run
    monkeypatch.setattr(Command, "measure", property(lambda _: lambda _options: ()))
    for arguments in typed(texts[page]):
        words = [word for word in shlex.split(arguments) if word not in ("...", "\\")]
        if words[0] not in COMMANDS and not words[0].startswith("--"):
            assert words[0] == "COMMAND", arguments  # the word for any of them
        elif "..." not in arguments and len(words) > 1:
            # neither a part of a command nor only its name
            assert run(words) == 0, f"vitlens {arguments}: {capsys.readouterr().err}"


def test_commands_are_found_and_python_on_a_page_compiles(texts):
    assert sum(len(typed(texts[page])) for page in TYPED) > 100
    for page in TYPED:
        for code in blocks(texts[page], "python"):
            # those of docs/python.md are run by tests/public/test_examples.py
            if ">>>" not in code:
                ast.parse(code)


def test_every_work_is_cited_once_by_one_key(texts):
    keys = [paper.key for paper in works()]
    assert len(keys) == len(set(keys)) > 50
    # none was lost while reading
    assert texts["docs/references.bib"].count("@misc{") == len(keys)
    for paper in works():
        assert re.fullmatch(r"(\d{4}\.\d{4,5})?", paper.arxiv)


def test_registries_and_pages_cite_known_works(texts):
    known_keys = {paper.key for paper in works()}
    count = 0
    for where, text in citing_texts(texts).items():
        keys = set(citations(text))
        count += len(keys)
        for key in keys - known_keys:
            assert key[0] == "ICLR", (where, key)  # a venue, not an author
    assert count > 100
    for name, method in ATTRIBUTIONS.items():
        if name != "attention":
            assert set(citations(method.paper)), name


def citing_texts(texts: dict[str, str]) -> dict[str, str]:
    """Return the texts that cite works, of registries and pages, by what they belong to."""
    citing = {}
    for name, attack in ATTACKS.items():
        citing[f"attack {name}"] = attack.paper
    for name, attribution in ATTRIBUTIONS.items():
        citing[f"attribution {name}"] = attribution.paper
    for name, method in ATTENTION_METHODS.items():
        citing[f"method {name}"] = method.paper
    for name, statistic in STATISTICS.items():
        citing[f"statistic {name}"] = statistic.source
    for word, command in COMMANDS.items():
        citing[f"command {word}"] = command.help
    for page in SITE:
        if page.count("/") == 1 and page != "docs/references.md":
            citing[page] = texts[page]
    return citing
