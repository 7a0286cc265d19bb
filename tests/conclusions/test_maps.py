"""A map passes only if it passes every check; otherwise the verdict says what it lacks."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.kit.commands import ran, report
from tests.kit.contradictions import contradictions
from tests.kit.first_page import clear_effects, states
from tests.kit.first_page_answers import judged_maps
from tests.kit.making import save
from tests.kit.map_rows import CENTRE, IMPUTED, RANDOM, SHUFFLED, STAYING, checks
from tests.kit.select import select, select_one, values_of
from vitlens import load
from vitlens.cli.main import run
from vitlens.commands.explain.record import ExplainRecord, MethodRow
from vitlens.commands.explain.report import REPORT
from vitlens.commands.run.publish import read_folder
from vitlens.record import Config, Data, ModelEntry
from vitlens.report.claims import Claim, first_page_claims
from vitlens.report.document import Document
from vitlens.uncertainty import Estimate

REPORTS = Path(__file__).parents[2] / "reports"


def document_of(rows, *, images: int = 100, unusable: dict[str, int] | None = None) -> Document:
    """Return the report of one model whose maps were checked."""
    config = Config(
        models=(ModelEntry("vit"),), data=Data("made", images=images), options={"verify": True}
    )
    methods = tuple(
        MethodRow("vit", name, name, "", "4x4", False, images, constant, 0, 0.1)
        for name, constant in (unusable or {}).items()
    )
    document = REPORT(ExplainRecord(config=config, checks=tuple(rows), methods=methods))
    assert not list(contradictions(document.claims))
    return document


def claims(rows, **more) -> list[Claim]:
    return list(document_of(rows, **more).claims)


@pytest.mark.parametrize(
    ("changes", "state", "lacks"),
    [
        ({}, "pass", "passes every check"),
        (
            {"over": {CENTRE: 0.04}},
            "warn",
            "a map of the centre with patches imputed and in the mean colour",
        ),
        ({"over": {SHUFFLED: 0.04}}, "warn", "its maps of other images"),
        (
            {"second": {SHUFFLED: -0.2}},
            "warn",
            "its maps of other images with patches in the mean colour",
        ),
        (
            {"over": {RANDOM: 0.04, CENTRE: -0.2}},
            "fail",
            "a random map or a map of the centre with patches",
        ),
        (
            {"without": (SHUFFLED,)},
            "inconclusive",
            "was not compared with its maps of other images",
        ),
        ({"cascade": STAYING}, "fail", "ignores the weights"),
        ({"cascade": None}, "inconclusive", "not finite"),
        ({"kept_share": 0.95}, "inconclusive", "keep 90 % or more of the predictions"),
        ({"randomised": 4}, "inconclusive", "fewer than 10 images"),
        ({"n": 5}, "inconclusive", "fewer than 10 images"),
        ({"usable": 0}, "fail", "uniform maps"),
        ({"jumped": 0.6}, "fail", "jumps"),
        ({"jumped": 0.25}, "inconclusive", "may move"),
        ({"jumped": None}, "inconclusive", "was not tested with shifts"),
        ({"second": None}, "inconclusive", "a second replacement"),
        ({"one_map": True}, "fail", "is the same map for every image"),
        ({"one_map": True, "usable": 0}, "fail", "uniform maps"),
        ({"fixed": True}, "inconclusive", "its maps are fixed"),
        # what cannot be tested hides nothing that was found
        ({"fixed": True, "over": {SHUFFLED: 0.04}}, "warn", "its maps of other images"),
        ({"fixed": True, "over": {RANDOM: 0.04}}, "fail", "a random map"),
        ({"fixed": True, "one_map": True}, "fail", "the same map for every image and"),
    ],
)
def test_the_verdict_is_that_of_the_worst_check_and_says_what_lacks(changes, state, lacks):
    # which does not count
    on_object = replace(checks()[0], check="object", state="warn", lacks=(), needed=False)
    claim, *faults = claims([*checks(**changes), on_object])
    assert (claim.question, claim.state, claim.kind) == ("maps", state, "answer")
    assert lacks in claim.because
    below = min((changes.get("over") or changes.get("second") or {0: 0}).values()) < 0
    assert bool(faults) == (below or changes.get("cascade") == STAYING)


def test_the_best_is_first_and_its_equals_are_named_and_few_images_are_inconclusive():
    rows = [
        *checks(method="rollout", score=0.9, cascade=STAYING),
        *checks(method="gradcam", score=0.3, behind=0.02),
        *checks(method="relevance", score=0.35),
        *checks(method="saliency", score=0.2, behind=0.15),
    ]
    first, faulty = claims(rows)
    assert (first.subject, first.state) == ("vit", "pass")
    assert first.says.startswith("You can trust **relevance**")
    assert "3 of 4 methods" in first.says
    assert "gradcam** is not measurably worse" in first.says
    assert "saliency" not in first.says
    imputed = select_one(rows, method="relevance", check=IMPUTED)
    assert first.effect == imputed.margin
    assert (faulty.effect.value, "**rollout**" in faulty.says) == (STAYING[2], True)
    document = document_of([*checks(), *checks(method="edges", cascade=(1.0,) * 6)], images=19)
    assert values_of(document.claims, "state", "says") == [("inconclusive", "")]
    assert not clear_effects(document)
    assert document.first.answer == ()
    assert "too few" in "\n".join(values_of(document.first.unknown, "text"))


def test_faults_are_named_where_no_map_passes_and_beside_one_that_does():
    edges = checks(method="edges", cascade=(1.0,) * 6)
    below = checks(method="gradcam", over={RANDOM: -0.2, CENTRE: -0.3})
    found_claims = claims([*edges, *below], images=50)
    assert values_of(found_claims, "question") == [
        "maps",
        "maps that ignore the weights",
        "maps below a baseline",
    ]
    assert values_of(found_claims, "state") == ["fail", "", ""]
    assert len(first_page_claims(found_claims)) == 3
    assert found_claims[2].effect.value == pytest.approx(-0.3)
    assert claims([]) == []
    document = document_of([*checks(), *checks(method="edges", cascade=(1.0,) * 6)])
    claim = select_one(document.claims, question="maps")
    assert document.title == claim.title
    assert list(states(document).values()) == [claim.state]
    assert {row[1] for row in document.first.glance.rows} == {"relevance", "edges"}
    ignoring = select_one(document.claims, question="maps that ignore the weights")
    assert "**edges**" in ignoring.says
    assert "relevance" not in ignoring.says


@pytest.mark.parametrize(("low", "is_named"), [(0.01, True), (10.0, False)])
def test_kinds_of_map_that_only_seem_to_find_the_object_are_named(low, is_named):
    """Intervals in the table are not corrected for the number of kinds."""
    record = read_folder(REPORTS / "rollout-vit-digits")
    *others, last = record.methods
    others = [replace(row, difference=Estimate(50.0, 40.0, 60.0, 100)) for row in others]
    last = replace(last, difference=Estimate(20.0, low, 40.0 - low, 100))
    config = replace(record.config, data=replace(record.config.data, images=100))
    document = report(replace(record, config=config, methods=(*others, last)))
    claim = select_one(document.claims, question="pointing game")
    assert (f"**{last.name}** does not" in claim.says) == is_named


@pytest.mark.parametrize(("images", "verdicts"), [(19, {"inconclusive"}), (20, {"pass", "fail"})])
def test_too_few_images_give_no_verdict_anywhere_on_the_page(images, verdicts):
    rows = [*checks(), *checks(method="edges", cascade=STAYING)]
    document = document_of(rows, images=images)
    glance = document.first.glance
    assert {row[glance.columns.index("verdict")] for row in glance.rows} == verdicts


@pytest.mark.parametrize(
    ("changes", "failed", "untested"),
    [
        ({"jumped": None}, (), ("shifts",)),
        ({"jumped": 0.6}, ("shifts",), ()),
        ({"jumped": None, "cascade": (1.0,) * 6}, ("random weights",), ("shifts",)),
        ({"fixed": True}, ("random weights (n/a)", "shifts (n/a)"), ()),
    ],
)
def test_a_check_that_was_not_run_is_distinguished_from_one_that_failed(changes, failed, untested):
    (judged,) = judged_maps(checks(**changes))
    assert (judged.failed, judged.untested) == (failed, untested)
    assert judged.not_passed == (*failed, *(f"{name} (not run)" for name in untested))


@pytest.mark.parametrize(
    ("unusable", "images", "shares"),
    [(60, 100, [0.6]), (5, 100, []), (0, 100, []), (11, 12, []), (12, 12, [1.0]), (1, 1, [1.0])],
)
def test_uniform_maps(unusable, images, shares):
    uniform_claims = claims([], images=images, unusable={"relevance": unusable, "gradcam": 0})
    assert values_of(uniform_claims, "question", "effect.value") == [
        ("uniform maps", share) for share in shares
    ]
    for claim in uniform_claims:
        assert claim.is_shown


@pytest.fixture
def blind(tmp_path: Path, tiny_vit: Path) -> Path:
    """Write a model whose logits depend on no pixel."""
    model = load(str(tiny_vit))
    with torch.no_grad():
        model.module.head.weight.zero_()
    save(model, tmp_path / "blind" / "model.safetensors")
    return tmp_path / "blind"


@pytest.mark.parametrize(
    "line",
    [
        "look {pictures}/1.png --model {blind}",
        "explain {blind} --data digits --limit 2 --method relevance,gradcam",
        "rollout {blind} --data digits --limit 2 --method relevance",
        "compare {blind} {vit} --data digits --limit 4 --method relevance --panels 2 --maps 2 "
        "--checked 0 --no-harder",
    ],
)
def test_the_terminal_says_that_all_maps_are_uniform(
    line, blind, tiny_vit, pictures, tmp_path, capsys
):
    line = line.format(blind=blind, vit=tiny_vit, pictures=pictures)
    assert run([*line.split(), "--device", "cpu", "--out", str(tmp_path / "run")]) == 0
    claims = report(read_folder(tmp_path / "run")).claims
    (said,) = (
        claim.says for claim in claims if claim.question in ("uniform maps", "maps that are zero")
    )
    shown_text = " ".join(capsys.readouterr().err.split())
    assert said.replace("**", "") in shown_text


def test_an_attack_says_that_the_maps_of_its_examples_are_uniform(golden):
    record = golden("attack").record
    alias, arrays = next(iter(record.examples.items()))
    flat = replace(arrays, before=0 * arrays.before, after=0 * arrays.after)
    uniform_claims = select(
        report(replace(record, examples={alias: flat})).claims, question="uniform maps"
    )
    assert values_of(uniform_claims, "subject", "is_shown") == [(alias, True)]
    assert not select(report(record).claims, question="uniform maps")


def test_uniform_maps_are_a_finding_and_fail(tmp_path, blind):
    line = (
        "--data digits --verify --no-counterfactuals --composites none --limit 20 --method "
        "relevance --no-stability"
    )
    record = ran(tmp_path / "run", f"explain {blind} {line}")
    document = report(record)
    assert list(states(document).values()) == ["fail"]
    assert [section.status.state for section in document.sections if section.status] == ["fail"]
    uniform = select_one(document.claims, question="uniform maps")
    assert uniform.effect.value == 1.0
    assert values_of(record.methods, "constant", "maps") == [(20, 20)]
    assert not list((tmp_path / "run").glob("figures/explain*"))
    assert "uniform or not finite" in "\n".join(values_of(document.first.unknown, "text"))


def test_what_was_measured_on_few_images_is_named_with_its_table(tmp_path):
    options = "--other-substrates none --composites none --no-stability"
    line = f"explain vit-digits --limit 2 --method attention --verify {options}"
    record = ran(tmp_path / "out", line)
    assert record.orders
    unknown = " ".join(sentence.text for sentence in report(record).first.unknown)
    assert "`tables/orders.csv`" in unknown
    assert (record.folder / "tables" / "orders.csv").is_file()
