import numpy as np
import pytest
from PIL import Image

from vitlens.data.catalogue import load_data, load_images
from vitlens.data.registry import SETS
from vitlens.errors import DataError, UnknownNameError
from vitlens.preprocessing import Preprocessing


@pytest.mark.parametrize("name", [name for name, known in SETS.items() if not known.download])
def test_the_registry_tells_the_truth_of_the_embedded_data(name):
    known, split = SETS[name], load_data(name, part="test")
    assert (known.name, known.classes, known.size) == (name, len(split.classes), split.size)
    assert (split.name, split.title) == (name, known.title)


def test_digits_take_a_canvas_and_a_number_of_scenes():
    split = load_data("digits", part="test", canvas=48, scenes=2)
    assert split.size == (48, 48)
    assert len(split) == 900


def test_a_folder_and_an_npz_are_found_by_their_path(tmp_path):
    (tmp_path / "cat").mkdir()
    Image.new("RGB", (9, 9)).save(tmp_path / "cat/a.png")
    np.savez(tmp_path / "a.npz", images=np.zeros((4, 5, 5), np.uint8), labels=np.array([0, 0, 1, 1]))
    assert load_data(str(tmp_path), part="test", preprocessing=Preprocessing((3, 3))).size == (3, 3)
    assert load_data(str(tmp_path / "a.npz"), part="test").size == (5, 5)
    assert len(load_data(str(tmp_path / "a.npz"), part="test", whole=True)) == 4


def test_an_unknown_name_says_the_nearest():
    with pytest.raises(UnknownNameError, match="no data 'digit'; did you mean 'digits'"):
        load_data("digit", part="test")


@pytest.mark.parametrize("name", ["./nothing", "a/b", "/nowhere", "nothing.npz"])
def test_a_path_that_is_not_there_says_so(name):
    with pytest.raises(DataError, match="found nothing at"):
        load_data(name, part="test")


def test_a_single_image_is_no_data_set(tmp_path):
    Image.new("RGB", (9, 9)).save(tmp_path / "a.png")
    with pytest.raises(DataError, match="try --images"):
        load_data(str(tmp_path / "a.png"), part="test")


def test_a_canvas_is_for_digits_alone(tmp_path):
    with pytest.raises(DataError, match="expected --data digits"):
        load_data(str(tmp_path), part="test", canvas=64)


def test_images_by_path(tmp_path):
    Image.new("RGB", (9, 9), "red").save(tmp_path / "a.png")
    (tmp_path / "b.png").write_text("no")
    split = load_images([tmp_path / "b.png", str(tmp_path / "a.png")], preprocessing=Preprocessing((4, 4)))
    assert split.files == (str(tmp_path / "a.png"),)
    assert split.labels is None
    assert split.skipped[0].file == str(tmp_path / "b.png")
