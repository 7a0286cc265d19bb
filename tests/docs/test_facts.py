"""What pages state is what reports and the code hold: numbers of metrics, thresholds, and works of the literature."""

import json
import re
from pathlib import Path

import pytest

from docs.make.literature import citations, works
from vitlens.analysis.attention.registry import ATTENTION_METHODS
from vitlens.analysis.heads.registry import STATISTICS
from vitlens.attacks.registry import ATTACKS
from vitlens.attribution.registry import ATTRIBUTIONS
from vitlens.commands.registry import COMMANDS
from vitlens.report import verdicts
from vitlens.report.numbers import number
from vitlens.uncertainty import Estimate

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
WITHOUT_A_WORK = {"ICLR"}  # a venue with its year


def metrics(folder: str):
    """The metrics as they lie in the file, whatever version wrote it."""
    content = json.loads((ROOT / "reports" / folder / "results.json").read_text())
    return {name: Estimate(**{"unit": "", **metric}) for name, metric in content["metrics"].items()}


def cells(page: str, heading: str) -> dict[str, list[str]]:
    """The rows of the first table under a heading, by their first cell without marks."""
    section = (DOCS / page).read_text().split(f"\n## {heading}")[1].split("\n## ")[0]
    rows = [line.strip("|").split(" | ") for line in section.splitlines() if line.startswith("|")]
    return {row[0].strip(" *"): [re.sub(r"[*]", "", cell).strip() for cell in row[1:]] for row in rows[2:]}


def three(text: str) -> tuple[float, ...]:
    """The numbers of "0.163 (0.125 to 0.203)"."""
    return tuple(map(float, re.findall(r"-?\d+\.?\d*", text)[:3]))


def test_the_table_of_deit_tiny_is_its_report():
    known = metrics("explain-deit-tiny")
    rows = cells("which-map.md", "DeiT-tiny")
    methods = {name.split("/")[-1] for name in known if name.startswith("faithfulness/deit-tiny/gap/")}
    assert set(rows) == methods
    for method, (gap, area, pointing, *_) in rows.items():
        for text, name in (
            (gap, f"faithfulness/deit-tiny/gap/{method}"),
            (area, f"localisation/deit-tiny/roc_auc/{method}"),
        ):
            estimate = known[name]
            assert three(text) == pytest.approx((estimate.value, estimate.low, estimate.high), abs=0.00051), method
        assert three(pointing)[0] == pytest.approx(
            100 * known[f"localisation/deit-tiny/pointing/{method}"].value, abs=0.5
        )


@pytest.mark.parametrize(
    ("folder", "model", "column"), [("maps-vit-digits", "vit-digits", 0), ("explain-deit-tiny", "deit-tiny", 2)]
)
def test_the_table_of_the_readme_is_its_reports(folder, model, column):
    known, flagged = metrics(folder), {row["method"] for row in _league(folder) if row["flagged"]}
    rows = cells("../README.md", "Which attribution map")
    assert len(rows) == 6
    for name, texts in rows.items():
        method = name.split("*")[0].split(" ")[0]
        for text, metric in zip(texts[column : column + 2], ("faithfulness/{}/gap/{}", "localisation/{}/roc_auc/{}")):
            estimate = known[metric.format(model, method)]
            assert three(text) == pytest.approx((estimate.value, estimate.low, estimate.high), abs=0.00051), method
        assert ("†" in texts[column]) == (method in flagged)


@pytest.mark.parametrize(("model", "column"), [("vit-digits", 0), ("cnn-digits", 2)])
def test_the_table_of_the_toy_pair_is_their_reports(model, column):
    known = metrics(f"explain-{model}")
    rows = cells("which-map.md", "The toy pair")
    assert len(rows) == 9
    for method, texts in rows.items():
        gap, area = texts[column : column + 2]
        if gap == "–":
            assert f"faithfulness/{model}/gap/{method}" not in known
            continue
        assert three(gap)[0] == pytest.approx(known[f"faithfulness/{model}/gap/{method}"].value, abs=0.00051), method
        assert three(area)[0] == pytest.approx(known[f"localisation/{model}/roc_auc/{method}"].value, abs=0.00051), (
            method
        )


@pytest.mark.parametrize("column", [1, 3])
def test_the_verdict_of_a_method_that_fails_is_said(column):
    flagged = {row["method"] for row in _league("explain-deit-tiny") if row["flagged"]}
    assert flagged == {name for name, row in cells("which-map.md", "DeiT-tiny").items() if "fails" in row[3]}
    flagged = {row["method"] for row in _league("explain-vit-digits") if row["flagged"]}
    told = cells("which-map.md", "The toy pair")
    assert {name for name, row in told.items() if "fails" in row[0]} == flagged & set(told)


def _league(folder: str):
    import json

    return json.loads((ROOT / "reports" / folder / "results.json").read_text())["tables"]["league"]


TOLD = [  # the page, what it says, the report, its metric, and the factor between them
    ("tour", "0.304 nats (0.229 to 0.383)", "ablate-deit-tiny", "importance/deit-tiny/delta_loss/1/1", 1),
    ("tour", "4.0 points (0.3 to 7.7)", "ablate-deit-tiny", "importance/deit-tiny/delta_accuracy/1/1", 1),
    ("tour", "3.28 nats", "ablate-deit-tiny", "importance/deit-tiny/delta_loss/0/mlp", 1),
    ("tour", "51.2 % (48.1 to 54.3)", "attack-cifar10-jpeg", "robust_accuracy/vit-tiny/auto-linf/1", 100),
    ("tour", "41.4 % (38.4 to 44.5)", "attack-cifar10-jpeg", "robust_accuracy/resnet20/auto-linf/1", 100),
    ("course", "0.304 nats (0.229 to 0.383)", "ablate-deit-tiny", "importance/deit-tiny/delta_loss/1/1", 1),
    ("course", "51.2 % (48.1 to 54.3)", "attack-cifar10-jpeg", "robust_accuracy/vit-tiny/auto-linf/1", 100),
    ("course", "58.4 % (54.6 to 62.2)", "architecture-digits", "accuracy/residual", 100),
    ("course", "68.2 % (64.2 to 72.2)", "architecture-digits", "accuracy/norm", 100),
    ("course", "80.7 % (77.3 to 84.0)", "architecture-digits", "accuracy/depth-2", 100),
    ("course", "0.2 points (-0.9 to 1.3)", "study-digits", "accuracy_difference/vit-digits/cnn-digits", 1),
    ("course", "79.8 % (78.7 to 80.9", "train-vit-tiny-cifar10-jpeg", "accuracy/vit-tiny", 100),
    ("course", "96.0 % (93.8 to 97.5", "audit-vit-digits", "accuracy/vit-digits", 100),
    ("course", "60.9 % (56.3 to 65.3", "audit-vit-digits", "robust_accuracy/vit-digits/fgsm-linf/8", 100),
    ("course", "31.0 % (22.8 to 40.6", "audit-vit-digits", "robust_accuracy/vit-digits/apgd-ce-linf/8", 100),
    ("course", "14.2 px (14.1 to 14.2", "audit-vit-digits", "distance/vit-digits", 1),
    ("course", "0.445 (0.417 to 0.472)", "explain-vit-digits", "faithfulness/vit-digits/gap/relevance", 1),
    ("course", "0.397 (0.370 to 0.423)", "explain-vit-digits", "faithfulness/vit-digits/gap/rollout", 1),
    ("course", "0.066 (0.033 to 0.098)", "explain-vit-digits", "faithfulness/vit-digits/gap/gradcam", 1),
    ("course", "0.392 (0.367 to 0.417)", "explain-vit-digits", "faithfulness/vit-digits/gap/centre", 1),
    ("course", "0.968 (0.961 to 0.974)", "explain-vit-digits", "localisation/vit-digits/roc_auc/eigencam", 1),
    ("course", "0.927 (0.924 to 0.930)", "explain-vit-digits", "localisation/vit-digits/roc_auc/relevance", 1),
    ("course", "0.931 (0.929 to 0.934)", "explain-vit-digits", "localisation/vit-digits/roc_auc/rollout", 1),
    ("course", "0.500 (0.476 to 0.522)", "explain-cnn-digits", "faithfulness/cnn-digits/gap/gradcam", 1),
    ("course", "77.6 % (73.3 to 81.9)", "transfer-deit-tiny", "accuracy/full", 100),
    ("course", "63.1 % (58.9 to 67.3)", "transfer-deit-tiny", "accuracy/frozen", 100),
    ("course", "40.8 % (35.2 to 46.4)", "transfer-deit-tiny", "accuracy/scratch", 100),
    ("course", "99.1 % (98.4 to 99.8)", "swin-digits", "accuracy/cnn", 100),
    ("course", "85.3 % (82.2 to 88.5)", "swin-digits", "accuracy/vit", 100),
    ("course", "71.5 % (67.7 to 75.3)", "swin-digits", "accuracy/swin", 100),
    ("course", "67.1 % (65.3 to 68.9)", "swin-cifar10-jpeg", "accuracy/cnn", 100),
    ("course", "47.5 % (45.5 to 49.6)", "swin-cifar10-jpeg", "accuracy/vit", 100),
    ("course", "44.6 % (42.6 to 46.6)", "swin-cifar10-jpeg", "accuracy/swin", 100),
    ("course", "365,699,328 FLOPs", "profile-vit-resnet-swin", "flops/vit-tiny", 1),
    ("course", "81,102,080", "profile-vit-resnet-swin", "flops/resnet20", 1),
]


@pytest.mark.parametrize(
    ("page", "text", "folder", "metric", "factor"), TOLD, ids=[f"{page}-{metric}" for page, _, _, metric, _ in TOLD]
)
def test_a_number_of_a_page_is_that_of_its_report(page, text, folder, metric, factor):
    told = re.sub(r"\s+", " ", (DOCS / f"{page}.md").read_text())
    estimate = metrics(folder)[metric]
    assert text in told
    measured = [factor * end for end in (estimate.value, estimate.low, estimate.high) if end is not None]
    said = three(text.replace(",", ""))
    places = len(text.split()[0].partition(".")[2])
    assert said == pytest.approx(measured[: len(said)], abs=0.51 * 10**-places)


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
