"""Runs that can be stopped and resumed: their folder, their partial results, and what must be
equal, by digests.
"""

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from vitlens.commands.run.options import DECIDING
from vitlens.commands.run.progress import PROGRESS, ProgressStore
from vitlens.commands.run.run import Run, Writing
from vitlens.devices import evaluating
from vitlens.errors import InputError
from vitlens.lens.trace import probe_images
from vitlens.models.model import Model
from vitlens.models.saved import model_fingerprint
from vitlens.record import CONFIG, read_run
from vitlens.typed import read_as

_DECIMALS: Final = 3  # of logits, which another order of summation changes in the seventh digit


def batch_digest(images: Tensor, labels: Tensor) -> str:
    """Return the SHA-256 of a batch's pixels and labels."""
    digest = hashlib.sha256((images.cpu() * 255).round().byte().numpy().tobytes())
    digest.update(labels.cpu().numpy().tobytes())
    return digest.hexdigest()


def model_digest(model: Model) -> str:
    """Return the SHA-256 of a model's weights and architecture."""
    digest = hashlib.sha256(json.dumps(model.architecture, sort_keys=True, default=str).encode())
    for name, value in model.state_dict().items():
        digest.update(name.encode())
        digest.update(
            value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        )
    return digest.hexdigest()


def content_digest(model: Model) -> str:
    """Return a SHA-256 of all that decides a model's answers and their names.

    These are its weights, modules, preprocessing and classes. The code of a --model-file may read
    further files, so its answers to an image of noise are part of it, too.
    """
    answers = ""
    if model.architecture["kind"] == "code":
        with evaluating(model), torch.no_grad():
            logits = model(probe_images(model, 1)).double().round(decimals=_DECIMALS)
        answers = repr(logits.tolist())
    facts = (model_fingerprint(model), model.classes, answers)
    return hashlib.sha256(repr(facts).encode()).hexdigest()


@contextmanager
def resumable(
    run: Run[Any], title: str, resume: Path | None, **settings: object
) -> Iterator[tuple[Writing, ProgressStore]]:
    """Yield the folder of a run, and the store of its partial results, which is emptied once the
    run is done.

    resume: the folder of a stopped run, in which this one goes on.
    settings: what must be as it was, in addition to models, number of images and run options.

    The images themselves are compared part by part.

    Raises InputError, before anything is written, for the folder of another command or of a run
    with other settings.
    """
    identity = {
        "models": [model_digest(model) for model in run.models],
        "aliases": list(run.aliases),
        "images": len(run.split),
        **settings,
        "seed": run.run.seed,
        "batch_size": run.run.batch_size,
        "precision": run.run.precision,
        "processes": run.processes.count,
    }
    if resume is not None:
        _require_same(resume, _begun_run(resume, run.command), identity)
    with ExitStack() as stack:
        with run.processes.main_process_first():
            writing = stack.enter_context(run.folder(title, resume=resume, identity=identity))
        place = resume or run.run.out if writing.folder is None else writing.folder.path
        store = ProgressStore(None if place is None else place / PROGRESS, run.processes.index)
        yield writing, store
        if writing.folder is not None:
            store.forget()


def _begun_run(resume: Path, command: str) -> Mapping[str, Any]:
    """Return the config.json of a stopped run.

    Raises InputError for the folder of another command.
    """
    record = read_run(resume)
    if record.command != command:
        raise InputError(
            f"expected the folder of vitlens {command} to resume, found one of vitlens "
            f"{record.command}"
        )
    return record.config


def _require_same(resume: Path, config: Mapping[str, Any], identity: Mapping[str, object]) -> None:
    saved = config.get("identity")
    begun = saved if isinstance(saved, Mapping) else {}
    for name, value in identity.items():
        begun_value = begun.get(name)
        if begun_value != value:
            then = str(begun_value)[:40]
            now = str(value)[:40]
            raise InputError(
                f"expected to resume {resume} with its {name} ({then}), found another ({now}); "
                "give what it began with, or begin anew without --resume"
            )


def with_its_settings(options: Any, command: str) -> Any:
    """Return the options of a run; of one that is resumed without its MODEL being typed, those that
    it began with.

    Where the MODEL is typed, the other options hold as they are typed, too.
    """
    names = {options.model} if hasattr(options, "model") else {*options.models}
    if options.resume is None or names - {"", *options.model_options.model_file}:
        return options
    return resumed(options, options.resume, command, typed=("model_file",))


def resumed(options: Any, resume: Path, command: str, *, typed: Collection[str] = ()) -> Any:
    """Return the options that a stopped run began with, so that it can go on in its folder.

    typed: those that hold as they are typed now, as do the run options that change no result.
    Raises InputError for the folder of another command, and for any other option that is typed with
    another value than the run began with.
    """
    if options.run.out is not None:
        raise InputError(
            f"expected --resume {resume} or --out {options.run.out}, found both; a resumed run "
            "keeps its folder"
        )
    saved_options = _begun_run(resume, command).get("options")
    source = f"the options in {resume / CONFIG}"
    begun = read_as(type(options), saved_options, source=source, hint="begin anew without --resume")
    run = replace(options.run, **{name: getattr(begun.run, name) for name in DECIDING})
    resumed_options = _begun(
        options, begun, ("run", "resume", *typed), f"expected to resume {resume} with its "
    )
    return replace(resumed_options, run=run, resume=resume)


def _begun(options: Any, begun: Any, typed: Collection[str], expected: str) -> Any:
    """Return the options that a run began with, those in bundles, too, but for those that hold as
    they are typed now.
    """
    settings = {}
    for field in fields(options):
        value = getattr(options, field.name)
        before = getattr(begun, field.name)
        if field.name in typed:
            settings[field.name] = value
        elif is_dataclass(value):
            settings[field.name] = _begun(value, before, typed, f"{expected}{field.name}.")
        elif value not in (field.default, before):
            raise InputError(f"{expected}{field.name}, {before}, found {value}; leave it out")
    return replace(begun, **settings)
