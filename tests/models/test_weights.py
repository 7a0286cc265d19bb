"""Weights from files: wrappers taken off and said, misfits named, no pickle ever run; whatever is wrong with a file is
one line, quickly and in little memory."""

import json
import pickle
import random
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from vitlens.errors import ModelError
from vitlens.models.loading import load
from vitlens.models.weights import load_strictly, read_weights

STATE = {"a.bias": torch.ones(2), "a.weight": torch.arange(6.0).view(2, 3)}


def stored(folder: Path, content: object, *, name: str = "w.pth", legacy: bool = False) -> Path:
    torch.save(content, folder / name, _use_new_zipfile_serialization=not legacy)
    return folder / name


def equal(state: dict[str, torch.Tensor], expected: dict[str, torch.Tensor] = STATE) -> bool:
    return state.keys() == expected.keys() and all(torch.equal(state[key], expected[key]) for key in expected)


def refused(path: Path, match: str | None = None) -> None:
    with pytest.raises(ModelError, match=match) as caught:
        read_weights(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("legacy", [False, True])
def test_a_plain_state_dict(tmp_path, legacy):
    for name in ("w.pth", "w.pt", "w.bin"):
        found = read_weights(stored(tmp_path, STATE, name=name, legacy=legacy))
        assert equal(found.state)
        assert found.notes == ()


def test_safetensors_with_their_metadata(tmp_path):
    save_file(STATE, tmp_path / "w.safetensors", metadata={"made": "here"})
    found = read_weights(tmp_path / "w.safetensors")
    assert equal(found.state)
    assert found.metadata == {"made": "here"}


def prefixed(prefix: str) -> dict[str, torch.Tensor]:
    return {f"{prefix}{key}": value for key, value in STATE.items()}


WRAPPERS = {
    "model": ({"model": STATE, "optimizer": {"lr": 0.1}}, ["took the weights from 'model'"]),
    "ema before model": ({"model": {"x": torch.zeros(1)}, "model_ema": STATE}, ["took the weights from 'model_ema'"]),
    "two deep": (
        {"state_dict": {"model": STATE}, "epoch": 3},
        ["took the weights from 'state_dict'", "took the weights from 'model'"],
    ),
    "all of it": (
        {"state_dict": prefixed("module._orig_mod.")},
        ["took the weights from 'state_dict'", "took 'module.' off every name", "took '_orig_mod.' off every name"],
    ),
}


@pytest.mark.parametrize("case", WRAPPERS)
def test_the_usual_wrappers_are_taken_off_and_said(tmp_path, case):
    content, notes = WRAPPERS[case]
    found = read_weights(stored(tmp_path, content))
    assert equal(found.state)
    assert list(found.notes) == notes


def test_a_prefix_of_some_names_alone_stays(tmp_path):
    content = {"module.a": torch.zeros(1), "b": torch.zeros(1)}
    assert list(read_weights(stored(tmp_path, content)).state) == ["module.a", "b"]


def test_masks_may_be_infinite_and_counters_single_numbers(tmp_path):
    state = {"attn_mask": torch.full((2, 2), float("-inf")), "w": torch.ones(2), "count": torch.tensor(3)}
    assert equal(read_weights(stored(tmp_path, state)).state, state)


class Malicious:
    """A pickle that makes a file as soon as it is read without care."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return Path.touch, (self.target,)


@pytest.mark.parametrize("form", ["zip", "legacy", "bare pickle", "hidden in a wrapper"])
def test_a_pickle_that_runs_code_is_refused_and_nothing_runs(tmp_path, form):
    target = tmp_path / "it-ran"
    evil = Malicious(target)
    if form == "bare pickle":
        path = tmp_path / "w.pth"
        path.write_bytes(pickle.dumps({"a": evil}))
    else:
        content = {"state_dict": STATE, "extra": evil} if form == "hidden in a wrapper" else {**STATE, "b": evil}
        path = stored(tmp_path, content, legacy=form == "legacy")
    refused(path, r"a pickle that would run code: refused; save it again with torch.save")
    for name in ("vit-micro", "timm:vit_tiny_patch16_224", "torchvision:resnet18"):
        with pytest.raises(ModelError, match="refused"):
            load(name, weights=path)
    assert not target.exists()
    torch.load(path, weights_only=False) if form != "bare pickle" else pickle.loads(path.read_bytes())
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
    "NaN": ({"b": torch.ones(3), "a": torch.full((10, 16), float("nan"))}, r"found NaN in 'a' \(160 of 160"),
    "infinite": ({"a": torch.tensor([1.0, float("-inf")])}, r"found infinity in 'a' \(1 of 2"),
    "NaN in half precision": ({"a": torch.tensor([0, float("nan")], dtype=torch.float16)}, "found NaN"),
}


@pytest.mark.parametrize("case", CONTENTS)
@pytest.mark.filterwarnings("ignore:Sparse")
def test_anything_but_finite_tensors_is_refused(tmp_path, case):
    content, match = CONTENTS[case]
    refused(stored(tmp_path, content), match)


@pytest.mark.parametrize("content", [b"", b"hello world\n", b"\x89PNG\r\n\x1a\n" + bytes(100), b"PK\x03\x04 no zip"])
def test_another_kind_of_file_or_none(tmp_path, content):
    for name in ("w.pth", "w.safetensors"):
        (tmp_path / name).write_bytes(content)
        refused(tmp_path / name)
    refused(tmp_path / "none.pth", r"found nothing at .*none.pth; give --weights FILE")
    refused(tmp_path, "found nothing at")


def test_a_zip_of_something_else_and_a_packed_one(tmp_path):
    with zipfile.ZipFile(tmp_path / "w.pth", "w") as archive:
        archive.writestr("readme.txt", "no weights")
    refused(tmp_path / "w.pth", "torch cannot read")
    stored(tmp_path, {"a": torch.zeros(20 << 20, dtype=torch.uint8)})
    with (
        zipfile.ZipFile(tmp_path / "w.pth") as whole,
        zipfile.ZipFile(tmp_path / "bomb.pth", "w", zipfile.ZIP_DEFLATED) as bomb,
    ):
        for name in whole.namelist():
            bomb.writestr(name, whole.read(name))
    refused(tmp_path / "bomb.pth", "packed")


def test_a_header_of_272_tebibytes(tmp_path):
    numbers = 37 * 10**12
    header = json.dumps({"a": {"dtype": "F64", "shape": [numbers], "data_offsets": [0, 8 * numbers]}}).encode()
    (tmp_path / "w.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    refused(tmp_path / "w.safetensors", "expected safetensors in .*, found a file that is not")


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_torn_and_scribbled_files_are_read_or_refused_in_one_line(tmp_path, suffix):
    if suffix == ".pth":
        sources = [stored(tmp_path, STATE).read_bytes(), stored(tmp_path, STATE, legacy=True).read_bytes()]
    else:
        save_file(STATE, tmp_path / "w.safetensors")
        sources = [(tmp_path / "w.safetensors").read_bytes()]
    chance, path = random.Random(0), tmp_path / f"damaged{suffix}"
    said: list[str] = []
    for number in range(300):
        content = bytearray(sources[number % len(sources)])
        if number % 3 == 0:
            content = content[: chance.randrange(len(content))]
        for _ in range(chance.randrange(1, 20) if content else 0):
            content[chance.randrange(min(len(content), 400))] = chance.randrange(256)
        path.write_bytes(content)
        try:
            read_weights(path)
        except ModelError as error:
            said.append(str(error))
    assert len(said) > 200
    assert not any("\n" in line for line in said)


def test_load_strictly_names_the_first_of_each_kind_and_loads_all_or_nothing():
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 4))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    state = {"0.weight": torch.zeros(2, 5), "0.bias": torch.zeros(2), "x.first": torch.zeros(1), "x.b": torch.zeros(1)}
    with pytest.raises(ModelError) as caught:
        load_strictly(model, state, where="a-model")
    message = str(caught.value)
    assert "weights do not fit a-model: 2 missing (first '1.weight'); 2 unexpected (first 'x.first')" in message
    assert "'0.weight' expected (2, 3), found (2, 5)" in message
    assert equal(dict(model.state_dict()), before)
    load_strictly(model, {key: value.half() for key, value in before.items()}, where="a-model")
    assert model[0].weight.dtype == torch.float32
