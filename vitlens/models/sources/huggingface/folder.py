"""The folder of a transformers model: found on this machine, in the hub's cache or on the hub, and read as data."""

import hashlib
import logging
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

from torch import Tensor

from vitlens.errors import ModelError
from vitlens.files import read_json
from vitlens.models.sources.hub import pretrained_download
from vitlens.models.weights import read_weights
from vitlens.references import import_without_compiler
from vitlens.typed import Name, length, read_as

MAJOR: Final = 5  # earlier versions need an older huggingface_hub than other libraries do
ADDRESS: Final = "https://huggingface.co"
CONFIG: Final = "config.json"
PROCESSORS: Final = ("preprocessor_config.json", "processor_config.json")
WEIGHTS: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
_LIMIT: Final = 16 << 20  # ImageNet-21k's labels, twice, are 2 MB
_TOKENIZERS: Final = ("tokenizer.json", "vocab.json", "merges.txt", "spiece.model", "tokenizer.model")
_PICKLES: Final = ("pytorch_model*.bin", "*.pth", "*.pt", "*.msgpack", "*.h5")
_REPO: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9._-]+)?")
_SETTINGS: Final = (CONFIG, *PROCESSORS, *_TOKENIZERS, "tokenizer_config.json", "special_tokens_map.json")
_SHARDS: Final = (WEIGHTS, INDEX, "model-?????-of-?????.safetensors")


def transformers(part: str = "") -> Any:
    """The library, or one of its modules. Raises ModelError where it is missing or older than 5."""
    try:
        library: Any = import_without_compiler("transformers")
        if int(str(library.__version__).partition(".")[0]) < MAJOR:
            raise ImportError(f"version {library.__version__}")
        return import_without_compiler(f"transformers.{part}") if part else library
    except ImportError as error:
        raise ModelError(
            f"expected transformers {MAJOR} or newer for hf: models, found it missing ({error}); "
            "type pip install 'vitlens[hf]'"
        ) from error


@contextmanager
def quietly() -> Iterator[None]:
    """Inside, transformers and the hub's client print nothing and send no telemetry; their settings are restored."""
    from huggingface_hub import constants
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    log, telemetry = transformers("utils.logging"), constants.HF_HUB_DISABLE_TELEMETRY
    bars = log.is_progress_bar_enabled()
    hub_bars = not are_progress_bars_disabled()
    level, hub_log = log.get_verbosity(), logging.getLogger("huggingface_hub")
    hub_level = hub_log.level
    try:
        log.set_verbosity(logging.CRITICAL)
        hub_log.setLevel(logging.CRITICAL)
        log.disable_progress_bar()
        constants.HF_HUB_DISABLE_TELEMETRY = True
        if hub_bars:
            disable_progress_bars()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.set_verbosity(level)
        hub_log.setLevel(hub_level)
        constants.HF_HUB_DISABLE_TELEMETRY = telemetry
        if bars:
            log.enable_progress_bar()
        if hub_bars:
            enable_progress_bars()


def first_line(error: Exception) -> str:
    """The first line of another library's message, or the name of its type."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:160]


@dataclass(frozen=True)
class _Index:
    """Which file has which tensor, of weights in several files."""

    weight_map: Annotated[Mapping[str, Name], length(1, 100_000)]


@dataclass(frozen=True)
class Folder:
    """The files of one model. path: of the folder; name: as the user typed it; notes: where it comes from."""

    path: Path
    name: str
    from_hub: bool = False
    notes: tuple[str, ...] = ()

    @property
    def has_tokenizer(self) -> bool:
        """Whether texts can be read."""
        return any((self.path / file).is_file() for file in _TOKENIZERS)

    def read(self, file: str) -> dict[str, object] | None:
        """The object in a JSON file; None where there is no such file. Raises ModelError for anything else."""
        path = self.path / file
        if not path.exists():
            return None
        content = read_json(path, size=_LIMIT, error=ModelError)
        if not isinstance(content, dict):
            raise ModelError(f"expected a JSON object in {path}, found a {type(content).__name__}")
        return content

    def weight_files(self) -> tuple[Path, ...]:
        """The safetensors files, in the order of their names. Raises ModelError where there are none."""
        if (self.path / WEIGHTS).is_file():
            return (self.path / WEIGHTS,)
        index = self.read(INDEX)
        if index is not None:
            known = read_as(_Index, index, source=str(self.path / INDEX), error=ModelError)
            # plain names; in the hub's cache the files are links
            files = tuple(self.path / name for name in sorted(set(known.weight_map.values())))
            missing = [file.name for file in files if file.suffix != ".safetensors" or not file.is_file()]
            if missing:
                raise ModelError(f"expected the safetensors file {missing[0]} in {self.path}, found none; see {INDEX}")
            return files
        pickles = [file.name for pattern in _PICKLES for file in sorted(self.path.glob(pattern))]
        if pickles:
            raise ModelError(
                f"expected {WEIGHTS} in {self.name}, found {pickles[0]} alone, which could run code when it is read; "
                "convert it where you trust it: model.save_pretrained(FOLDER) of transformers writes safetensors"
            )
        raise ModelError(
            f"expected {WEIGHTS} in {self.name}, found none; a folder that transformers' save_pretrained wrote has it "
            "(--random-weights needs none)"
        )

    def read_state(self) -> tuple[dict[str, Tensor], str]:
        """The weights, and the SHA-256 of their files' contents one after another. Raises ModelError."""
        state: dict[str, Tensor] = {}
        digest = hashlib.sha256()
        for file in self.weight_files():
            state |= read_weights(file).state
            with file.open("rb") as stream:
                while block := stream.read(1 << 20):
                    digest.update(block)
        return state, digest.hexdigest()


def find(name: str, short: str, *, weights: bool) -> Folder:
    """The folder of `hf:FOLDER`, or of `hf:REPO` from the hub or its cache; weights: whether they are needed.

    Raises ModelError for a name that is neither, and where the hub cannot be reached.
    """
    path = Path(short).expanduser()
    if short and path.is_dir():
        if (path / "adapter_config.json").exists():
            raise ModelError(
                f"expected a whole model in {name}, found adapter_config.json, an adapter; merge it into its model "
                "first (merge_and_unload of peft)"
            )
        return Folder(path, name)
    if not short or path.exists() or short.startswith((".", "~", "/")) or not _REPO.fullmatch(short) or ".." in short:
        there = "a file" if path.is_file() else "nothing there"
        raise ModelError(f"expected hf:FOLDER, or hf:REPO as OWNER/NAME on {ADDRESS}, found {there} at {short[:200]!r}")
    advice = "download it where there is a network, and give its folder: hf:FOLDER"
    with quietly(), pretrained_download(name, f"{ADDRESS}/{short}", advice=advice):
        from huggingface_hub import snapshot_download

        patterns = [*_SETTINGS, *(_SHARDS if weights else ())]
        found = Path(snapshot_download(short, allow_patterns=patterns, etag_timeout=5))
    return Folder(found, name, True, (f"revision {found.name} of {short} on {ADDRESS}",))
