"""2,000 command lines, most of them wrong: a right code, one line, nothing outside the folder."""

import pytest

from tests.fuzz.box import Box, require_sound, seeds
from tests.fuzz.lines import Lines
from tests.kit.select import values_of

A_TEST = 100  # lines
pytestmark = pytest.mark.slow


@pytest.mark.parametrize("seed", seeds(20))
def test_a_hundred_lines_in_one_process(box: Box, seed: int) -> None:
    lines = Lines(box)
    outcomes = [box.run(lines.draw(seed * A_TEST + index)) for index in range(A_TEST)]
    require_sound(outcomes, box)
    assert set(values_of(outcomes, "code")) >= {0, 2}  # else the lines try nothing
