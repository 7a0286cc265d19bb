"""Runs that can be stopped and resumed.

A resumed run takes its options from its folder (`with_its_settings`, `resumed`). `resumable` then
opens the folder and its partial results, and refuses a run with other models or settings, which it
compares by digests.
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
_MOST_CHARACTERS: Final = 40  # of a value in an error message


def batch_digest(images: Tensor, labels: Tensor) -> str:
    """Return the SHA-256 of a batch's pixels and labels."""
    digest = hashlib.sha256((images.cpu() * 255).round().byte().numpy().tobytes())
    digest.update(labels.cpu().numpy().tobytes())
    return digest.hexdigest()


def model_digest(model: Model) -> str:
    """Return the SHA-256 of a model's weights and architecture."""
    architecture = json.dumps(model.architecture, sort_keys=True, default=str)
    digest = hashlib.sha256(architecture.encode())
    for name, value in model.state_dict().items():
        digest.update(name.encode())
        # as bytes, because numpy has no bfloat16
        value_bytes = value.detach().cpu().contiguous().view(-1).view(torch.uint8)
        digest.update(value_bytes.numpy().tobytes())
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
    """Yield the folder of a run, and the store of its partial results.

    The store is emptied once the run is done.

    title: the beginning of the report's title.
    resume: the folder of a stopped run, which this one continues; None for a new one.
    settings: further settings that must not differ from those of the stopped run. Models, number of
        images and run options are always compared; the images when their results are recalled.

    Raises InputError, before anything is written, for the folder of another command or of a run
    with other settings.
    """
    identity = {
        "models": [model_digest(model) for model in run.models],
        "aliases": list(run.aliases),
        "images": len(run.split),
        **settings,
        "seed": run.run_options.seed,
        "batch_size": run.run_options.batch_size,
        "precision": run.run_options.precision,
        "processes": run.processes.count,
    }
    if resume is not None:
        _require_same(resume, _begun_run(resume, run.command), identity)
    with ExitStack() as stack:
        with run.processes.main_process_first():
            writing = stack.enter_context(run.folder(title, resume=resume, identity=identity))
        if writing.folder is not None:
            place: Path | None = writing.folder.path
        else:  # another process than the first, which must find the same place
            place = resume or run.run_options.out
        store_folder = None if place is None else place / PROGRESS
        store = ProgressStore(store_folder, process=run.processes.index)
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
    """Raise InputError where the stopped run has another identity in its config.json."""
    saved = config.get("identity")
    saved_identity = saved if isinstance(saved, Mapping) else {}
    for name, value in identity.items():
        saved_value = saved_identity.get(name)
        if saved_value != value:
            saved_words = str(saved_value)[:_MOST_CHARACTERS]
            words = str(value)[:_MOST_CHARACTERS]
            raise InputError(
                f"expected to resume {resume} with its {name} ({saved_words}), found "
                f"another ({words}); give the one it began with, or start again without "
                "--resume"
            )


def with_its_settings(options: Any, command: str) -> Any:
    """Return the options of a run, which may be resumed.

    If it is resumed and no MODEL is typed, these are the options that it began with. If a MODEL is
    typed, all options hold as they are typed.
    """
    names = {options.model} if hasattr(options, "model") else {*options.models}
    # without MODEL, its name is "", or the value of --model-file; a name that is left was typed
    typed_models = names - {"", *options.model_options.model_file}
    if options.resume is None or typed_models:
        return options
    return resumed(options, options.resume, command, typed=("model_file",))


def resumed(options: Any, resume: Path, command: str, *, typed: Collection[str] = ()) -> Any:
    """Return the options that a stopped run began with, so that it can be continued in its folder.

    options: those that are typed now.
    typed: names of options that hold as they are typed now, as do the run options that change no
        result.

    Raises InputError for the folder of another command, and for any other option with another value
    than the run began with. An option with its default counts as not typed.
    """
    if options.run.out is not None:
        raise InputError(
            f"expected --resume {resume} or --out {options.run.out}, found both; a resumed run "
            "keeps its folder"
        )
    saved_options = _begun_run(resume, command).get("options")
    source = f"the options in {resume / CONFIG}"
    saved = read_as(type(options), saved_options, source=source, hint="begin anew without --resume")
    saved_run = {name: getattr(saved.run, name) for name in DECIDING}
    run = replace(options.run, **saved_run)
    message = f"expected to resume {resume} with its "
    resumed_options = _with_typed(saved, options, ("run", "resume", *typed), message)
    return replace(resumed_options, run=run, resume=resume)


def _with_typed(saved: Any, options: Any, typed: Collection[str], message: str) -> Any:
    """Return saved options with those that hold as they are typed now, also within bundles.

    Any other option must have its default, or the saved value.

    saved: the options that the run began with.
    options: the options that are typed now.
    typed: the names of the options that hold as they are typed.
    message: the beginning of an error message, up to the option's name.
    """
    changes = {}
    for field in fields(options):
        value = getattr(options, field.name)
        saved_value = getattr(saved, field.name)
        if field.name in typed:
            changes[field.name] = value
        elif is_dataclass(value):
            bundle_message = f"{message}{field.name}."
            changes[field.name] = _with_typed(saved_value, value, typed, bundle_message)
        elif value not in (field.default, saved_value):
            raise InputError(f"{message}{field.name}, {saved_value}, found {value}; leave it out")
    return replace(saved, **changes)
