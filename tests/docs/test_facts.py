"""What pages state is what the code holds: works of the literature."""

import re
from pathlib import Path

from docs.make.literature import citations, works
from vitlens.analysis.attention.registry import ATTENTION_METHODS
from vitlens.analysis.heads.registry import STATISTICS
from vitlens.attacks.registry import ATTACKS
from vitlens.attribution.registry import ATTRIBUTIONS
from vitlens.commands.registry import COMMANDS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
WITHOUT_A_WORK = {"ICLR"}  # a venue with its year


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
