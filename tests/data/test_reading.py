import numpy as np
import pytest
import torch
from PIL import Image

from vitlens.data.decode import Files, load_files
from vitlens.data.split import InMemory
from vitlens.errors import DataError
from vitlens.preprocessing import Preprocessing

SMALL = Preprocessing(size=(8, 8))


@pytest.fixture
def files(tmp_path):
    """200 images of their own colour, of which number 3 is a text and number 150 is cut off."""
    noise = np.random.default_rng(0).integers(0, 9, (40, 40, 3), dtype=np.uint8)
    paths = [tmp_path / f"{index:03}.png" for index in range(200)]
    for index, path in enumerate(paths):
        Image.fromarray(noise + np.uint8(index)).save(path)
    paths[3].write_text("no image")
    paths[150].write_bytes(paths[150].read_bytes()[:-400])
    return paths


def load_later(files):
    """As where they do not fit in memory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vitlens.data.decode.MEMORY_LIMIT", 0)
        return load_files(files, SMALL)


@pytest.mark.parametrize("memory", [0, 1 << 30])
def test_the_readable_ones_are_kept_in_order_and_the_others_named(files, memory, monkeypatch):
    monkeypatch.setattr("vitlens.data.decode.MEMORY_LIMIT", memory)
    loaded = load_files(files, SMALL)
    readable = [index for index in range(200) if index not in (3, 150)]
    assert loaded.files == tuple(str(files[index]) for index in readable)
    assert [skipped.file for skipped in loaded.skipped] == [str(files[3]), str(files[150])]
    assert all(skipped.reason for skipped in loaded.skipped)
    brightness = loaded.source.read(torch.arange(198)).float().mean((1, 2, 3))
    assert torch.allclose(brightness, torch.tensor(readable) + 4.0, atol=1.0)


def test_kept_in_memory_or_read_from_disk_the_pixels_are_equal(files):
    now, later = load_files(files, SMALL), load_later(files)
    assert isinstance(now.source, InMemory)
    assert isinstance(later.source, Files)
    indices = torch.tensor([100, 0, 7])
    assert torch.equal(now.source.read(indices), later.source.read(indices))


@torch.inference_mode()
def test_files_are_read_from_disk_while_a_model_answers(files):
    now, later = load_files(files, SMALL), load_later(files)
    every = torch.arange(len(later))
    assert torch.equal(now.source.read(every), later.source.read(every))


def test_a_file_that_is_damaged_later_is_an_error_that_names_it(files):
    later = load_later(files)
    files[0].write_text("gone")
    with pytest.raises(DataError, match=r"cannot read .*000\.png: expected an image"):
        later.source.read(torch.tensor([0]))


class Items(torch.utils.data.Dataset):
    def __init__(self, source):
        self.source = source

    def __len__(self):
        return len(self.source)

    def __getitem__(self, index):
        return self.source.read(torch.tensor([index]))[0]


def test_it_reads_in_the_workers_of_a_data_loader(files):
    later = load_later(files[:3]).source
    (batch,) = torch.utils.data.DataLoader(Items(later), batch_size=3, num_workers=1)
    assert torch.equal(batch, later.read(torch.arange(3)))


def test_animations_are_counted(tmp_path):
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    frames[0].save(tmp_path / "a.gif", save_all=True, append_images=frames[1:])
    frames[0].save(tmp_path / "b.gif")
    notes = load_files([tmp_path / "a.gif", tmp_path / "b.gif"], SMALL).notes
    assert notes == ("1 of 2 images have more than one frame, of which the first is used",)


def test_none_readable_is_an_error_with_the_first_reason(tmp_path):
    (tmp_path / "a.jpg").write_text("no")
    with pytest.raises(DataError, match=r"none among 1: .*a\.jpg: expected an image"):
        load_files([tmp_path / "a.jpg"], SMALL)


def test_progress_ends_at_the_number_of_files(files):
    heard = []
    load_files(files, SMALL, progress=lambda done, total: heard.append((done, total)))
    assert heard[-1] == (200, 200)
    assert [done for done, _ in heard] == sorted(done for done, _ in heard)
