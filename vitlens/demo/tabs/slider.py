"""A slider whose numbers are checked by the view that takes them."""

import math
from typing import Any

import gradio


def open_slider(low: float, high: float, **settings: Any) -> Any:
    """A slider that gives any number that is typed, NaN for anything else.

    gradio's own refuses one out of range before a handler runs, and so every handler that reads the slider. (A class
    of our own is no way: gradio writes a file beside its module.)
    """
    slider = gradio.Slider(low, high, **settings)
    slider.preprocess = lambda payload: float(payload) if isinstance(payload, int | float) else math.nan
    return slider
