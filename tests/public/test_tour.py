"""docs/tour.ipynb: its stored outputs are complete, and executing it gives the same numbers again."""

import ast
import base64
import io
import json
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import vitlens

TOUR = Path(__file__).parents[2] / "docs" / "tour.ipynb"
LARGEST = 1.5e6  # bytes
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?")
SHOWN = "wrap attention rollout show_heads capture logit_lens intervene KnockOut patch ablate explain attack statistics"


@pytest.fixture(scope="module")
def cells():
    """The cells of code, as stored."""
    return [cell for cell in json.loads(TOUR.read_text())["cells"] if cell["cell_type"] == "code"]


def text_of(cell) -> str:
    return "".join("".join(output["text"]) for output in cell["outputs"] if output["output_type"] == "stream")


def pictures_of(cell):
    found = [output["data"]["image/png"] for output in cell["outputs"] if "image/png" in output.get("data", {})]
    return [np.asarray(Image.open(io.BytesIO(base64.b64decode(data))).convert("L")) for data in found]


def test_every_output_is_stored_and_figures_are_pictures(cells):
    assert TOUR.stat().st_size < LARGEST
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))  # run once, from the top
    kinds = [output["output_type"] for cell in cells for output in cell["outputs"]]
    assert set(kinds) == {"stream", "execute_result"}  # no error
    for cell in cells:
        last = ast.parse("".join(cell["source"])).body[-1]
        assert bool(cell["outputs"]) == (not isinstance(last, ast.ClassDef)), cell["source"]
    pictures = [picture for cell in cells for picture in pictures_of(cell)]
    assert len(pictures) == sum("vitlens.show" in "".join(cell["source"]) for cell in cells) >= 7
    assert all(min(picture.shape) > 100 and picture.std() > 10 for picture in pictures)


def test_only_public_names_are_used_and_links_lead_to_files(cells):
    code = "\n".join("".join(cell["source"]) for cell in cells)
    assert not re.search(r"^\s*(from vitlens|import vitlens\.)", code, re.MULTILINE)
    used = set(re.findall(r"\bvitlens\.(\w+)", code))
    assert {*SHOWN.split(), "read"} <= used <= set(vitlens.__all__)
    texts = ["".join(cell["source"]) for cell in json.loads(TOUR.read_text())["cells"]]
    links = [link for text in texts for link in re.findall(r"\]\(([^)]+)\)", text)]
    assert links
    assert all((TOUR.parent / link).is_file() for link in links)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # of the kernel's own libraries
def test_executed_again_it_gives_the_same_numbers(cells, tmp_path):
    nbformat, nbclient, _ = (
        pytest.importorskip(name, reason=f"needs the extra test: pip install {name}")
        for name in ("nbformat", "nbclient", "ipykernel")
    )
    notebook = nbformat.read(TOUR, as_version=4)
    nbformat.validate(notebook)
    options = {"kernel_name": "python3", "timeout": 300, "coalesce_streams": True}
    nbclient.NotebookClient(notebook, resources={"metadata": {"path": str(tmp_path)}}, **options).execute()
    again = [cell for cell in notebook.cells if cell.cell_type == "code"]
    for before, after in zip(cells, again, strict=True):
        assert len(pictures_of(before)) == len(pictures_of(after))
        if "vitlens.attack" in after.source:  # which class an attack ends in may hang on the last bit
            continue
        stored, found = text_of(before), text_of(after)
        assert NUMBER.sub("#", stored).split() == NUMBER.sub("#", found).split()
        assert [float(each) for each in NUMBER.findall(found)] == pytest.approx(
            [float(each) for each in NUMBER.findall(stored)], rel=0.05, abs=0.03
        )
