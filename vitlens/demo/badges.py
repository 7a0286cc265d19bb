"""The verdicts of `vitlens explain --verify` on the maps of the page's models, from report folders on this disk."""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vitlens.commands.run.publish import read_folder
from vitlens.commands.shared.maps.record import judged_maps
from vitlens.errors import VitlensError
from vitlens.files import CONFIG
from vitlens.models.model import Model
from vitlens.report.document import State


@dataclass(frozen=True)
class Badge:
    """What is known of one method's maps of one model."""

    state: State
    words: str


@dataclass(frozen=True)
class Badges:
    """Verdicts by the sha256 of a model's weights and the method."""

    known: Mapping[tuple[str, str], Badge] = field(default_factory=dict)

    def of(self, model: Model, method: str) -> Badge:
        """The verdict on a method's maps of exactly these weights, or how to get one."""
        found = self.known.get((model.provenance.sha256 or "", method))
        return found or Badge("not tested", "not checked; vitlens explain --verify on labelled images checks it")


def found_badges(folder: Path, models: Sequence[Model]) -> Badges:
    """The verdicts in the report folders below a folder, on models with the same weights; the one on most images.

    Folders that cannot be read are passed over.
    """
    wanted = {model.provenance.sha256 for model in models} - {None}
    known: dict[tuple[str, str], tuple[int, Badge]] = {}
    for config in sorted(folder.glob(f"*/{CONFIG}")) if folder.is_dir() and wanted else ():
        if not _is_league(config):
            continue
        try:
            record = read_folder(config.parent)
            of_record = _of_record(record, wanted)
        except VitlensError:
            continue
        for key, (images, badge) in of_record.items():
            if images > known.get(key, (0, badge))[0]:
                known[key] = images, badge
    return Badges({key: badge for key, (_, badge) in known.items()})


def _is_league(config: Path) -> bool:
    """Whether a config.json is one of vitlens explain --verify."""
    try:
        content = json.loads(config.read_text(encoding="utf-8"))
        return bool(content["command"] == "explain" and content["options"]["verify"])
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _of_record(record: Any, wanted: Collection[str | None]) -> dict[tuple[str, str], tuple[int, Badge]]:
    data = record.config.data
    title = "" if data is None else f" of {data.title}"
    found = {}
    for model in record.models:
        if model.sha256 is None or model.sha256 not in wanted:
            continue
        for each in judged_maps([row for row in record.checks if row.model == model.alias]):
            words = f"{each.state} on {record.images} images{title}: {each.lacks or 'it passes every check'}"
            found[model.sha256, each.method] = record.images, Badge(each.state, words)
    return found
