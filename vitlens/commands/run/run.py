"""A run of a command from its options: its processes, models, images, folder and report.

A command makes a `Run`, measures on `run.batches()`, and writes its record within `run.folder()`,
which yields a `Writing`.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from copy import copy
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

from vitlens.analysis.evaluation.evaluate import fitting_batch_size
from vitlens.commands.run.folder import RunFolder, settings
from vitlens.commands.run.load import (
    ANY_IMAGES,
    ImageRequest,
    load_models,
    load_splits,
    require_data,
    require_image_paths,
)
from vitlens.commands.run.options import RunOptions
from vitlens.commands.run.progress import Advance, phase, progress
from vitlens.commands.run.publish import publish
from vitlens.data.split import Batch, Split
from vitlens.devices import autocast, resolve_device
from vitlens.errors import InputError
from vitlens.models.model import Model
from vitlens.processes import Processes, join, share_of
from vitlens.record import Record

Options = TypeVar("Options")


def join_run(options: RunOptions) -> tuple[Processes, RunOptions]:
    """Return the processes of this run, and the options for this process.

    Each process has another device, and only the first is not quiet. To be called before models are
    loaded.
    """
    processes = join(resolve_device(options.device))
    if processes.count == 1:
        return processes, options
    quiet = options.quiet or not processes.is_first
    return processes, replace(options, device=str(processes.device), quiet=quiet)


class Run(Generic[Options]):
    """Models, images, processes and folder of a command: what it needs before and after measuring.

    command: the name of the command.
    options: its options as they were given.
    run_options: its run options as they hold in this process.
    image_request: which images to read where options leave the choice open.
    processes: the processes that share the images.
    models: the models that the options name.
    """

    def __init__(
        self,
        command: str,
        options: Options,
        *,
        needs: str | None = None,
        most: int | None = None,
        images: ImageRequest = ANY_IMAGES,
        load: Callable[[RunOptions], tuple[Model, ...]] | None = None,
    ) -> None:
        """Join the processes, and load the models; images are read when they are first used.

        needs: the command whose needs the models must meet, None for this one.
        most: the largest number of models, None for any.
        images: which to read.
        load: returns the models for the run options, in place of load_models.

        Raises InputError for too many models, what `require_data` raises before a model is loaded,
        and what loading raises.
        """
        typed_options: Any = options
        names = _model_names(typed_options)
        if most is not None and len(names) > most:
            raise InputError(
                f"expected at most {most} models for {command}, found {len(names)}; run vitlens "
                f"{command} for each"
            )
        require_data(
            getattr(options, "data", None),
            getattr(options, "images", ()),
            labels=typed_options.run.labels,
        )
        if load is None:  # otherwise the images may be given, too
            require_image_paths(getattr(options, "images", ()))
        self.command = command
        self.options = options
        self.image_request = images
        self._splits: tuple[Split, ...] | None = None
        self.processes, self.run_options = join_run(typed_options.run)
        self.models: tuple[Model, ...]
        with self.processes.main_process_first():
            if load is not None:
                self.models = load(self.run_options)
            else:
                self.models = load_models(
                    names,
                    command=needs or command,
                    model_options=typed_options.model_options,
                    options=self.run_options,
                )

    @property
    def splits(self) -> tuple[Split, ...]:
        """Return the images for each model: the same images, preprocessed for it.

        They are read on first use, by all processes of a run. Raises InputError if models get
        different numbers of images, and what reading raises.
        """
        # no cached_property: in Python 3.11 it holds a lock while it reads, and reading waits for
        # other processes, which may be threads of this one
        if self._splits is None:
            self._splits = self._read_images()
        return self._splits

    def _read_images(self) -> tuple[Split, ...]:
        typed_options: Any = self.options
        with self.processes.main_process_first():
            splits = load_splits(
                self.models,
                options=self.run_options,
                data=typed_options.data,
                images=getattr(typed_options, "images", ()),
                request=self.image_request,
            )
        counts = [len(split) for split in splits]
        if len(set(counts)) > 1:
            raise InputError(f"expected the same images for all models, found {counts}")
        return tuple(splits)

    def with_images(self, splits: Sequence[Split]) -> Self:
        """Return the same run on other images, one split for each model."""
        run = copy(self)
        run._splits = tuple(splits)
        vars(run).pop("shares", None)  # cached for the images before
        return run

    @property
    def first(self) -> bool:
        """Return True if this is the process that writes."""
        return self.processes.is_first

    @property
    def model(self) -> Model:
        """Return the first model."""
        return self.models[0]

    @property
    def split(self) -> Split:
        """Return the images of the first model."""
        return self.splits[0]

    @property
    def aliases(self) -> tuple[str, ...]:
        """Return the models' aliases."""
        return tuple(model.alias for model in self.models)

    @cached_property
    def shares(self) -> tuple[Split, ...]:
        """Return the share of the images that this process measures, for each model."""
        return tuple(share_of(split, self.processes) for split in self.splits)

    @property
    def passes(self) -> dict[str, Any]:
        """Return batch size and precision, as arguments of an analysis."""
        return {"batch_size": self.run_options.batch_size, "precision": self.run_options.precision}

    def progress(
        self, what: str, total: int, unit: str = "images"
    ) -> AbstractContextManager[Advance]:
        """Return the progress of a loop on stderr, nothing with --quiet."""
        return progress(what, total, unit=unit, quiet=self.run_options.quiet)

    def batches(self, what: str, *, size: int | None = None) -> Iterator[tuple[Batch, ...]]:
        """Yield this process's images batch by batch, as one batch for each model.

        It shows progress, and the caller measures in the run's precision.

        size: images in a batch without --batch-size, None for what fits memory.
        """
        device = self.model.device
        batch_size = self.run_options.batch_size or size
        if not batch_size:
            batch_size = min(fitting_batch_size(model) for model in self.models)
        batches_by_model = [split.batches(batch_size, device=device) for split in self.shares]
        with self.progress(what, len(self.shares[0])) as advance:
            for batches in zip(*batches_by_model):
                with autocast(device, self.run_options.precision):
                    yield batches
                advance(len(batches[0].images))

    def numbers(self, batch: Batch) -> Any:
        """Return the numbers of a batch's images among those of all processes."""
        # share_of gives process i of n the images i, i + n, i + 2n and so on
        return self.processes.index + batch.indices * self.processes.count

    @contextmanager
    def folder(
        self, title: str = "", *, resume: Path | None = None, **more: Any
    ) -> Iterator["Writing"]:
        """Yield the run's folder; in all processes but the first, one that writes nothing.

        title: the beginning of the report's title, "Attention heads of", to which models and data
            are appended.
        resume: the folder of a stopped run, which this one continues.
        more: further entries of config.json.
        """
        if not self.first:
            yield Writing(None)
            return
        *all_but_last, last = self.aliases
        full_title = f"{title} {last}"
        if all_but_last:
            full_title = f"{title} {', '.join(all_but_last)} and {last}"
        name_parts = list(self.aliases)
        split = None
        if hasattr(self.options, "data"):  # not a command without images, such as profile
            split = self.split
            full_title += f" on {split.title or split.name}"
            name_parts.append(split.name)
        config = settings(self.options, self.run_options, models=self.models, split=split, **more)
        opened = RunFolder.opened(
            self.command,
            self.run_options,
            config,
            name_parts=name_parts,
            title=full_title,
            resume=resume,
            needs={"data": None},  # the config.json of a resumed run must name its data
        )
        with opened as folder:
            yield Writing(folder)


def _model_names(options: Any) -> Sequence[Any]:
    """Return the names of the models in the options of a command that takes one or several."""
    return options.models if hasattr(options, "models") else (options.model,)


class Writing:
    """The folder of a run while it is open, or nothing to write to.

    folder: None in all processes but the first, where `publish` does nothing.
    """

    def __init__(self, folder: RunFolder | None) -> None:
        self.folder = folder

    def publish(self, make_record: Callable[[], Record], *, final: bool = True) -> Path | None:
        """Write the record that `make_record` returns, and the report.

        Returns the path of the report, None where nothing is written.

        final: False for a report that is written again before the run ends.
        """
        if self.folder is None:
            return None
        with phase("Putting the results together"):
            self.folder.keep(make_record())
        return publish(self.folder, final=final)
