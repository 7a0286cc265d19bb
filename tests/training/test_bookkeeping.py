import pytest

from vitlens.training import bookkeeping
from vitlens.training.bookkeeping import Clock


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, constant until it is set."""
    time = [100.0]
    monkeypatch.setattr(bookkeeping.time, "perf_counter", lambda: time[0])
    return time


def test_pauses_do_not_lower_the_rate(now: list[float]) -> None:
    clock = Clock(seconds=5.0)
    clock.begin_epoch()
    clock.count(100)
    now[0] += 4
    with clock.stopped():
        now[0] += 6
    assert clock.rate() == clock.epoch_rate() == 25.0
    assert clock.seconds() == 15.0
    clock.pause()
    now[0] += 10
    clock.begin_epoch()
    clock.count(20)
    now[0] += 1
    assert clock.epoch_rate() == 20.0
    assert clock.rate() == 24.0
