"""An .npz of images and labels, or of MedMNIST's parts; nothing in it is ever unpickled."""

import pickle

import numpy as np
import pytest
import torch

from tests.kit.datasets import pixels_of
from vitlens import load_data
from vitlens.errors import DataError, UnknownNameError

GREY = np.arange(10 * 4 * 6, dtype=np.uint8).reshape(10, 4, 6)
LABELS = np.arange(10) % 2
PLAIN = {"images": GREY, "labels": LABELS}
PARTS = (("test", True), ("train", False), ("test", False))  # and whether all images are taken


def medmnist(**changes):
    """Return MedMNIST's layout: parts by name, labels (n, 1)."""
    counts = {"train": 6, "val": 2, "test": 4}
    arrays = {f"{part}_images": GREY[:n] + index for index, (part, n) in enumerate(counts.items())}
    arrays |= {
        f"{part}_labels": (np.arange(n) % 2)[:, None].astype(np.uint8) for part, n in counts.items()
    }
    arrays["train_labels"][0] = 2  # a class only of the training part
    return {key: value for key, value in (arrays | changes).items() if value is not None}


def load(folder, arrays, **options):
    np.savez(folder / "a.npz", **arrays)
    return load_data(str(folder / "a.npz"), **options)


def test_grey_and_colour_images_with_and_without_names_whole_or_in_parts(tmp_path):
    grey, train, test = (
        load(tmp_path, PLAIN, part=part, whole=is_whole) for part, is_whole in PARTS
    )
    assert (grey.size, grey.classes, grey.title) == ((4, 6), ("0", "1"), "a")
    assert torch.equal(pixels_of(grey)[:, 2], torch.from_numpy(GREY))
    assert (len(train), sorted(test.labels.tolist()), "seed 0" in test.notes[0]) == (
        8,
        [0, 1],
        True,
    )
    pixels = torch.cat([pixels_of(split)[:, 0, 0, 0] for split in (train, test)])
    assert {*pixels.tolist()} == {*GREY[:, 0, 0].tolist()}
    assert torch.equal(pixels // 24 % 2, torch.cat([train.labels, test.labels]))
    colour = np.stack([GREY, GREY // 2, GREY // 3], axis=-1)
    split = load(
        tmp_path, PLAIN | {"images": colour, "classes": np.array(["odd", "even"])}, whole=True
    )
    assert split.classes == ("odd", "even")
    assert torch.equal(pixels_of(split)[3, 1], torch.from_numpy(GREY[3] // 2))


def test_the_parts_of_medmnist_are_those_of_the_file(tmp_path):
    train, test, complete = (
        load(tmp_path, medmnist(), part=part, whole=is_whole)
        for part, is_whole in (*PARTS[1:], PARTS[0])
    )
    # it has parts, so it is never divided
    assert (len(train), len(test), len(complete)) == (
        6,
        4,
        4,
    )
    assert train.classes == test.classes == ("0", "1", "2")
    assert test.labels.tolist() == [0, 1, 0, 1]
    assert torch.equal(pixels_of(test)[:, 0], torch.from_numpy(GREY[:4] + 2))
    assert "val part is not used" in train.notes[0]
    # without a test part val is used
    val = load(tmp_path, medmnist(test_images=None, test_labels=None))
    assert (len(val), "not used" in val.notes[0]) == (2, False)
    # images without a part: not MedMNIST's
    assert len(load(tmp_path, PLAIN | {"test_images": GREY}, whole=True)) == 10


@pytest.mark.parametrize("name", ["bloodmnist", "medmnist:bloodmnist"])
def test_a_set_is_read_by_name_from_the_data_folder(tmp_path, name):
    with pytest.raises(DataError, match=r"download it from https://medmnist\.com"):
        load_data(name, data_dir=tmp_path)
    np.savez(tmp_path / "bloodmnist.npz", **medmnist())
    assert len(load_data(name, part="train", data_dir=tmp_path)) == 6
    with pytest.raises(UnknownNameError, match="did you mean 'bloodmnist'"):
        load_data("medmnist:bloodmist", data_dir=tmp_path)


class Trap:
    """What a hostile pickle does when it is loaded."""

    def __reduce__(self):
        return (pytest.fail, ("a pickle was run",))


EIGHT = {"images": np.zeros((2, 8, 8), np.uint8), "labels": np.array([0, 1])}
ODD = (
    np.array(1.0),
    np.zeros(0),
    np.zeros((2, 8, 8), complex),
    np.array(["a", "b"]),
    np.full((2, 8, 8), np.nan),
    np.zeros((1,) * 6, np.uint8),
    np.zeros((0, 8, 8), np.uint8),
    np.array([True, False]),
    np.zeros(2, "M8[s]"),
)
REFUSED = [
    *(PLAIN | {key: np.array([Trap()], dtype=object)} for key in (*PLAIN, "classes")),
    {"images": GREY},
    {"labels": LABELS},
    {"images": GREY[:0], "labels": LABELS[:0]},
    *(PLAIN | {"images": images} for images in (GREY / 255, GREY[0], GREY[..., None])),
    *(
        PLAIN | {"labels": labels}
        for labels in (LABELS[:3], LABELS / 2, LABELS[:, None], LABELS - 1)
    ),
    *(PLAIN | {"labels": LABELS * most} for most in (100_000, 2**33, 10**12)),
    PLAIN | {"labels": np.full(10, 2**63 + 5, np.uint64)},  # does not wrap
    PLAIN | {"classes": np.array(["one"])},
    medmnist(test_images=None, test_labels=None, val_images=None),
    medmnist(test_labels=None),
    medmnist(test_labels=np.zeros((4, 14), np.uint8)),  # ChestMNIST: several labels each
    medmnist(test_images=np.zeros((4, 28, 28, 28), np.uint8)),  # a volume
    medmnist(test_labels=np.zeros((3, 1), np.uint8)),
    *(EIGHT | {key: odd} for key in EIGHT for odd in ODD),
]


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_what_does_not_fit_is_refused_in_one_line(tmp_path, number):
    with pytest.raises(DataError) as caught:
        load(tmp_path, REFUSED[number])
    assert "\n" not in str(caught.value)


def test_a_file_that_is_no_npz_is_refused_and_not_run(tmp_path):
    path = tmp_path / "a.npz"
    np.savez_compressed(path, **PLAIN)
    content = path.read_bytes()
    np.save(tmp_path / "a.npy", GREY)
    cut = [bytearray(content) for _ in range(2)]
    for place, damaged in zip((100, len(content) - 250), cut):
        damaged[place : place + 20] = bytes(20)
    for text in (pickle.dumps(Trap()), (tmp_path / "a.npy").read_bytes(), *cut):
        path.write_bytes(text)
        with pytest.raises(DataError):
            load_data(str(path))
