"""What `vitlens explain` cannot do is one line that names what was found, before any work; errors are of a kind."""

import pytest

from vitlens import Refinement, load
from vitlens.cli.main import run
from vitlens.commands.explain.measure import chosen_methods
from vitlens.errors import InputError, UnknownNameError, UnsupportedError

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
}


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


def test_the_errors_by_kind(tiny_vit, tiny_cnn):
    vit, cnn, plain = load(str(tiny_vit)), load(str(tiny_cnn)), Refinement()
    for error, models, methods, refinement in (
        (UnknownNameError, [vit], ("relevanse",), plain),
        (UnsupportedError, [vit, cnn], ("rollout",), plain),
        (UnsupportedError, [vit], ("saliency",), Refinement("affinity")),
        (UnsupportedError, [cnn], (), Refinement("affinity")),
        (UnsupportedError, [cnn], ("gradcam",), Refinement(times="rollout")),
        (InputError, [vit], ("rollout",), Refinement(times="rollout")),
        (InputError, [vit], (), Refinement("affinity", layers=(0, 2))),
        (InputError, [vit], ("rollout",), Refinement("affinity", layers=(-1,))),
    ):
        with pytest.raises(error):
            chosen_methods(models, methods, refinement=refinement)
    with pytest.raises(UnknownNameError, match="'gradcam'"):
        Refinement(times="gradcm")
