"""A distributed run in one process: a thread for each process, which exchange tensors."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import distributed

from tests.kit.select import values_of
from tests.kit.waiting import HANGS
from vitlens.commands.run import run as of_runs
from vitlens.processes import Processes


def run_in_processes(
    count: int, function: Callable[[Processes], Any], monkeypatch: pytest.MonkeyPatch
) -> list[Any]:
    """Run function(processes) in each of count processes; return the results or exceptions.

    Runs inside use that process.
    """
    rounds: dict[int, dict[int, torch.Tensor]] = {}
    ended: set[int] = set()
    news = threading.Condition()
    here = threading.local()

    def exchange(values: torch.Tensor) -> list[torch.Tensor]:
        here.round += 1
        with news:
            sent = rounds.setdefault(here.round, {})
            sent[here.processes.index] = values.clone()
            news.notify_all()
            assert news.wait_for(lambda: len(sent) == count or ended - sent.keys(), timeout=HANGS)
            if len(sent) < count:
                raise RuntimeError("Connection closed by peer")  # as gloo raises it
            return [sent[index] for index in range(count)]

    def all_reduce(values: torch.Tensor) -> None:
        values.copy_(torch.stack(exchange(values)).sum(0))

    def all_gather(parts: list[torch.Tensor], values: torch.Tensor) -> None:
        gathered = exchange(values)
        assert values_of(parts, "shape") == [other.shape for other in gathered]
        for part, other in zip(parts, gathered, strict=True):
            part.copy_(other)

    def alone(index: int) -> Any:
        here.processes = Processes(index, count, torch.device("cpu"))
        here.round = 0
        try:
            return function(here.processes)
        except BaseException as error:
            return error
        finally:
            with news:
                ended.add(index)
                news.notify_all()

    monkeypatch.setattr(distributed, "all_reduce", all_reduce)
    monkeypatch.setattr(distributed, "all_gather", all_gather)
    monkeypatch.setattr(of_runs, "join", lambda _: here.processes)
    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(alone, range(count)))
