"""The box in which the fuzzer's runs take place; one process serves all in-process runs of a worker."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fuzz.box import Box, Driver
from tests.fuzz.inputs import make_inputs


@pytest.fixture(scope="session")
def driver() -> Iterator[Driver]:
    """The process that runs command lines."""
    one = Driver()
    yield one
    one.close()


@pytest.fixture
def box(tmp_path: Path, driver: Driver) -> Box:
    """A sealed box with valid inputs of every kind, and the report of a rollout in out/rolled."""
    made = Box(tmp_path, driver)
    make_inputs(made.inputs)
    rolled = made.run(["rollout", str(made.inputs / "vit"), "--limit", "2", "--out", "out/rolled", "--quiet"])
    assert rolled.code == 0, rolled.err
    made.seal()
    return made
