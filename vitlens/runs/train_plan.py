"""What decides the result of a training, as it was typed, and as a resumed run finds it in its folder."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from vitlens.commands.scaffold.options import RunOptions
from vitlens.errors import InputError
from vitlens.files import CONFIG, read_run
from vitlens.models.assembly import Overrides
from vitlens.names import Precision
from vitlens.preprocessing import Side
from vitlens.runs.train_options import UNTAUGHT, WHOLE, Teaching, Tuning
from vitlens.schema import Between, Text, read_as

_HINT = "begin anew without --resume"


@dataclass(frozen=True)
class KeptOptions:
    """The options that a resumed run takes from its beginning, as config.json says them."""

    seed: Annotated[int, Between(0, 2**63 - 1)]
    limit: Annotated[int, Between(1, 2**53)] | None
    batch_size: Annotated[int, Between(1, 2**31)] | None
    precision: Precision
    data_dir: Text

    def given_to(self, options: RunOptions) -> RunOptions:
        """Other options with these in their place."""
        return replace(options, **{**vars(self), "data_dir": Path(self.data_dir)})


@dataclass(frozen=True)
class Plan:
    """What decides the result besides the options: a run is resumed with the plan that it began with.

    recipe, shape: what differs from the preset's; image_size: (height, width) in pixels, None for the preset's;
    keep_every: epochs between copies of the weights that stay, None for none; named: a recipe that serves any model,
    None for the preset's own; compiling, recompute: see training.loop.fit; tuning: what of a trained model is trained
    further; teaching: who teaches it.
    """

    model: Text
    data: Text = "digits"
    recipe: Mapping[str, Any] = field(default_factory=dict)
    shape: Overrides = field(default_factory=dict)
    image_size: tuple[Side, Side] | None = None
    keep_every: int | None = None
    named: str | None = None
    compiling: str = "auto"
    recompute: bool = False
    tuning: Tuning = WHOLE
    teaching: Teaching = UNTAUGHT


def as_begun(resume: Path, given: Mapping[str, object], options: RunOptions) -> tuple[Plan, RunOptions]:
    """The plan and the options that a run began with. Raises InputError when something else was asked for now."""
    if options.out is not None:
        raise InputError(
            f"expected --resume {resume} or --out {options.out}, found both; a resumed run keeps its folder"
        )
    record = read_run(resume)
    asked = record.config.get("options")
    if record.command != "train" or not isinstance(asked, dict):
        raise InputError(f"expected the folder of vitlens train to resume, found one of vitlens {record.command}")
    source = f"the options in {resume / CONFIG}"
    plan = read_as(Plan, asked, source=source, unknown="ignore", hint=_HINT)
    for name, value in given.items():
        if value != getattr(plan, name):
            raise InputError(
                f"expected to resume {resume} with its {name}, {getattr(plan, name)}, found {value}; leave it out"
            )
    kept = read_as(KeptOptions, asked, source=source, unknown="ignore", hint=_HINT)
    return plan, kept.given_to(options)
