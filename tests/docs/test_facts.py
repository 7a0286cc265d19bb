"""What pages state is what the code holds: thresholds, and works of the literature."""

import re
from pathlib import Path

from docs.make.literature import citations, works
from vitlens.analysis.attention.registry import ATTENTION_METHODS
from vitlens.analysis.heads.registry import STATISTICS
from vitlens.attacks.registry import ATTACKS
from vitlens.attribution.registry import ATTRIBUTIONS
from vitlens.commands.registry import COMMANDS
from vitlens.report import verdicts
from vitlens.report.numbers import number

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
WITHOUT_A_WORK = {"ICLR"}  # a venue with its year


def cells(page: str, heading: str) -> dict[str, list[str]]:
    """The rows of the first table under a heading, by their first cell without marks."""
    section = (DOCS / page).read_text().split(f"\n## {heading}")[1].split("\n## ")[0]
    rows = [line.strip("|").split(" | ") for line in section.splitlines() if line.startswith("|")]
    return {row[0].strip(" *"): [re.sub(r"[*]", "", cell).strip() for cell in row[1:]] for row in rows[2:]}


def test_the_thresholds_of_the_verdicts_are_those_of_the_code():
    rows = {name.split(" ")[0].strip(",:"): row for name, row in cells("verdicts.md", "Verdicts and their").items()}
    named = {"accuracy": "accuracy", "calibration": "calibration", "robustness": "robustness", "common": "corruptions",
             "attention": "heads", "sinks": "sinks"}  # fmt: skip
    for word, threshold in ((word, verdicts.LIMITS[name]) for word, name in named.items()):
        scale = 100 if threshold.unit == "fraction" else 1
        side = "from" if threshold.higher else "to"
        for cell, value in zip(rows[word], (threshold.passes, threshold.warns)):
            assert cell.startswith(f"{side} {number(scale * value)} "), word


def test_every_work_is_cited_once_by_one_key():
    keys = [work.key for work in works()]
    assert len(keys) == len(set(keys)) > 50
    text = (DOCS / "references.bib").read_text()
    assert text.count("@misc{") == len(keys)  # none was lost while reading
    assert all(re.fullmatch(r"(\d{4}\.\d{4,5})?", work.arxiv) for work in works())


def test_registries_and_pages_cite_known_works():
    known = {work.key for work in works()}
    texts = {
        **{f"attack {name}": attack.paper for name, attack in ATTACKS.items()},
        **{f"attribution {name}": method.paper for name, method in ATTRIBUTIONS.items()},
        **{f"method {name}": method.paper for name, method in ATTENTION_METHODS.items()},
        **{f"statistic {name}": statistic.source for name, statistic in STATISTICS.items()},
        **{f"command {word}": command.help for word, command in COMMANDS.items()},
        **{path.name: path.read_text() for path in PAGES if path.name != "references.md"},
    }
    cited = {where: set(citations(text)) for where, text in texts.items()}
    assert sum(map(len, cited.values())) > 100
    missing = {where: sorted(keys - known) for where, keys in cited.items()}
    assert {where: keys for where, keys in missing.items() if keys and keys[0][0] not in WITHOUT_A_WORK} == {}
    assert all(cited[f"attribution {name}"] for name in ATTRIBUTIONS if name != "attention")
