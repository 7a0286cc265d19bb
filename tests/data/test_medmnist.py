import numpy as np
import pytest
import torch

from vitlens.data.catalogue import load_data
from vitlens.errors import DataError, UnknownNameError

GREY = np.arange(10 * 4 * 6, dtype=np.uint8).reshape(10, 4, 6)


def medmnist(path, **changes):
    """MedMNIST's layout: parts by name, labels (n, 1)."""
    counts = {"train": 6, "val": 2, "test": 4}
    arrays = {f"{part}_images": GREY[:n] + index for index, (part, n) in enumerate(counts.items())}
    arrays |= {f"{part}_labels": (np.arange(n) % 2)[:, None].astype(np.uint8) for part, n in counts.items()}
    arrays["train_labels"][0] = 2  # a class of the training part alone
    np.savez(path, **{key: value for key, value in (arrays | changes).items() if value is not None})
    return path


def test_the_parts_are_those_of_the_file(tmp_path):
    path = medmnist(tmp_path / "pathmnist.npz")
    train, test = (load_data(str(path), part=part) for part in ("train", "test"))
    assert (len(train), len(test)) == (6, 4)
    assert len(load_data(str(path), part="test", whole=True)) == 4  # has parts, so it is never divided
    assert train.classes == test.classes == ("0", "1", "2")
    assert test.labels.tolist() == [0, 1, 0, 1]
    assert torch.equal(test.source.read(torch.arange(4))[:, 0], torch.from_numpy(GREY[:4] + 2))
    assert "test part" in test.notes[0]
    assert "train part" in train.notes[0]


@pytest.mark.parametrize("name", ["bloodmnist", "medmnist:bloodmnist"])
def test_a_set_is_read_by_name_from_the_data_folder(tmp_path, name):
    with pytest.raises(DataError, match=r"expected bloodmnist\.npz of MedMNIST in .* found none; download it from"):
        load_data(name, data_dir=tmp_path)
    medmnist(tmp_path / "bloodmnist.npz")
    assert len(load_data(name, part="train", data_dir=tmp_path)) == 6


def test_an_unknown_set_is_refused_with_the_nearest_name(tmp_path):
    with pytest.raises(UnknownNameError, match="no MedMNIST set 'bloodmist'; did you mean 'bloodmnist'"):
        load_data("medmnist:bloodmist", data_dir=tmp_path)


def test_without_a_test_part_val_is_used(tmp_path):
    path = medmnist(tmp_path / "a.npz", test_images=None, test_labels=None)
    assert len(load_data(str(path), part="test")) == 2


@pytest.mark.parametrize(
    ("changes", "part", "says"),
    [
        ({"test_images": None, "test_labels": None, "val_images": None}, "test", "test_images"),
        ({"train_images": None}, "train", "train_images"),
        ({"test_labels": None}, "test", "test_labels"),
        ({"test_labels": np.zeros((4, 14), np.uint8)}, "test", "labels of shape"),  # ChestMNIST: several labels each
        ({"test_images": np.zeros((4, 28, 28, 28), np.uint8)}, "test", "images of shape"),  # a volume
        ({"test_labels": np.zeros((3, 1), np.uint8)}, "test", "found 3 and 4"),
    ],
)
def test_missing_parts_and_other_shapes_are_refused(tmp_path, changes, part, says):
    with pytest.raises(DataError, match=says):
        load_data(str(medmnist(tmp_path / "a.npz", **changes)), part=part)


def test_a_file_with_images_without_a_part_is_another_layout(tmp_path):
    np.savez(tmp_path / "a.npz", images=GREY, labels=np.arange(10) % 2, test_images=GREY)
    assert len(load_data(str(tmp_path / "a.npz"), whole=True)) == 10
