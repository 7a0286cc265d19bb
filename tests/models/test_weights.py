"""Weights from files: wrappers taken off and said, misfits named, and no pickle ever run."""

import collections
import pickle
import random
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from vitlens.errors import ModelError
from vitlens.models.weights import load_strictly, read_weights

STATE = {"a.weight": torch.arange(6.0).view(2, 3), "a.bias": torch.ones(2)}


def stored(folder: Path, content: object, *, name: str = "w.pth", legacy: bool = False) -> Path:
    torch.save(content, folder / name, _use_new_zipfile_serialization=not legacy)
    return folder / name


def equal(state: dict[str, torch.Tensor], expected: dict[str, torch.Tensor] = STATE) -> bool:
    return list(state) == list(expected) and all(torch.equal(state[key], expected[key]) for key in expected)


@pytest.mark.parametrize("name", ["w.pth", "w.pt", "w.bin"])
@pytest.mark.parametrize("legacy", [False, True])
def test_a_plain_state_dict(tmp_path, name, legacy):
    found = read_weights(stored(tmp_path, STATE, name=name, legacy=legacy))
    assert equal(found.state)
    assert found.notes == ()


def test_safetensors_with_their_metadata(tmp_path):
    save_file(STATE, tmp_path / "w.safetensors", metadata={"made": "here"})
    found = read_weights(tmp_path / "w.safetensors")
    assert equal(dict(sorted(found.state.items())), dict(sorted(STATE.items())))
    assert found.metadata == {"made": "here"}


WRAPPERS = {
    "state_dict": ({"state_dict": STATE, "epoch": 3}, ("took the weights from 'state_dict'",)),
    "model": ({"model": STATE, "optimizer": {"lr": 0.1}}, ("took the weights from 'model'",)),
    "ema before model": ({"model": {"x": torch.zeros(1)}, "model_ema": STATE}, ("took the weights from 'model_ema'",)),
    "two deep": (
        {"state_dict": {"model": STATE}},
        ("took the weights from 'state_dict'", "took the weights from 'model'"),
    ),
    "ordered": (collections.OrderedDict(STATE), ()),
    "module.": ({f"module.{key}": value for key, value in STATE.items()}, ("took 'module.' off every name",)),
    "compiled and parallel": (
        {f"_orig_mod.module.{key}": value for key, value in STATE.items()},
        ("took '_orig_mod.' off every name", "took 'module.' off every name"),
    ),
    "all of it": (
        {"state_dict": {f"module._orig_mod.{key}": value for key, value in STATE.items()}},
        (
            "took the weights from 'state_dict'",
            "took 'module.' off every name",
            "took '_orig_mod.' off every name",
        ),
    ),
}


@pytest.mark.parametrize("case", WRAPPERS)
def test_the_usual_wrappers_are_taken_off_and_said(tmp_path, case):
    content, notes = WRAPPERS[case]
    found = read_weights(stored(tmp_path, content))
    assert equal(found.state)
    assert found.notes == notes


def test_a_prefix_of_some_names_alone_stays(tmp_path):
    content = {"module.a": torch.zeros(1), "b": torch.zeros(1)}
    assert list(read_weights(stored(tmp_path, content)).state) == ["module.a", "b"]


@pytest.mark.parametrize("content", [{}, [torch.zeros(1)], {"a": 1}, {"a": torch.zeros(1), "epoch": 3}, torch.zeros(2)])
def test_anything_but_names_to_tensors_is_refused(tmp_path, content):
    with pytest.raises(ModelError, match="expected a state dict"):
        read_weights(stored(tmp_path, content))


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
    with pytest.raises(ModelError, match=r"a pickle that would run code: refused; save it again with torch.save"):
        read_weights(path)
    assert not target.exists()
    torch.load(path, weights_only=False) if form != "bare pickle" else pickle.loads(path.read_bytes())
    assert target.exists()  # it would have


def test_a_missing_file(tmp_path):
    with pytest.raises(ModelError, match=r"found nothing at .*none.pth; give --weights FILE"):
        read_weights(tmp_path / "none.pth")
    with pytest.raises(ModelError, match="found nothing at"):
        read_weights(tmp_path)


@pytest.mark.parametrize("kept", [0, 4, 8, 40, -1])
def test_truncated_safetensors(tmp_path, kept):
    save_file(STATE, tmp_path / "w.safetensors")
    whole = (tmp_path / "w.safetensors").read_bytes()
    (tmp_path / "w.safetensors").write_bytes(whole[:kept])
    with pytest.raises(ModelError, match=r"expected safetensors in .*, found a file that is not"):
        read_weights(tmp_path / "w.safetensors")


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_damaged_files_are_one_line_whatever_is_wrong(tmp_path, suffix):
    """A thousand torn and scribbled files: each is read or refused with a ModelError, never another exception."""
    sources = []
    if suffix == ".pth":
        sources = [stored(tmp_path, STATE).read_bytes(), stored(tmp_path, STATE, legacy=True).read_bytes()]
    else:
        save_file(STATE, tmp_path / "w.safetensors")
        sources = [(tmp_path / "w.safetensors").read_bytes()]
    chance, path = random.Random(0), tmp_path / f"damaged{suffix}"
    refused: list[str] = []
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
            refused.append(str(error))
    assert len(refused) > 200
    assert not any("\n" in message for message in refused)


@pytest.mark.parametrize("content", [b"", b"hello world\n", b"\x89PNG\r\n\x1a\n" + bytes(100), b"PK\x03\x04 no zip"])
def test_another_kind_of_file(tmp_path, content):
    for name in ("w.pth", "w.safetensors"):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ModelError) as caught:
            read_weights(tmp_path / name)
        assert "\n" not in str(caught.value)


def test_a_zip_of_something_else(tmp_path):
    with zipfile.ZipFile(tmp_path / "w.pth", "w") as archive:
        archive.writestr("readme.txt", "no weights")
    with pytest.raises(ModelError, match="torch cannot read"):
        read_weights(tmp_path / "w.pth")


def test_load_strictly_names_the_first_of_each_kind():
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 4))
    state = {"0.weight": torch.zeros(2, 5), "0.bias": torch.zeros(2), "x.first": torch.zeros(1), "x.b": torch.zeros(1)}
    with pytest.raises(ModelError) as caught:
        load_strictly(model, state, where="a-model")
    message = str(caught.value)
    assert "weights do not fit a-model: 2 missing (first '1.weight'); 2 unexpected (first 'x.first')" in message
    assert "'0.weight' expected (2, 3), found (2, 5)" in message


def test_nothing_is_loaded_when_something_does_not_fit():
    model = nn.Linear(3, 2)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(ModelError):
        load_strictly(model, {"weight": torch.zeros(2, 3), "bias": torch.zeros(3)}, where="a-model")
    assert equal(dict(model.state_dict()), before)


def test_load_strictly_takes_half_precision():
    model = nn.Linear(3, 2)
    load_strictly(model, {"weight": torch.ones(2, 3).half(), "bias": torch.zeros(2).half()}, where="a-model")
    assert model.weight.dtype == torch.float32
    assert (model.weight == 1).all()
