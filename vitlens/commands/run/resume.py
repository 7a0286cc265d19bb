"""Checks that a resumed run has the settings that it began with."""

from collections.abc import Mapping
from pathlib import Path

from vitlens.errors import InputError
from vitlens.files import read_run


def require_same(resume: Path | None, command: str, identity: Mapping[str, object]) -> None:
    """Raise InputError unless the run to resume is of this command and began with the same settings.

    resume: its folder; None resumes nothing.
    """
    if resume is None:
        return
    record = read_run(resume)
    begun = record.config.get("identity")
    if record.command != command or not isinstance(begun, Mapping):
        raise InputError(f"expected the folder of vitlens {command} to resume, found one of vitlens {record.command}")
    for name, value in identity.items():
        if begun.get(name) != value:
            then, now = (str(each)[:40] for each in (begun.get(name), value))
            raise InputError(
                f"expected to resume {resume} with its {name} ({then}), found another ({now}); give what it began "
                "with, or begin anew without --resume"
            )
