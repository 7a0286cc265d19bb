"""Features of a split from memory, disk and several processes; patch tokens on their grid."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import vitlens
from tests.kit.simulated_processes import run_in_processes
from tests.kit.splits import split_of
from tests.kit.tiny import images, model_of, ours, timm_model
from vitlens import Model, Split
from vitlens.analysis.features import cache as module
from vitlens.analysis.features.cache import FeatureCache
from vitlens.analysis.features.features import Features, extract, patch_tokens
from vitlens.errors import InputError, UnsupportedError

SIZE = (32, 48)


def split(count: int = 7, *, seed: int = 0) -> Split:
    return split_of(images(SIZE, batch=count, seed=seed), torch.arange(count) % 2, ("a", "b"))


def runs_of(model: Model) -> list[int]:
    """Record how many images each forward pass gets, after the pass that looks for layers."""
    vitlens.features(model, images(model.input_size))
    seen: list[int] = []
    run = model.run
    model.run = lambda prepared: seen.append(len(prepared)) or run(prepared)
    return seen


def assert_same(one: Features, other: Features, *, within: float = 0.0) -> None:
    assert (one.layers, one.pool, one.alias) == (other.layers, other.pool, other.alias)
    for actual, expected in zip(
        (*one.values, one.logits), (*other.values, other.logits), strict=True
    ):
        torch.testing.assert_close(actual, expected, atol=within, rtol=within)


def test_as_features_of_the_images_themselves_and_a_second_run_reads_nothing_again(tmp_path):
    model = ours()
    data = split()
    done = list[int]()
    expected = vitlens.features(model, data.source.read(torch.arange(7)) / 255, batch_size=3)
    assert_same(extract(model, data, batch_size=3), expected)
    assert_same(extract(model, data, batch_size=3, cache=tmp_path), expected)
    seen = runs_of(model)
    again = extract(model, data, cache=tmp_path, advance=done.append)
    assert (seen, sum(done), again.notes) == ([], 7, ())
    assert_same(again, expected)
    again.values[0].add_(1)  # does not reach the file
    assert_same(extract(model, data, cache=tmp_path), expected)


def test_layers_that_are_missing_are_read_alone(tmp_path):
    """A cache without the embedding is completed; the blocks' files stay as they are."""
    model = ours()
    data = split()
    extract(model, data, cache=tmp_path)
    files = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.npy")}
    both = extract(model, data, cache=tmp_path, embedding=True, batch_size=3)
    assert_same(both, extract(model, data, embedding=True), within=1e-6)
    assert {path: path.stat().st_mtime_ns for path in files} == files
    assert {path.stem for path in tmp_path.rglob("*.npy")} == {
        "embedding",
        "block-0",
        "block-1",
        "logits",
    }


def half(_module: nn.Module, _args: object, output: Tensor) -> Tensor:
    return 0.5 * output


@pytest.mark.parametrize("way", ["intervene", "heads", "hook", "hook of the model", "forward"])
def test_features_of_a_changed_model_are_neither_stored_nor_taken_from_the_plain_one(tmp_path, way):
    model = ours()
    data = split()
    block = model.module.blocks[0]
    plain = extract(model, data)
    if way == "forward":
        forward = block.forward
        block.forward = lambda tokens: 0.5 * forward(tokens)
    changes = {"intervene": {"blocks.0": "zero"}, "heads": {"blocks.0.heads": "zero"}}.get(way, {})
    hooked = {"hook": block, "hook of the model": model}.get(way)
    handle = nullcontext() if hooked is None else hooked.register_forward_hook(half)
    with handle, vitlens.intervene(model, changes):
        changed = extract(model, data, cache=tmp_path)
        assert_same(changed, extract(model, data))
        assert len(changed.notes) == 1
    vars(block).pop("forward", None)
    assert_same(extract(model, data, cache=tmp_path), plain)
    assert not torch.allclose(changed.logits, plain.logits)


CHANGES = {"pool": {"pool": "mean"}, "norm": {"norm": False}, "precision": {"precision": "bf16"}}


@pytest.mark.parametrize("change", [*CHANGES, "weights", "heads", "data", "order"])
def test_whatever_changes_the_features_is_read_anew(tmp_path, change):
    model = ours()
    data = split()
    options = CHANGES.get(change, {})
    extract(model, data, cache=tmp_path)
    if change == "weights":
        with torch.no_grad():
            model.module.blocks[0].mlp.fc1.bias[0] += 1
    if change == "heads":  # of the same weights
        model = ours(heads=4)
        model.architecture = {"heads": 4}
    if change == "data":
        data = split(seed=1)
    if change == "order":
        data = data.pick(torch.tensor([1, 0, 2, 3, 4, 5, 6]))
    seen = runs_of(model)
    features = extract(model, data, cache=tmp_path, **options)
    assert sum(seen) == 7
    assert_same(features, extract(model, data, **options))
    extract(
        model,
        split_of(data.source.read(torch.arange(7)), classes=("c", "d")),
        cache=tmp_path,
        **options,
    )
    assert sum(seen) == 14  # names of classes change no feature


def test_files_are_known_by_their_content(tmp_path, pictures):
    model = vitlens.load("vit-digits")
    copies = tmp_path / "copies"
    copies.mkdir()
    for path in Path(pictures).glob("*.png"):
        (copies / f"copy-{path.name}").write_bytes(path.read_bytes())
    here = vitlens.load_data(str(pictures), preprocessing=model.preprocessing)
    there = vitlens.load_data(str(copies), preprocessing=model.preprocessing)
    extract(model, here, cache=tmp_path / "cache")
    seen = runs_of(model)
    extract(model, there, cache=tmp_path / "cache")
    assert seen == []
    extract(model, here.pick(torch.tensor([1, 0, 2])), cache=tmp_path / "cache")
    assert sum(seen) == 3


ABOUT = {"model": "a", "data": "b", "pool": "cls", "norm": True}


def written(root: Path, values: Tensor, name: str = "block-0", **about: object) -> Path:
    shelf = FeatureCache(root, {**ABOUT, **about})
    with shelf.writing(name, tuple(values.shape)) as file:
        for part in values.split(4):
            file.write(part.numpy().tobytes())
    return shelf.file(name)


@pytest.mark.parametrize("fault", ["empty", "cut", "first", "last", "about", "name", "version"])
def test_a_half_written_damaged_foreign_or_older_file_is_ignored(tmp_path, monkeypatch, fault):
    values = torch.randn(10, 6, generator=torch.Generator().manual_seed(0))
    file = written(tmp_path, values)
    shelf = FeatureCache(tmp_path, ABOUT)
    assert np.array_equal(np.load(file, mmap_mode="r"), values.numpy())  # numpy itself reads it
    assert torch.equal(shelf.recall(["block-0"])[0]["block-0"], values)
    content = bytearray(file.read_bytes())
    if fault in ("empty", "cut"):
        content = content[: 0 if fault == "empty" else 300]
    elif fault in ("first", "last"):
        content[20 if fault == "first" else -40] ^= 1
    elif fault == "version":
        monkeypatch.setattr(module, "VERSION", module.VERSION + 1)
    else:
        foreign = (
            written(tmp_path, values, model="c")
            if fault == "about"
            else written(tmp_path, values, "block-1")
        )
        content = foreign.read_bytes()
    file.write_bytes(content)
    recalled, (note,) = shelf.recall(["block-0"])
    assert (recalled, "block-0.npy" in note) == ({}, True)
    assert str(tmp_path) not in note  # what a report keeps names no place of this machine


def test_an_interrupted_run_leaves_nothing_that_could_be_taken_for_features(tmp_path):
    def stop(_images: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        extract(ours(), split(), cache=tmp_path, batch_size=2, advance=stop)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    (tmp_path / "cache").write_text("")
    with pytest.raises(InputError, match="found a file"):
        FeatureCache(tmp_path / "cache", ABOUT)


@pytest.mark.parametrize(("count", "cached"), [(2, True), (3, False)])
def test_several_processes_read_what_one_reads(tmp_path, monkeypatch, count, cached):
    # not in the threads: they share a generator
    data = split(7)
    models = [ours() for _ in range(count)]
    expected = extract(ours(), data, batch_size=2)

    def work(processes: Any) -> tuple[Features | None, list[int]]:
        model = models[processes.index]
        seen = runs_of(model)
        times = []
        for _ in range(2):
            cache = tmp_path / "cache" if cached else None
            features = extract(model, data, batch_size=2, cache=cache, processes=processes)
            times.append(sum(seen))
        return features, times

    (first, _), *rest = results = run_in_processes(count, work, monkeypatch)
    assert_same(first, expected, within=1e-5)
    assert [features for features, _ in rest] == [None] * (count - 1)
    shares = [len(range(index, 7, count)) for index in range(count)]
    passes = 1 if cached else 2
    assert [times for _, times in results] == [[share, passes * share] for share in shares]


def stream(model: Model, batch: Tensor) -> list[Tensor]:
    """Return the input of block 0 of our ViT and the output of each block."""
    with torch.no_grad():
        states = [model.module.tokens(model.prepare(batch))]
        for block in model.module.blocks:
            states.append(block(states[-1]))
    return states


@pytest.mark.parametrize("norm", [True, False])
def test_patch_tokens_lie_where_the_patches_lie_read_in_one_pass_before_a_block_overwrites_them(
    norm,
):
    model = ours(registers=2)
    batch = images(SIZE, batch=3)
    (rows, columns), (entering, first, _) = model.layout.grid, stream(model, batch)
    model.module.blocks[0].register_forward_hook(
        lambda _module, inputs, output: inputs[0].mul_(0).add_(output)
    )
    calls = runs_of(model)
    embedding, tokens = patch_tokens(model, batch, ["embedding", 0], norm=norm, batch_size=2)
    assert calls == [2, 1]
    assert tokens.shape == (3, rows, columns, 16)
    expected = model.module.norm(first) if norm else first
    torch.testing.assert_close(tokens[:, 1, 2], expected[:, 3 + columns + 2], atol=1e-6, rtol=1e-5)
    # whatever the norm
    torch.testing.assert_close(embedding.flatten(1, 2), entering[:, 3:], atol=1e-6, rtol=0)


@pytest.mark.parametrize("family", ["cnn", "windowed"])
def test_maps_of_a_cnn_and_of_windows_are_on_their_grid(family):
    model = (
        vitlens.load("cnn-digits")
        if family == "cnn"
        else timm_model("swin_tiny_patch4_window7_224")
    )
    outputs = list[Tensor]()
    batch = images()
    layer = model.module.get_submodule(vitlens.features(model, batch).layers[1].module)
    hook = layer.register_forward_hook(lambda _module, _inputs, maps: outputs.append(maps))
    (tokens,) = patch_tokens(model, batch, [1], norm=False)
    hook.remove()
    torch.testing.assert_close(
        tokens, outputs[-1].movedim(1, -1) if family == "cnn" else outputs[-1]
    )


class Shuffled(nn.Module):
    """Blocks of tokens whose place in the image is unknown."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(
            *(nn.TransformerEncoderLayer(3, 1, 8, batch_first=True) for _ in range(2))
        )
        self.head = nn.Linear(3, 5)

    def forward(self, batch: Tensor) -> Tensor:
        return self.head(self.blocks(batch.flatten(2).mT[:, :11]).mean(1))


@pytest.mark.parametrize("seed", range(4))
def test_tokens_without_a_place_are_refused(seed):
    """Three channels of eleven tokens lie in the order of a row of cells by chance, with some
    weights.
    """
    torch.manual_seed(seed)
    with pytest.raises(UnsupportedError):
        patch_tokens(model_of(Shuffled().eval()), images())
