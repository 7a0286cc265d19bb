"""The options of `vitlens explain`: methods, refinements and their names; what it cannot do, in one line."""

import pytest

from tests.kit.explained import explained
from vitlens import Refinement, load
from vitlens.analysis.faithfulness.defaults import RANDOM
from vitlens.attribution.explain import methods_for
from vitlens.attribution.registry import ATTRIBUTIONS, default_methods
from vitlens.cli.main import run
from vitlens.commands.explain.measure import chosen_methods

OF_PIXELS = "found saliency, a map of pixels"
LINES = {
    "{pictures} --target 10": "found 10",
    "{pictures} --target cat": "'cat'",
    "{pictures} --target true": "labelled images",
    "--method gradcm": "'gradcam'",
    "--method lrp": "known: ablationcam, all, attention",
    "--method relevance --auto": "at least 2 candidates",
    "--method relevance --engine grad-cam": "engine grad-cam has",
    "{cnn} --method relevance --verify": "tiny-cnn",
    "--method saliency --refine affinity": OF_PIXELS,
    "--method gradcam,saliency --refine affinity": OF_PIXELS,
    "--method gradcam --refine affinity --times saliency": OF_PIXELS,
    "--method best --refine affinity": "found best, refined already",
    "--method gradcam --times best --refine affinity": "found best, refined already",
    "--method gradcam --times gradcam": "found the same",
    "--method gradcam --times gradcm": "'gradcam'",
    "--refine affinity --refine-layers 2": "layers from 0 to 1",
    "--refine affinity --refine-steps 3": "even number",
    "--refine affinity --refine-steps -2": "--refine-steps",
    "--views 0": "--views",
    "--views 9": "found 9",
    "--refine smooth": "smooth",
    "--upsample edges": "edges",
}
OF_A_CNN = {
    "--method rollout": "found 'rollout'; it has gradcam",
    "--method gradcam,rollout": "found 'rollout'",
    "--method relevance": "expected a method",
    "--refine affinity": "use --views",
    "--method gradcam --refine affinity": "use --views",
    "--method gradcam --times rollout": "found 'rollout'",
}
OF_PATCHES = tuple(name for name, entry in ATTRIBUTIONS.items() if entry.resolution == "patch" and name != "best")


@pytest.mark.parametrize(
    ("method", "line", "size", "words"),
    [
        ("gradcam", "--refine affinity", "4x4", "refined by attention between patches (2 steps)"),
        ("gradcam", "--refine affinity --refine-layers 1 --refine-steps 4", "4x4", "of layers 1 (4 steps)"),
        ("integrated-gradients", "--views 3", "32x32", "mean of 3 views"),  # whose sum is no longer the method's
        ("gradcam", "--times rollout", "4x4", "times rollout"),
        ("gradcam", "--upsample image", "32x32", "enlarged along the image's edges"),
    ],
)
def test_the_options_as_typed(tiny_vit, tmp_path, method, line, size, words):
    (row,) = explained(tmp_path / "out", f"--data digits --limit 2 --method {method} {line}", tiny_vit).methods
    assert (row.map, row.signed) == (size, "times" not in line)
    assert row.title.startswith(f"{ATTRIBUTIONS[method].title}, ")
    assert row.title.endswith(words)
    assert (row.gain, row.completeness) == (None, None)


def test_the_methods_of_each_model_and_refinement(tiny_vit, tiny_cnn):
    vit, cnn = load(str(tiny_vit)), load(str(tiny_cnn))
    usual, affinity = default_methods(), Refinement("affinity")
    assert chosen_methods([vit], ()) == [usual]
    assert chosen_methods([cnn], ()) == [("gradcam", "integrated-gradients", "occlusion")]
    assert chosen_methods([vit, cnn], ("all",)) == [tuple(ATTRIBUTIONS), methods_for(cnn)]
    assert chosen_methods([vit], (), engine="grad-cam") == [("gradcam",)]
    assert chosen_methods([vit], (), refinement=affinity) == [("relevance", "rollout", "gradcam", "occlusion")]
    assert chosen_methods([vit], ("all",), refinement=affinity) == [OF_PATCHES]
    times = chosen_methods([vit], (), refinement=Refinement(times="gradcam"))
    assert times == [tuple(name for name in usual if name != "gradcam")]
    assert chosen_methods([vit, cnn], (), refinement=Refinement(views=2)) == chosen_methods([vit, cnn], ())


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


@pytest.mark.parametrize(
    ("model", "line", "says"),
    [("vit", *case) for case in LINES.items()] + [("cnn", *case) for case in OF_A_CNN.items()],
)
def test_a_wrong_call_is_one_line_before_any_work(tiny_vit, tiny_cnn, pictures, tmp_path, capsys, model, line, says):
    words = line.format(cnn=tiny_cnn, pictures=f"--images {pictures}").split()
    data = [] if "--images" in words else ["--data", "digits", "--limit", "2"]
    out = tmp_path / "out"
    assert run(["explain", str({"vit": tiny_vit, "cnn": tiny_cnn}[model]), *data, *words, "--out", str(out)]) == 2
    (told,) = capsys.readouterr().err.strip().splitlines()
    assert says in told
    assert not out.exists()
