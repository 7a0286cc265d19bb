"""Words of the command lines that a report suggests, from the options of the run it reports.

A suggested command must load the same models and images as the run. So it repeats every option that
decides how they are loaded.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from vitlens.names import DEFAULT_SEED

# separators of options that take several values in one word; other options are typed repeatedly
_SEPARATORS: Final = {"image_size": "x", "mean": ",", "std": ","}
_DATA_DIR: Final = "data"  # the default of --data-dir


def model_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of models that were typed in a run, by their field's name.

    options: the options of the run, as in config.json.
    """
    bundle = options.get("model_options")
    if not isinstance(bundle, Mapping):
        return {}
    return {name: value for name, value in bundle.items() if value}


def model_words(options: Mapping[str, Any], models: Sequence[str]) -> list[str]:
    """Return the words that load models of a run again, to be typed after their names.

    options: the options of the run, as in config.json.
    models: the names of the models as they were typed, which may be a part of those of the run.
    """
    words: list[str] = []
    for name, value in model_options(options).items():
        if name == "model_file":
            words += _code_words(options, models)
        else:
            words += _option_words(name, value)
    seed = _run_option(options, "seed")  # of random weights, also of those that code makes
    if seed not in (None, DEFAULT_SEED):
        words += ["--seed", str(seed)]
    return words


def is_random(options: Mapping[str, Any], models: Sequence[str]) -> bool:
    """Return True if one of these models of a run has random weights."""
    if "random_weights" in model_options(options):
        return True
    return any(model.endswith("@random") for model in models)


def _code_words(options: Mapping[str, Any], models: Sequence[str]) -> list[str]:
    """Return the words that allow the code of models to run: --model-file FILE.py:FUNCTION ...

    A file that only other models name is left out: the command line would refuse it. A file that no
    model names is that of a model that was trained from it, in a folder.
    """
    files = [str(file) for file in model_options(options)["model_file"]]
    names_of_run = options.get("models") or [options.get("model")]
    files_of_run = [_code_of(str(name), files) for name in names_of_run]
    files_of_models = [_code_of(model, files) for model in models]
    has_folder = None in files_of_models
    words = []
    for file in files:
        is_named = file in files_of_models
        is_of_folder = has_folder and file not in files_of_run  # the code of a trained model
        if is_named or is_of_folder:
            words += ["--model-file", file]
    return words


def _code_of(model: str, files: Sequence[str]) -> str | None:
    """Return the file with code that a model names, with an alias or without; None if none."""
    for file in files:
        if model == file or model.endswith(f"={file}"):
            return file
    return None


def data_words(options: Mapping[str, Any]) -> list[str]:
    """Return the words that name the data set of a run, and what it needs; [] without one."""
    if not options.get("data"):
        return []
    words = ["--data", str(options["data"])]
    labels = _run_option(options, "labels")
    if labels:
        words += ["--labels", str(labels)]
    folder = _run_option(options, "data_dir")
    if folder not in (None, _DATA_DIR):
        words += ["--data-dir", str(folder)]
    return words


def _option_words(name: str, value: Any) -> list[str]:
    """Return one option as it is typed."""
    option = "--" + name.replace("_", "-")
    if value is True:
        return [option]
    if name in _SEPARATORS:
        return [option, _SEPARATORS[name].join(map(str, value))]
    words = []
    for item in [value] if isinstance(value, str) else value:
        words += [option, str(item)]
    return words


def _run_option(options: Mapping[str, Any], name: str) -> Any:
    """Return an option of how the run is made; None if it is not known."""
    bundle = options.get("run")
    return bundle.get(name) if isinstance(bundle, Mapping) else None
