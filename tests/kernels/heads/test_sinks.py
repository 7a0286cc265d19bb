"""Attention on sinks off the object, of a head whose patches are planted."""

import pytest

from tests.kit.planted_patterns import Bench, planted, scenes
from vitlens import statistics
from vitlens.analysis.heads.specialisation import specialise

GRID = (6, 5)


def test_sinks_off_the_object_are_those_of_the_planted_head():
    """A head that attends to the red patches, none of which lies on the object."""
    drawn, model = scenes(GRID, 16, 0), planted([Bench(GRID, 0).heads()["background"]], GRID)
    tables = [statistics(model, drawn.images, masks=masks) for masks in (drawn.masks, drawn.masks | True, None)]
    nothing = statistics(model, drawn.images, masks=drawn.masks & False)
    off, none, unknown, every = (specialise(table).sinks_off_object for table in (*tables, nothing))
    assert unknown is None
    assert none.value == pytest.approx(0, abs=1e-6)
    assert every.value == pytest.approx(float(nothing.sink_mass.mean()), abs=0.02)  # but for sinks in the prefix
    assert 0 <= off.value <= every.value + 1e-9
