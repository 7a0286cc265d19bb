"""Completion of the shell; free of torch, so that it is instant."""

from pathlib import Path

from vitlens.commands.study.kinds import KINDS
from vitlens.commands.study.options import WHOLE
from vitlens.data.registry import SETS
from vitlens.models.sources.registry import SOURCES


def complete_model(incomplete: str) -> list[str]:
    """The names of each source of models, or its prefix, and the run folders below runs/."""
    sources = SOURCES.values()
    names = [name for source in sources for name in (*source.names, *([source.prefix] if source.prefix else []))]
    folders = sorted(str(file.parent) for source in sources if source.glob for file in Path().glob(source.glob))
    return [name for name in (*names, *folders) if name.startswith(incomplete)]


def complete_kind(incomplete: str) -> list[str]:
    """The kinds of study."""
    return [name for name in (WHOLE, *KINDS) if name.startswith(incomplete)]


def complete_data(incomplete: str) -> list[str]:
    """The named sets, and the folders and .npz files here."""
    here = sorted(str(path) for path in Path().glob(f"{incomplete}*") if path.is_dir() or path.suffix == ".npz")
    return [name for name in SETS if name.startswith(incomplete)] + here
