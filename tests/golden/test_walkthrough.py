"""`vitlens walkthrough`: the function's rows, a complete report, and one-line refusals."""

from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np
import pytest

import vitlens
from tests.kit.commands import ran
from tests.kit.first_page import judged, states
from tests.kit.select import index_by, select_one, values_of
from vitlens import load
from vitlens.cli.main import run
from vitlens.commands.run.publish import read_folder
from vitlens.commands.walkthrough.record import WalkthroughRecord
from vitlens.commands.walkthrough.report import REPORT

HEADLESS = "timm:eva02_tiny_patch14_224 --random-weights --image-size 28"


@pytest.fixture(scope="module")
def record(golden) -> WalkthroughRecord:
    return golden("walkthrough").record


def test_its_rows_and_arrays_are_what_the_function_gives(record, tiny_vit, pictures):
    walk = vitlens.walkthrough(load(str(tiny_vit)), pictures / "1.png", layer=1, head=1)
    (row,) = record.walk
    assert (row.name, row.tokens, row.patches, row.layers, row.heads, row.named) == (
        "L1.H1",
        17,
        16,
        2,
        2,
        True,
    )
    assert (row.query, row.query_name, row.key) == (0, "CLS", walk.key)
    assert row.key_name == f"the patch in row {(walk.key - 1) // 4}, column {(walk.key - 1) % 4}"
    expected = [
        float(walk.scores[0, walk.key]),
        float(walk.weights[0, walk.key]),
        float(walk.weights[0].max()),
    ]
    assert [row.score, row.weight, row.largest] == pytest.approx(expected, rel=1e-4)
    assert row.product * row.scale == pytest.approx(row.score, rel=1e-4)
    assert row.times_uniform == pytest.approx(17 * row.weight)
    assert [(step.step, step.note or "") for step in record.steps] == values_of(
        walk.checks, "step", "note"
    )
    for name in ("queries", "keys", "values", "scores", "weights"):
        np.testing.assert_allclose(getattr(record.head, name), getattr(walk, name), atol=1e-5)
    assert row.unscaled_largest == pytest.approx(float(walk.unscaled[0].max()), rel=1e-4)
    np.testing.assert_array_equal(record.head.order, walk.order)
    embedding = record.embedding
    np.testing.assert_allclose(embedding.convolved, walk.embedding.convolved[0], atol=1e-5)
    strongest = int(np.abs(embedding.convolved[walk.key - 1]).argmax())
    assert embedding.numbers[0] == strongest
    assert embedding.responses[0] == embedding.convolved[walk.key - 1, strongest]
    classes = load(str(tiny_vit)).classes
    assert values_of(record.answers, "prediction") == [
        classes[int(change.logits.argmax())] for change in walk.changed
    ]
    assert len(set(values_of(record.answers, "change"))) == len(walk.changed)
    assert values_of(record.permutations, "positions") == [True, False]
    assert values_of(record.added, "norm") == pytest.approx(
        walk.head_norms[:, 0].tolist(), rel=1e-4
    )
    ends = [float(tokens[0].norm()) for tokens in (walk.input, walk.after)]
    assert [record.block[0].norm, record.block[-1].norm] == pytest.approx(ends, rel=1e-4)
    assert record.block[1].norm == pytest.approx(record.added[1].norm, rel=1e-4)
    assert len(record.entropies) == 4


def test_its_report_judges_the_differences_and_counts_changed_predictions(record):
    def told(walked: WalkthroughRecord) -> str:
        sentences = chain.from_iterable(part.sentences for part in REPORT(walked).sections)
        return " ".join(sentence.text for sentence in sentences)

    assert values_of(REPORT(record).sections, "step") == [True] * 13
    assert "it has none" not in told(record)
    none = index_by(record.steps, "step")
    none["positions"] = replace(none["positions"], difference=None, note="it has none")
    assert "it has none" in told(replace(record, steps=tuple(none.values())))
    (verdict,) = judged(REPORT(record))
    assert verdict.state == "pass"
    assert verdict.effect.value == max(step.relative for step in record.steps)
    page = (record.folder / "report.html").read_text()
    assert page.count('class="step"') == 13
    assert page.count('<form class="steps"') == 1
    first, *rest = record.steps
    off = replace(record, steps=(replace(first, relative=0.5), *rest))
    (verdict,) = judged(REPORT(off))
    assert (verdict.state, verdict.effect.value) == ("fail", pytest.approx(0.5))
    assert REPORT(off).title != REPORT(record).title
    assert REPORT(off).first.glance.rows[0][0] == first.step
    none = replace(record, steps=tuple(replace(step, relative=None) for step in record.steps))
    assert list(states(REPORT(none)).values()) == ["inconclusive"]
    unchanged, *rest = record.answers
    rows = [replace(answer, prediction=unchanged.prediction) for answer in rest]
    rows[1] = replace(rows[1], prediction="a *cat*")
    claims = REPORT(replace(record, answers=(unchanged, *rows))).claims
    claim = select_one(claims, question="changes")
    assert f"1 of {len(rest)} " in claim.says
    assert "a *cat*" not in claim.says  # a class's name is no markup
    assert claim.evidence == "intervened"


@pytest.mark.slow
def test_of_several_images_the_first_is_taken_and_said(tiny_vit, pictures, tmp_path, capsys):
    line = ["walkthrough", str(tiny_vit), "--images", str(pictures), "--device", "cpu", "--no-html"]
    assert run([*line, "--out", str(tmp_path / "out")]) == 0
    assert "1 of the 3 images" in capsys.readouterr().err
    assert Path(read_folder(tmp_path / "out").row.image).name == "0.png"


@pytest.mark.slow
def test_a_headless_model_has_no_predictions_but_all_steps(pictures, tmp_path):
    record = ran(
        tmp_path / "out", f"walkthrough {HEADLESS} --images {pictures / '0.png'} --no-html"
    )
    assert set(values_of(record.answers, "prediction")) == {None}
    assert "answers" not in values_of(REPORT(record).figures, "name")
    assert len(record.steps) == 9
