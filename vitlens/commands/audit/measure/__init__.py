"""An audit: the chapters of one model, the strongest attack that fits the budget, and the file for JUnit."""

from pathlib import Path

from vitlens.analysis.answers.classes import label_columns
from vitlens.commands.audit.measure.chapters import AuditChapters
from vitlens.commands.audit.options import AuditOptions
from vitlens.commands.audit.record import BUDGET, CANDIDATES, TABLES, UNTESTED
from vitlens.commands.registry import COMMANDS
from vitlens.commands.run.chapters.images import ChapterImages
from vitlens.commands.run.chapters.record import CHAPTERS
from vitlens.commands.run.chapters.running import metrics_of
from vitlens.commands.run.describe import settings
from vitlens.commands.run.folder import RunFolder
from vitlens.commands.run.load import load_models, load_split
from vitlens.commands.run.publish import publish, read_folder
from vitlens.commands.run.requirements import outcomes, requirements_of
from vitlens.errors import DataError, InputError, OutputError
from vitlens.files import write_bytes
from vitlens.models.naming import parse_models, require_rule
from vitlens.report.junit import junit

__all__ = ["measure"]


def measure(options: AuditOptions) -> Path:
    """Run all chapters, write the report and, if asked, the JUnit file; returns the report's path.

    Raises InputError (or one of its kind) before anything is written for images that cannot be audited.
    """
    run = options.run
    requirements = requirements_of(run.at_least, run.at_most)
    _require_writable(options.junit)
    require_rule((options.model,))
    (name,) = parse_models((options.model,))
    (model,) = load_models((name,), command="audit", model_options=options.model_options, options=run)
    split = load_split(model, options=run, data=options.data, images=options.images)
    if not len(split):
        raise DataError(f"expected images to audit {model.alias} on, found none in {split.name}; see vitlens data")
    predicted = options.predicted or split.labels is None
    if not predicted:
        label_columns(model.classes, split)  # classes that the model does not know are refused before any chapter
    data = None if options.images else options.data or "digits"
    images = ChapterImages(data, options.images, predicted)
    with RunFolder.create(
        "audit",
        name_parts=(model.alias, split.name),
        title=f"Audit of {model.alias} on {split.title or split.name}",
        out=run.out,
        overwrite=run.overwrite,
        config=settings(options, run, models=(model,), split=split),
        formats=run.formats,
    ) as folder:
        for table in TABLES:
            folder.write(table, [])
        chapters = AuditChapters(folder.path, name, model, split, images, options)
        chapters.analyse()
        budget, considered = chapters.attack(others=0.0)
        folder.write(BUDGET, [budget])
        folder.write(CANDIDATES, considered)
        folder.write(UNTESTED, chapters.untested)
        folder.write(CHAPTERS, chapters.done)
        for metric, estimate in metrics_of(folder.path, chapters.done):
            folder.metric(metric, estimate)
        path = publish(folder)
    if options.junit is not None:
        record = read_folder(folder.path, escaped=False)
        document, judged = COMMANDS["audit"].report(record), tuple(outcomes(requirements, record))
        write_bytes(options.junit, junit(document, judged, suite="vitlens audit", seconds=folder.seconds))
    return path


def _require_writable(file: Path | None) -> None:
    """Raise OutputError for a file in a folder that is not there, before anything is measured."""
    if file is None:
        return
    if not str(file).strip() or file.is_dir():
        raise InputError(f"expected a file for --junit, found {str(file)!r}; e.g. --junit audit.xml")
    if not file.parent.is_dir():
        raise OutputError(
            f"expected a folder that is there for --junit, found none at {file.parent}; make it, or choose another"
        )
