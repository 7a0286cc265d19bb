"""`vitlens study --kind transfer`: a model adapted to other data in five ways, and what changed inside it."""

import os
from dataclasses import replace
from pathlib import Path

from vitlens.commands.run.describe import settings
from vitlens.commands.run.folder import RunFolder
from vitlens.commands.run.load import print_data
from vitlens.commands.run.options import begun_with
from vitlens.commands.run.publish import publish
from vitlens.commands.run.unseen import keep_training_images
from vitlens.commands.study.kinds import TRANSFER as KIND
from vitlens.commands.study.measure.transfer.features import similar, write_probes, write_similarity
from vitlens.commands.study.measure.transfer.inside import shown, write_attention
from vitlens.commands.study.measure.transfer.maps import write_maps
from vitlens.commands.study.measure.transfer.results import write_results
from vitlens.commands.study.measure.transfer.setup import TransferSetup, prepare
from vitlens.commands.study.measure.transfer.training import train_all
from vitlens.commands.study.options import StudyOptions
from vitlens.commands.study.record import TABLES
from vitlens.commands.study.transfer.record import TRANSFER, TransferRow
from vitlens.commands.study.transfer.regimes import FULL, REGIMES
from vitlens.errors import InputError
from vitlens.files import CONFIG, read_run
from vitlens.schema import read_as

__all__ = ["is_transfer", "measure_transfer"]

_HINT = "begin anew without --resume"


def is_transfer(options: StudyOptions) -> bool:
    """Whether the options ask for a transfer study, or name the folder of one to resume."""
    if options.resume is None or options.kind is not None:
        return options.kind == KIND
    record = read_run(options.resume)
    written = record.config.get("options")
    return record.command == "study" and isinstance(written, dict) and written.get("kind") == KIND


def measure_transfer(options: StudyOptions) -> Path:
    """Adapt a model to the data in every way and with every seed, and look inside; returns the report's path.

    Raises what `prepare` and training raise.
    """
    if int(os.environ.get("WORLD_SIZE") or 1) > 1:
        raise InputError("expected one process for a study, found several; start vitlens study without a launcher")
    resume = options.resume
    options = options if resume is None else _resumed(resume, options)
    setup = prepare(options)
    print_data(setup.train, setup.options)
    with _folder(options, setup, resume) as folder:
        keep_training_images(folder.path, setup.train, data=setup.data, start=setup.model)
        for table in TABLES:
            folder.write(table, [])
        folder.write(TRANSFER, [_design(setup)])
        write_results(folder, setup, train_all(setup, folder.path, resume=resume is not None))
        write_attention(folder, setup)
        write_similarity(folder, setup)
        write_probes(folder, setup)
        write_maps(folder, setup)
        return publish(folder)


def _resumed(resume: Path, options: StudyOptions) -> StudyOptions:
    """The options that a study began with. Raises InputError when those given name another study."""
    if options.run.out is not None:
        raise InputError(
            f"expected --resume {resume} or --out {options.run.out}, found both; a resumed study keeps its folder"
        )
    record, source = read_run(resume), str(resume / CONFIG)
    begun = read_as(StudyOptions, record.config.get("options"), source=source, hint=_HINT)
    if record.command != "study" or begun.kind != KIND:
        raise InputError(f"expected the folder of vitlens study --kind {KIND} to resume, found another run in {resume}")
    for name in ("models", "kind", "data", "epochs", "seeds"):
        value = getattr(options, name)
        if value not in (None, (), getattr(begun, name)):
            raise InputError(
                f"expected to resume {resume} with its {name}, {getattr(begun, name)}, found {value}; leave it out"
            )
    return replace(begun, run=begun_with(record.config, options.run, source, hint=_HINT))


def _folder(options: StudyOptions, setup: TransferSetup, resume: Path | None) -> RunFolder:
    """The study's folder: new, or that of --resume."""
    run = setup.options
    recipes = {regime.label: setup.recipe(regime).numbers() for regime in REGIMES}
    known = settings(replace(options, run=run), run, models=[setup.model], split=setup.test)
    config = {**known, "device": str(setup.device), "recipes": recipes}
    if resume is not None:
        return RunFolder.reopen(resume, needs=dict.fromkeys(("data", "recipes")), config=config)
    return RunFolder.create(
        "study",
        name_parts=(KIND, setup.model.alias, setup.data),
        title=f"Transfer of {setup.model.alias} to {setup.test.title or setup.test.name}",
        out=run.out,
        overwrite=run.overwrite,
        config=config,
        formats=run.formats,
    )


def _design(setup: TransferSetup) -> TransferRow:
    return TransferRow(
        model=setup.model.alias,
        pretrained=len(setup.model.classes),
        data=setup.test.title or setup.test.name,
        train_images=len(setup.train),
        test_images=len(setup.test),
        classes=len(setup.train.classes),
        seeds=len(setup.seeds),
        epochs=setup.recipe(FULL).epochs,
        blocks=len(setup.model.anatomy.blocks),
        last=setup.last,
        compared=len(shown(setup)),
        similar=len(similar(setup)),
    )
