"""The table of what was measured, as markdown."""

from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu.machine import Machine
from benchmarks.gpu.registry import PARTS, Part
from benchmarks.gpu.rows import Row, Value
from vitlens.files import write_text

TINY = (
    "**Small models and sizes: this shows that the script runs, and where. No time here is one "
    "of a GPU's work, and none is to be compared with anything.**"
)


def write_table(
    path: Path, rows: Sequence[Row], machine: Machine, *, tiny: bool, command: str
) -> None:
    """Write the page of one machine's rows; tiny: it says first that its times mean nothing."""
    title = "# The script for a GPU, tried with small models" if tiny else "# Measured on a GPU"
    peak = (
        "not known" if machine.peak is None else f"{machine.peak / 1e12:,.0f} TFLOP/s (data sheet)"
    )
    lines = [title, "", *((TINY, "") if tiny else ())]
    lines += [f"`{command}` on {machine.device}; {machine.versions}; peak in bf16, dense: {peak}."]
    lines += [
        "Times are medians of repeats after a warm-up, by CUDA's events; one line of JSON a case.",
        "",
    ]
    for part in PARTS.values():
        lines += _part(part, [row for row in rows if row.part == part.name])
    write_text(path, "\n".join(lines).rstrip() + "\n")


def _part(part: Part, rows: Sequence[Row]) -> list[str]:
    lines = [f"## {part.title}", ""]
    checks, cases = ([row for row in rows if row.kind == kind] for kind in ("check", "case"))
    for row in checks:
        difference = row.values["difference"]
        tolerance = row.values["tolerance"]
        found = (
            f"{row.values['result']}, {_cell(difference)} of the largest value (at most "
            f"{_cell(tolerance)})"
        )
        lines.append(f"- {row.case}, against the CPU in fp32: {found}")
    if checks:
        lines.append("")
    if not cases:
        return [*lines, "Not measured.", ""]
    names = list(
        dict.fromkeys(
            name for row in cases for name, value in row.values.items() if value is not None
        )
    )
    lines.append("| " + " | ".join(("case", *names)) + " |")
    lines.append("|---" * (1 + len(names)) + "|")
    for row in cases:
        lines.append(
            "| " + " | ".join((row.case, *(_cell(row.values.get(name)) for name in names))) + " |"
        )
    return [*lines, ""]


def _cell(value: Value) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else value.replace("|", "/")
