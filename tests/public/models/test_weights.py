"""Weights from files: wrappers are removed and named, misfits named, no pickle is run.

Any fault of a file is one line, quickly and in little memory.
"""

import json
import pickle
import random
import zipfile
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import vitlens
from tests.kit.models.files import Malicious, one_line
from tests.kit.tiny import images
from vitlens.errors import ModelError

LITTLE = {"a.bias": torch.ones(2), "a.weight": torch.arange(6.0).view(2, 3)}  # fits nothing


@cache
def whole(prefix: str = "") -> dict[str, torch.Tensor]:
    """Return the weights of a small CNN, with a prefix of every name."""
    state = vitlens.load("resnet20@random", seed=1).module.state_dict()
    return {f"{prefix}{name}": value for name, value in state.items()}


def stored(folder: Path, content: object, *, name: str = "w.pth", legacy: bool = False) -> Path:
    torch.save(content, folder / name, _use_new_zipfile_serialization=not legacy)
    return folder / name


def loaded(path: Path) -> vitlens.Model:
    return vitlens.load(str(path), arch="resnet20")


def has_them(model: vitlens.Model) -> bool:
    state = model.module.state_dict()
    return state.keys() == whole().keys() and all(
        torch.equal(state[key], whole()[key]) for key in whole()
    )


def refused(path: Path, words: str = "") -> None:
    with one_line(ModelError, words):
        loaded(path)


FORMS = {  # the file's name, what is stored, and what is said to be taken off
    "legacy": ("legacy.pth", lambda: whole(), []),
    "safetensors": ("w.safetensors", lambda: whole(), []),
    "ema before model": ("w.pth", lambda: {"model": LITTLE, "model_ema": whole()}, ["'model_ema'"]),
    "two deep": (
        "w.pth",
        lambda: {"state_dict": {"model": whole()}, "epoch": 3},
        ["'state_dict'", "'model'"],
    ),
    "all of it": (
        "w.pth",
        lambda: {"state_dict": whole("module._orig_mod.")},
        ["'state_dict'", "'_orig_mod.'", "'module.'"],
    ),
}


@pytest.mark.parametrize("case", FORMS)
def test_the_usual_wrappers_are_taken_off_and_said(tmp_path, case):
    name, content, taken = FORMS[case]
    if case == "safetensors":
        save_file(content(), tmp_path / name)
    else:
        stored(tmp_path, content(), name=name, legacy=case == "legacy")
    model = loaded(tmp_path / name)
    assert has_them(model)
    assert len(model.provenance.notes) == len(taken)
    for word, note in zip(taken, model.provenance.notes):
        assert word in note


def test_weights_in_half_precision_are_loaded_as_full(tmp_path):
    model = loaded(stored(tmp_path, {key: value.half() for key, value in whole().items()}))
    assert model(images()).dtype == torch.float32
    assert torch.equal(model.module.fc.weight, whole()["fc.weight"].half().float())


@pytest.mark.parametrize("form", ["zip", "legacy", "bare pickle", "hidden in a wrapper"])
def test_a_pickle_that_runs_code_is_refused_and_nothing_runs(tmp_path, form):
    target = tmp_path / "it-ran"
    evil = Malicious(target)
    if form == "bare pickle":
        path = tmp_path / "w.pth"
        path.write_bytes(pickle.dumps({"a": evil}))
    else:
        content = (
            {"state_dict": LITTLE, "extra": evil}
            if form == "hidden in a wrapper"
            else {**LITTLE, "b": evil}
        )
        path = stored(tmp_path, content, legacy=form == "legacy")
    for name in ("vit-micro", "timm:vit_tiny_patch16_224", "torchvision:resnet18"):
        with pytest.raises(ModelError, match="would run code: refused"):
            vitlens.load(name, weights=path)
    assert not target.exists()
    torch.load(path, weights_only=False) if form != "bare pickle" else pickle.loads(
        path.read_bytes()
    )
    assert target.exists()  # it would have


ENDLESS: dict[str, object] = {}
ENDLESS["model"] = ENDLESS
CONTENTS = {
    "nothing": ({}, "expected a state dict"),
    "a list": ([torch.zeros(1)], "expected a state dict"),
    "numbers beside tensors": ({"a": torch.zeros(1), "epoch": 3}, "expected a state dict"),
    "a tensor": (torch.zeros(2), "expected a state dict"),
    "itself": (ENDLESS, "expected a state dict"),
    "a long name": ({"module." * 10_000 + "a": torch.zeros(1)}, "names"),
    "complex": ({"a": torch.zeros(2, dtype=torch.complex64)}, "real numbers"),
    "sparse": ({"a": torch.eye(3).to_sparse()}, "real numbers"),
    "more than the file": ({"a": torch.zeros(1).expand(10**6, 10**6)}, "more than the file holds"),
    "8 MB in a small file": ({"a": torch.zeros(1).expand(2_000_000)}, "more than the file holds"),
    "NaN": (
        {"b": torch.ones(3), "a": torch.full((10, 16), float("nan"))},
        r"NaN in 'a' \(160 of 160",
    ),
    "infinite": ({"a": torch.tensor([1.0, float("-inf")])}, r"infinity in 'a' \(1 of 2"),
    "NaN in half precision": (
        {"a": torch.tensor([0, float("nan")], dtype=torch.float16)},
        "found NaN",
    ),
    "a mask, which may be infinite": (
        {"attn_mask": torch.full((2, 2), float("-inf"))},
        "do not fit",
    ),
    "a prefix of some names alone": (
        {"module.a": torch.zeros(1), "b": torch.zeros(1)},
        r"unexpected \('module\.a'",
    ),
    "a sum that overflows alone": ({"a": torch.full((4,), 3e38)}, "do not fit"),
}


@pytest.mark.parametrize("case", CONTENTS)
@pytest.mark.filterwarnings("ignore:Sparse")
def test_anything_but_finite_tensors_is_refused(tmp_path, case):
    content, words = CONTENTS[case]
    refused(stored(tmp_path, content), words)


@pytest.mark.parametrize(
    "content", [b"", b"hello world\n", b"\x89PNG\r\n\x1a\n" + bytes(100), b"PK\x03\x04 no zip"]
)
def test_another_kind_of_file(tmp_path, content):
    for name in ("w.pth", "w.safetensors"):
        (tmp_path / name).write_bytes(content)
        refused(tmp_path / name)


def test_a_zip_of_something_else_and_a_packed_one(tmp_path):
    with zipfile.ZipFile(tmp_path / "w.pth", "w") as archive:
        archive.writestr("readme.txt", "no weights")
    refused(tmp_path / "w.pth", "a zip archive: unpack it first")
    stored(tmp_path, {"a": torch.zeros(20 << 20, dtype=torch.uint8)})
    with (
        zipfile.ZipFile(tmp_path / "w.pth") as saved,
        zipfile.ZipFile(tmp_path / "bomb.pth", "w", zipfile.ZIP_DEFLATED) as bomb,
    ):
        for name in saved.namelist():
            bomb.writestr(name, saved.read(name))
    refused(tmp_path / "bomb.pth", "packed")


def test_a_header_of_272_tebibytes(tmp_path):
    numbers = 37 * 10**12
    header = json.dumps(
        {"a": {"dtype": "F64", "shape": [numbers], "data_offsets": [0, 8 * numbers]}}
    ).encode()
    (tmp_path / "w.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    refused(tmp_path / "w.safetensors", "expected safetensors")


def test_torn_and_scribbled_files_are_refused_in_one_line(tmp_path):
    save_file(LITTLE, tmp_path / "w.safetensors")
    sources = [stored(tmp_path, LITTLE, legacy=legacy).read_bytes() for legacy in (False, True)]
    sources += [(tmp_path / "w.safetensors").read_bytes()]
    chance = random.Random(0)
    for number in range(60):
        path = tmp_path / ("damaged.safetensors" if number % 3 == 2 else "damaged.pth")
        content = bytearray(sources[number % 3][: chance.randrange(1, 2000)])
        for _ in range(chance.randrange(1, 20)):
            content[chance.randrange(min(len(content), 400))] = chance.randrange(256)
        path.write_bytes(content)
        refused(path)  # what can be read still does not fit


@pytest.mark.parametrize("content", [b"\x85", b"\x82\xa3", b"\x08", b"P", b"\xff"], ids=repr)
def test_a_file_of_few_bytes_is_refused_in_one_line(content, tmp_path):
    (tmp_path / "w").write_bytes(content)
    refused(tmp_path / "w", "Flax" if content == b"\x82\xa3" else "")
