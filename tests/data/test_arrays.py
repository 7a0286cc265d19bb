import numpy as np
import pytest
import torch

from tests.kit.damage import refused
from vitlens.cli.main import run
from vitlens.data.catalogue import load_data
from vitlens.errors import DataError

GREY = np.arange(10 * 4 * 6, dtype=np.uint8).reshape(10, 4, 6)
LABELS = np.arange(10) % 2


def test_grey_images_come_back_as_three_channels(tmp_path):
    np.savez(tmp_path / "a.npz", images=GREY, labels=LABELS)
    split = load_data(str(tmp_path / "a.npz"), part="test", whole=True)
    assert split.size == (4, 6)
    assert split.classes == ("0", "1")
    assert torch.equal(split.source.read(torch.arange(10))[:, 2], torch.from_numpy(GREY))


def test_colour_images_and_names(tmp_path):
    colour = np.stack([GREY, GREY // 2, GREY // 3], axis=-1)
    np.savez(tmp_path / "a.npz", images=colour, labels=LABELS, classes=np.array(["odd", "even"]))
    split = load_data(str(tmp_path / "a.npz"), part="test", whole=True)
    assert split.classes == ("odd", "even")
    assert torch.equal(split.source.read(torch.tensor([3]))[0, 1], torch.from_numpy(GREY[3] // 2))


def test_parts_are_disjoint_and_complete(tmp_path):
    np.savez(tmp_path / "a.npz", images=GREY, labels=LABELS)
    train, test = (load_data(str(tmp_path / "a.npz"), part=part) for part in ("train", "test"))
    assert (len(train), len(test)) == (8, 2)
    assert sorted(test.labels.tolist()) == [0, 1]
    assert "held out" in test.notes[0]
    seen = torch.cat([split.source.read(torch.arange(len(split)))[:, 0, 0, 0] for split in (train, test)])
    assert sorted(seen.tolist()) == sorted(GREY[:, 0, 0].tolist())


class Trap:
    """What a hostile pickle does when it is loaded."""

    def __reduce__(self):
        return (pytest.fail, ("a pickle was run",))


@pytest.mark.parametrize("key", ["images", "labels", "classes"])
def test_a_pickle_inside_is_refused_and_not_run(tmp_path, key):
    arrays = {"images": GREY, "labels": LABELS, key: np.array([Trap()], dtype=object)}
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(DataError, match="a pickle could run code"):
        load_data(str(tmp_path / "a.npz"), part="test")


def test_a_bare_pickle_called_npz_is_refused_and_not_run(tmp_path):
    import pickle

    (tmp_path / "a.npz").write_bytes(pickle.dumps(Trap()))
    with pytest.raises(DataError, match="not a zip file"):
        load_data(str(tmp_path / "a.npz"), part="test")


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"images": GREY}, "found no 'labels'"),
        ({"labels": LABELS}, "found no 'images'"),
        ({"images": GREY / 255, "labels": LABELS}, "type uint8 .* found float64"),
        ({"images": GREY[0], "labels": LABELS}, r"found \(4, 6\)"),
        ({"images": GREY[..., None], "labels": LABELS}, r"found \(10, 4, 6, 1\)"),
        ({"images": GREY[:0], "labels": LABELS[:0]}, r"found \(0, 4, 6\)"),
        ({"images": GREY, "labels": LABELS[:3]}, "found 3 and 10"),
        ({"images": GREY, "labels": LABELS / 2}, "integer type .* float64"),
        ({"images": GREY, "labels": LABELS[:, None]}, r"found \(10, 1\)"),
        ({"images": GREY, "labels": LABELS - 1}, "labels from 0 .* found -1"),
        ({"images": GREY, "labels": LABELS, "classes": np.array(["one"])}, "at least 2 names"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(tmp_path, arrays, message):
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(DataError, match=message) as caught:
        load_data(str(tmp_path / "a.npz"), part="test")
    assert "\n" not in str(caught.value)


def test_a_file_that_is_no_npz_is_refused(tmp_path):
    np.save(tmp_path / "b.npy", GREY)
    (tmp_path / "b.npy").rename(tmp_path / "b.npz")
    with pytest.raises(DataError, match=r"expected an \.npz"):
        load_data(str(tmp_path / "b.npz"), part="test")
    with pytest.raises(DataError, match="found nothing at"):
        load_data(str(tmp_path / "none.npz"), part="test")


@pytest.mark.parametrize("place", [100, -250])
def test_a_damaged_npz_is_refused(tmp_path, place):
    np.savez_compressed(tmp_path / "a.npz", images=GREY, labels=LABELS)
    content = bytearray((tmp_path / "a.npz").read_bytes())
    content[place : place + 20] = bytes(20)
    (tmp_path / "a.npz").write_bytes(content)
    with pytest.raises(DataError, match="expected"):
        load_data(str(tmp_path / "a.npz"), part="test")


@pytest.mark.parametrize("labels", [[0, 2**33], [0, 10**12], [0, -1], [0, 100_000]])
def test_labels_beyond_all_bounds_are_refused_before_classes_are_made(tmp_path, labels):
    np.savez(tmp_path / "a.npz", images=np.zeros((2, 8, 8), np.uint8), labels=np.array(labels))
    with pytest.raises(DataError, match="labels from 0"):
        load_data(str(tmp_path / "a.npz"), part="test")


def test_unsigned_labels_do_not_wrap(tmp_path):
    np.savez(tmp_path / "a.npz", images=np.zeros((1, 8, 8), np.uint8), labels=np.array([2**63 + 5], np.uint64))
    with pytest.raises(DataError, match="labels from 0"):
        load_data(str(tmp_path / "a.npz"), part="test")


GOOD = {"images": np.zeros((2, 8, 8), np.uint8), "labels": np.array([0, 1])}
ODD = {
    "a single number": np.array(1.0), "nothing": np.zeros(0), "complex": np.zeros((2, 8, 8), complex),
    "texts": np.array(["a", "b"]), "fractions": np.full((2, 8, 8), np.nan), "many axes": np.zeros((1,) * 6, np.uint8),
    "no rows": np.zeros((0, 8, 8), np.uint8), "truth": np.array([True, False]), "dates": np.zeros(2, "M8[s]"),
}  # fmt: skip


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("key", ["images", "labels"])
def test_arrays_of_another_kind_are_one_line(tmp_path, capsys, odd, key):
    np.savez(tmp_path / "a.npz", **{**GOOD, key: ODD[odd]})
    code = run(["predict", "vit-digits", "--data", str(tmp_path / "a.npz"), "--quiet"])
    assert refused(code, capsys.readouterr().err)
