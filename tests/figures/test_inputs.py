import numpy as np
import pytest
import torch
from vitlens.figures.inputs import as_array, as_image, as_images, require_length

from vitlens.errors import InputError


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool])
def test_tensors_of_any_precision(dtype: torch.dtype):
    array = as_array(torch.ones(2, 3, dtype=dtype), name="maps", axes=("rows", "columns"))
    assert array.dtype == np.float64
    assert (array == 1).all()


def test_tensor_with_gradient():
    assert as_array(torch.ones(2, requires_grad=True), name="n", axes=("classes",)).shape == (2,)


def test_input_is_not_changed():
    given = np.full((3, 2, 2), 1.0005)
    as_image(given)
    assert (given == 1.0005).all()


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_not_finite(wrong: float):
    with pytest.raises(InputError, match=r"finite numbers in maps, found 1 of 4"):
        as_array([[0, 1], [wrong, 0]], name="maps", axes=("rows", "columns"))


@pytest.mark.parametrize("shape", [(2,), (2, 2, 2), (0, 2)])
def test_wrong_shape(shape: tuple[int, ...]):
    with pytest.raises(InputError, match=r"expected maps of shape \(rows, columns\)"):
        as_array(np.zeros(shape), name="maps", axes=("rows", "columns"))


def test_normalised_pixels_are_refused():
    with pytest.raises(InputError, match=r"in \[0, 1\], found -2 to 0; give them before"):
        as_images(np.linspace(-2, 0, 12).reshape(1, 3, 2, 2))


def test_channels_last_is_refused():
    with pytest.raises(InputError, match=r"\(batch, 3, height, width\), found \(1, 4, 4, 3\)"):
        as_images(np.zeros((1, 4, 4, 3)))


def test_lengths():
    require_length(2, 2, name="titles", of="the maps")
    with pytest.raises(InputError, match="expected 2 titles, one for each of the maps, found 3"):
        require_length(3, 2, name="titles", of="the maps")
