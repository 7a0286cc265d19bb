"""Report: what the page shows, written by the command that measures it, as a report folder and as one HTML file."""

import shlex
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from vitlens.commands.attack.measure import measure as attack_measured
from vitlens.commands.attack.options import AttackOptions
from vitlens.commands.explain.measure import measure as explain_measured
from vitlens.commands.explain.options import ExplainOptions
from vitlens.commands.look.measure import measured as look_measured
from vitlens.commands.look.options import LookOptions
from vitlens.commands.run.options import RunOptions
from vitlens.demo.pictures import Picture
from vitlens.demo.views.attack import offered_attacks
from vitlens.demo.views.explain import PREDICTED
from vitlens.demo.views.intervene import Off
from vitlens.demo.views.written import write_intervened, write_space
from vitlens.errors import UnknownNameError
from vitlens.models.model import Model

Word = Literal["look", "explain", "attack", "intervene", "space"]
WORDS: Final[Mapping[str, Word]] = {
    "Look": "look",
    "Explain": "explain",
    "Break": "attack",
    "Intervene": "intervene",
    "3D": "space",
}
"""The tabs that can be exported, and by what name: that of the command that writes the same report, where one does."""


@dataclass(frozen=True)
class Wanted:
    """What is exported. word: of which tab; models, methods: of the sides of Explain, the first model alone of the
    others; target: a class, "" for the predicted one; attack, epsilon (in 1/255): of Break; off: of Intervene; share:
    of the points of 3D."""

    word: Word
    models: tuple[Model, ...]
    methods: tuple[str, ...] = ()
    target: str = ""
    attack: str = "pgd"
    epsilon: float = 4.0
    off: Off = field(default_factory=Off)
    share: float = 1.0


@dataclass(frozen=True)
class Exported:
    """The files: the report folder as an archive, and the page."""

    archive: Path
    page: Path
    command: str


def exported(picture: Picture, wanted: Wanted, place: Path, *, name: str) -> Exported:
    """Write the report below `place`, which is there already; name: of the files. Raises what the command raises."""
    folder = place / name
    line = command_line(picture, wanted)
    run = RunOptions(out=folder, html=True, quiet=True, command=line)
    if wanted.word == "look":
        page = _looked(picture, wanted, run)
    elif wanted.word == "explain":
        page = _explained(picture, wanted, run)
    elif wanted.word == "intervene":
        page = write_intervened(wanted.models[0], picture, wanted.off, run)
    elif wanted.word == "space":
        page = write_space(wanted.models[0], picture, wanted.share, run)
    else:
        page = _attacked(picture, wanted, run)
    alone = place / f"{name}.html"
    shutil.copyfile(page, alone)
    archive = Path(shutil.make_archive(str(folder), "zip", place, name))
    shutil.rmtree(folder)
    return Exported(archive, alone, line)


def command_line(picture: Picture, wanted: Wanted) -> str:
    """What to type for the same report of a file."""
    names = [model.provenance.name for model in wanted.models]
    if wanted.word == "look":
        return shlex.join(["vitlens", "look", picture.name, "--model", names[0]])
    if wanted.word in ("intervene", "space"):
        return shlex.join(["vitlens", "demo", names[0], "--images", picture.name])
    line = ["vitlens", wanted.word, *dict.fromkeys(names), "--images", picture.name]
    if wanted.word == "explain":
        target = [] if _target(wanted) == "predicted" else ["--target", _target(wanted)]
        return shlex.join([*line, "--method", ",".join(dict.fromkeys(wanted.methods)), *target])
    return shlex.join([*line, "--predicted", "--attack", wanted.attack, "--epsilon", f"{wanted.epsilon:g}"])


def _looked(picture: Picture, wanted: Wanted, run: RunOptions) -> Path:
    model = wanted.models[0]
    options = LookOptions(images=(picture.name,), model=model.provenance.name, run=run)
    return look_measured(options, model, picture.split(model))


def _explained(picture: Picture, wanted: Wanted, run: RunOptions) -> Path:
    by_alias = {model.alias: model for model in wanted.models}
    methods = {
        alias: tuple(dict.fromkeys(name for model, name in zip(wanted.models, wanted.methods) if model.alias == alias))
        for alias in by_alias
    }
    models = tuple(by_alias.values())
    options = ExplainOptions(
        models=tuple(model.provenance.name for model in models),
        images=(picture.name,),
        method=tuple(dict.fromkeys(wanted.methods)),
        target=_target(wanted),
        run=run,
    )
    splits = [picture.split(model) for model in models]
    path = explain_measured(options, models, splits, list(methods.values()))
    assert path is not None  # there is one process
    return path


def _attacked(picture: Picture, wanted: Wanted, run: RunOptions) -> Path:
    if wanted.attack not in [attack.name for attack in offered_attacks()]:
        raise UnknownNameError("attack on this page", wanted.attack, [attack.name for attack in offered_attacks()])
    model = wanted.models[0]
    options = AttackOptions(
        models=(model.provenance.name,),
        images=(picture.name,),
        attacks=(wanted.attack,),
        epsilons=(0.0, wanted.epsilon),
        predicted=True,
        transfer=False,
        corruptions=False,
        run=run,
    )
    path = attack_measured(options, (model,), picture.split(model))
    assert path is not None  # there is one process
    return path


def _target(wanted: Wanted) -> str:
    return "predicted" if wanted.target in ("", PREDICTED) else wanted.target
