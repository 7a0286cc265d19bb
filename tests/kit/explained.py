"""`vitlens explain` as typed: its record."""

from pathlib import Path

from tests.kit.commands import ran
from vitlens.commands.explain.record import ExplainRecord

BRIEF = "--composites none --other-substrates none --no-stability --no-counterfactuals"


def explained(out: Path, line: str, *models: Path | str) -> ExplainRecord:
    record: ExplainRecord = ran(out, f"explain {' '.join(map(str, models))} {line}")
    return record
