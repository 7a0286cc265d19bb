"""The box in which the fuzzer's runs take place."""

import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fuzz.box import Box
from tests.fuzz.inputs import make_inputs

_MEMORY = 16 << 30  # bytes of addresses; torch takes about a third


@pytest.fixture(autouse=True)
def as_a_user_has_it(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Set up no hub, wide lines, and less memory than a damaged file may ask for."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("COLUMNS", "200")
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.fixture
def box(tmp_path: Path) -> Box:
    """Return a sealed box with valid inputs of all kinds and a rollout in out/rolled."""
    sandbox = Box(tmp_path / "box")
    make_inputs(sandbox.inputs)
    rolled = sandbox.run(
        ["rollout", str(sandbox.inputs / "vit"), "--limit", "2", "--out", "out/rolled", "--quiet"]
    )
    assert rolled.code == 0, rolled.err
    sandbox.seal()
    return sandbox
