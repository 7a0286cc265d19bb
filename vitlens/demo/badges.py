"""The verdicts of `vitlens explain --verify` on the maps of the page's models, from report folders on this disk."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from vitlens.commands.explain.claims import judged_of
from vitlens.commands.run.publish import read_folder
from vitlens.errors import VitlensError
from vitlens.files import CONFIG, read_run
from vitlens.models.model import Model
from vitlens.report.document import State


@dataclass(frozen=True)
class Badge:
    """What is known of one method's maps of one model. images: that were checked."""

    state: State
    words: str
    images: int = 0


_UNCHECKED = Badge("not tested", "not checked; vitlens explain --verify on labelled images checks it")


@dataclass(frozen=True)
class Badges:
    """Verdicts by the sha256 of a model's weights and the method."""

    known: Mapping[tuple[str, str], Badge] = field(default_factory=dict)

    def of(self, model: Model, method: str) -> Badge:
        """The verdict on a method's maps of exactly these weights, or how to get one."""
        return self.known.get((model.provenance.sha256 or "", method), _UNCHECKED)


def found_badges(folder: Path, models: Sequence[Model]) -> Badges:
    """The verdicts in the report folders below a folder, on models with the same weights; the one on most images.

    Folders that cannot be read are passed over.
    """
    wanted = {model.provenance.sha256 for model in models} - {None}
    known: dict[tuple[str, str], Badge] = {}
    for config in sorted(folder.glob(f"*/{CONFIG}")) if folder.is_dir() and wanted else ():
        try:
            if read_run(config.parent).command != "explain":
                continue
            record = read_folder(config.parent)
        except VitlensError:
            continue
        of = f" of {record.config.data.title}" if record.config.data else ""
        hashes = {model.alias: model.sha256 for model in record.models if model.sha256 in wanted}
        for alias, judged in judged_of(record).items():
            for each in judged if alias in hashes else ():
                key, lacks = (hashes[alias] or "", each.method), each.lacks or "it passes every check"
                words = f"{each.state} on {record.images} images{of}: {lacks}"
                if record.images > known.get(key, _UNCHECKED).images:
                    known[key] = Badge(each.state, words, record.images)
    return Badges(known)
