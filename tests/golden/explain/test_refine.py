"""`vitlens explain --refine --views --times --upsample`: the maps, their names, and what cannot be refined."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kit.explained import explained
from tests.kit.making import digits
from vitlens import Refinement, load
from vitlens import explain as attribute
from vitlens.analysis.faithfulness.defaults import RANDOM
from vitlens.attribution.registry import ATTRIBUTIONS, default_methods
from vitlens.cli.main import run
from vitlens.commands.explain.measure import chosen_methods
from vitlens.commands.run.publish import read_folder

OF_PATCHES = tuple(name for name, entry in ATTRIBUTIONS.items() if entry.resolution == "patch" and name != "best")


@pytest.fixture
def typed(tiny_vit: Path, tiny_cnn: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """A call as typed on the command line, of the tiny ViT or CNN: its exit code, stderr, and whether it wrote."""

    def call(line: str, *, cnn: bool = False) -> tuple[int, str, bool]:
        out, model = tmp_path / "out", str(tiny_cnn if cnn else tiny_vit)
        code = run(["explain", model, "--data", "digits", "--limit", "2", "--out", str(out), *line.split()])
        return code, capsys.readouterr().err.strip(), out.exists()

    return call


def test_a_refined_run_writes_the_refined_maps_and_says_so(tiny_vit, tmp_path):
    line = "--data digits --limit 5 --method relevance,rollout --target true --refine affinity --views 2"
    record = explained(tmp_path / "out", f"{line} --times gradcam", tiny_vit)
    model, split = load(str(tiny_vit)), digits("test", seed=0).limit(5, seed=0)
    (batch,) = split.batches(5)
    refinement = Refinement("affinity", times="gradcam", views=2)
    written = record.maps[model.alias].maps
    assert [row.method for row in record.methods] == ["relevance", "rollout"]
    for index, row in enumerate(record.methods):
        expected = attribute(model, batch.images, targets=batch.labels, method=row.method, refinement=refinement)
        assert expected.shape == (5, 8, 8)
        assert row.map == "8x8"
        assert not row.signed
        torch.testing.assert_close(
            torch.from_numpy(written[index]), expected, atol=1e-4 * expected.abs().max().item(), rtol=1e-3
        )
        words = "times GradCAM, refined by attention between patches (2 steps), mean of 2 views"
        assert row.title == f"{ATTRIBUTIONS[row.method].title}, {words}"
    report = (tmp_path / "out" / "report.md").read_text()
    assert report.count(record.methods[0].title) >= 1


@pytest.mark.parametrize(
    ("line", "size", "words"),
    [
        ("--refine affinity", "4x4", "refined by attention between patches (2 steps)"),
        ("--refine affinity --refine-layers 1 --refine-steps 4", "4x4", "between patches of layers 1 (4 steps)"),
        ("--views 3", "8x8", "mean of 3 views"),
        ("--times rollout", "4x4", "times rollout"),
        ("--upsample image", "32x32", "enlarged along the image's edges"),
    ],
)
def test_the_options_as_typed(typed, tmp_path, line, size, words):
    code, _, written = typed(f"--method gradcam {line}")
    assert (code, written) == (0, True)
    (row,) = read_folder(tmp_path / "out").methods
    assert row.map == size
    assert row.title.startswith("GradCAM, ")
    assert row.title.endswith(words)
    assert row.signed is ("times" not in line)


def test_a_refined_map_has_no_completeness_error(tiny_vit, tmp_path):
    """Its sum is no longer that of the method."""
    line = "--data digits --limit 2 --method integrated-gradients --views 2"
    (row,) = explained(tmp_path / "out", line, tiny_vit).methods
    assert (row.gain, row.completeness) == (None, None)


def test_methods_that_are_not_named_and_cannot_be_refined_are_left_out(tiny_vit, tiny_cnn):
    vit, cnn = load(str(tiny_vit)), load(str(tiny_cnn))
    affinity, views = Refinement("affinity"), Refinement(views=2)
    refinable = tuple(name for name in default_methods() if name in OF_PATCHES)
    assert refinable == ("relevance", "rollout", "gradcam", "occlusion")
    assert chosen_methods([vit], (), refinement=affinity) == [refinable]
    assert chosen_methods([vit], ("all",), refinement=affinity) == [OF_PATCHES]
    times = Refinement(times="gradcam")
    assert chosen_methods([vit], (), refinement=times) == [
        tuple(name for name in default_methods() if name != "gradcam")
    ]
    assert chosen_methods([vit, cnn], (), refinement=views) == chosen_methods([vit, cnn], ())


@pytest.mark.slow
def test_checks_are_of_the_refined_maps(tiny_vit, tmp_path):
    """A verified run removes patches in the order of the refined map."""
    line = "--data digits --limit 5 --method gradcam --verify --no-counterfactuals --no-stability"
    plain, refined = (
        explained(tmp_path / name, f"{line} --other-substrates none {more}", tiny_vit)
        for name, more in (("plain", ""), ("refined", "--refine affinity --views 2"))
    )
    rows = [{row.method: row for row in record.league} for record in (plain, refined)]
    assert rows[0]["gradcam"].gap != rows[1]["gradcam"].gap
    assert rows[0][RANDOM].gap == rows[1][RANDOM].gap
    assert rows[1]["gradcam"].forwards.value > 2 * rows[0]["gradcam"].forwards.value
