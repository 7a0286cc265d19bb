"""Features at every layer: one vector an image, from memory or from files; patch tokens.

Cached features are one file per layer, written batch by batch and memory-mapped when read. The
place of a file is a hash of the origin of its content: weights, data, pooling, norm, precision,
layer. A file that is incomplete, damaged or of another version is never read: a note says so, and
the file is built again. Files appear complete or not at all, so runs can share a folder.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import BinaryIO, Final, Literal

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from vitlens.analysis.evaluation.evaluate import fitting_batch_size
from vitlens.data.identity import split_fingerprint
from vitlens.data.split import Split
from vitlens.devices import autocast, evaluating, in_bf16
from vitlens.errors import InputError, NonFiniteError, UnknownNameError, UnsupportedError
from vitlens.files import write_atomically
from vitlens.inputs import takes_images
from vitlens.lens.attention import is_tapped
from vitlens.lens.stages import (
    FeatureStage,
    FinalNorm,
    StageKind,
    embedding_stage,
    final_norm,
    require_features,
    stages,
    watching_stages,
)
from vitlens.models.hooks import is_changed
from vitlens.models.model import Model
from vitlens.models.saved import model_fingerprint
from vitlens.names import FEATURE_POOLS, FeaturePool
from vitlens.pixels import AnyImages, as_parts
from vitlens.processes import Processes
from vitlens.shapes import Images, Logits, Tokens
from vitlens.summary import Summary

LayerChoice = int | Literal["embedding"]
EMBEDDING: Final = "embedding"
VERSION = 3  # of the files and of how features are read: raise it with any change of either
_SEAL: Final = 32  # bytes of SHA-256 at the end of a file


@dataclass(frozen=True)
class FeatureLayer:
    """A layer at which features were read.

    index: from 0, None for the embedding.
    title: as a figure names it ("block 5").
    kind: "block" or "stage", for the input of the first block "embedding" or "stem".
    module: the one of which the output (of the embedding: input) was read.
    dim: the dimension of the features.
    norm: the name of the model's final norm where it was applied, else None.
    """

    index: int | None
    title: str
    kind: StageKind
    module: str
    dim: int
    norm: str | None


@dataclass(frozen=True, repr=False)
class Features(Summary):
    """One vector an image for each layer, from one pass.

    values: by layer (n, dim), fp32 on the CPU, perhaps mapped from a file that must not be written
        to.
    logits: (n, classes) of the same pass.
    pool: the tokens that a vector is made of.
    notes: remarks for a report.

    The embedding, where it was read, comes first and has no number: block 0 is layer 0 with it and
    without it.
    """

    alias: str
    layers: tuple[FeatureLayer, ...]
    values: tuple[Float[Tensor, "images _"], ...]
    logits: Logits
    pool: FeaturePool
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.logits)

    @property
    def embedded(self) -> bool:
        """Return True if the first of the layers is the embedding (a CNN's stem)."""
        return bool(self.layers) and self.layers[0].index is None

    def at(self, layer: LayerChoice = -1) -> Float[Tensor, "images dim"]:
        """Return the features of one layer by its index, from 0.

        -1 is the last layer read, "embedding" the embedding.
        """
        if layer == -1:
            return self.values[-1]
        places = dict[LayerChoice, int]()
        for place, feature_layer in enumerate(self.layers):
            index = feature_layer.index
            places[EMBEDDING if index is None else index] = place
        if layer not in places:
            raise InputError(
                f"expected one of the layers {[*places]} of {self.alias}, found {layer}"
            )
        return self.values[places[layer]]


@takes_images
def features(
    model: Model,
    images: AnyImages,
    *,
    layer: int | Sequence[int] | None = None,
    pool: FeaturePool | None = None,
    norm: bool = True,
    embedding: bool = False,
    batch_size: int | None = None,
) -> Features:
    """Return the features of each image at every block of a transformer, or stage of a CNN.

    All are read in one pass.

    images: (n, 3, height, width) in [0, 1], or any form that `vitlens.images` takes, batch_size at
        a time (None: chosen to fit).
    layer: from 0, -1 for the last, several, or None for all.
    pool: "cls", "mean" (of the patches or cells, without prefix tokens), "cls+mean" (concatenated),
        or None for the tokens that the classifier reads (CLS where it reads that, else the mean).
    norm: whether the model's final norm is applied to each layer, where it has one of that width,
        as DINO does.
    embedding: whether the input of block 0 (of a CNN: the stem) is read too, as the first of the
        layers: always the mean of its patches, as its CLS token is the same for every image, and
        without the final norm.

    Raises UnsupportedError for the CLS of a model without one and for the embedding of a model
    without blocks, NonFiniteError naming the layer.

    >>> import torch, vitlens
    >>> vit = vitlens.load("vit-digits")
    >>> read = vitlens.features(vit, torch.rand(4, 3, 32, 32))
    >>> read.at(-1).shape == (4, read.layers[-1].dim)
    True
    """
    require_features(model)
    reader = _Reader(model, _chosen(model, layer, embedding=embedding), pool, norm=norm)
    parts = as_parts(images).split(batch_size or fitting_batch_size(model))
    return reader.joined([reader.read(batch.to(model.device)) for batch in parts])


def extract(
    model: Model,
    split: Split,
    *,
    layer: int | Sequence[int] | None = None,
    pool: FeaturePool | None = None,
    norm: bool = True,
    embedding: bool = False,
    cache: Path | None = None,
    batch_size: int | None = None,
    precision: str = "fp32",
    processes: Processes | None = None,
    advance: Callable[[int], object] = lambda _: None,
) -> Features | None:
    """Return the features of every image of a split, as `features` reads them.

    cache: a folder, created if missing, which runs may share: every layer is written to it batch by
        batch and then memory-mapped, so that memory does not grow with the images, and read from it
        the next time; None: all is held in memory, as it is while `intervene`, a hook or another
        forward changes the model, with a note.
    processes: each gets the complete split and reads its share; all but the first return None.
    advance: called with the number of images just done.

    The notes of the result have one line for every cached file that was ignored.
    """
    workers = processes or Processes(0, 1, model.device)
    notes = list[str]()
    if cache is not None and (is_tapped(model) or is_changed(model)):
        notes.append(
            "the cache is not used, as the model is changed by an intervention, a hook or another "
            "forward"
        )
        cache = None
    reader = _Reader(model, _chosen(model, layer, embedding=embedding), pool, norm=norm)
    size = batch_size or fitting_batch_size(model)
    chunks = partial(
        _chunks, split=split, workers=workers, size=size, precision=precision, advance=advance
    )
    if cache is None:
        batches = [parts for parts in chunks(reader) if workers.is_first]
        return replace(reader.joined(batches), notes=tuple(notes)) if batches else None
    store = None
    cached = dict[str, Tensor]()
    if workers.is_first:
        store = FeatureCache(
            cache,
            {
                "model": model_fingerprint(model),
                "data": split_fingerprint(split),
                "pool": reader.pool,
                "norm": norm,
                "precision": "bf16" if in_bf16(model.device, precision) else "fp32",
            },
        )
        cached, notes = store.recall(reader.names)
    is_lacking = [float(workers.is_first and name not in cached) for name in reader.names]
    is_absent = workers.total(torch.tensor(is_lacking)).bool().tolist()  # in all processes
    if not any(is_absent):
        advance(len(range(workers.index, len(split), workers.count)))
    else:
        stages_to_read = [stage for stage, absent in zip(reader.stages, is_absent) if absent]
        missing = _Reader(model, stages_to_read, reader.pool, norm=norm)
        files = dict[str, BinaryIO]()
        with ExitStack() as stack:
            for parts in chunks(missing):
                for name, part in zip(missing.names, parts):
                    if store is None or name in cached:
                        continue
                    if name not in files:
                        file = store.writing(name, (len(split), part.shape[1]))
                        files[name] = stack.enter_context(file)
                    files[name].write(part.numpy().astype("<f4", copy=False).tobytes())
        if store is not None:
            written, _ = store.recall(list(files))
            cached |= written
    if store is None:
        return None
    *values, logits = (cached[name] for name in reader.names)
    return Features(model.alias, reader.layers, tuple(values), logits, reader.pool, tuple(notes))


def _chunks(
    reader: "_Reader",
    *,
    split: Split,
    workers: Processes,
    size: int,
    precision: str,
    advance: Callable[[int], object],
) -> Iterator[Sequence[Tensor]]:
    """Yield the features that all processes read, chunk by chunk in the order of the images.

    size: images at a time in each process.
    """
    device = reader.model.device
    widths = [0]
    for chunk in torch.arange(len(split)).split(size * workers.count):
        share = chunk[workers.index :: workers.count]
        joined = torch.zeros(0, sum(widths))  # the last chunk may have no image for this process
        if len(share):
            (batch,) = split.pick(share).batches(size, device=device)
            with autocast(device, precision):
                parts = reader.read(batch.images)
            widths = [part.shape[1] for part in parts]
            joined = torch.cat(parts, 1)
        gathered = workers.gathered(joined)
        advance(len(share))
        yield gathered.split(widths, 1)


def patch_tokens(
    model: Model,
    images: Images,
    layers: Sequence[LayerChoice] = (-1,),
    *,
    norm: bool = True,
    batch_size: int | None = None,
) -> tuple[Float[Tensor, "images rows columns dim"], ...]:
    """Return the tokens of the patches (a CNN's cells) of layers on their grid, in one pass.

    They are without prefix tokens, fp32 on the CPU. layers, norm: as in `features`, and "embedding"
    for the patches that enter block 0, without a norm; a norm that the model applies to the pooled
    vector only is applied to each token here. Raises UnsupportedError where the order of the tokens
    is unknown.
    """
    chosen = [_chosen(model, layer)[0] for layer in layers]
    reader = _Reader(model, chosen, "mean", norm=norm)
    parts = dict[FeatureStage, list[Tensor]]()
    for stage in chosen:
        if stage.grid is None:
            raise UnsupportedError(
                f"expected tokens with a place in the image, found {stage.title} of {model.alias}, "
                "whose order is unknown; try a ViT or a CNN"
            )

    def take(stage: FeatureStage, tokens: Tokens) -> None:
        patches = reader.normed(stage, tokens[:, len(stage.prefix) :])
        # cloned, as a later block may write into it
        parts.setdefault(stage, []).append(patches.float().cpu().clone())

    with torch.no_grad(), evaluating(model), watching_stages(model, chosen, take):
        for batch in images.split(batch_size or fitting_batch_size(model)):
            model(batch.to(model.device))
    return tuple(torch.cat(parts[stage]).unflatten(1, stage.grid or ()) for stage in chosen)


class _Reader:
    """Reads layers of a model in one forward pass a batch.

    Tokens are pooled during the pass and not kept. names: of the files: the layers, and the logits
    last.
    """

    def __init__(
        self,
        model: Model,
        chosen: Sequence[FeatureStage],
        pool: FeaturePool | None,
        *,
        norm: bool,
    ) -> None:
        self.model = model
        self.stages = chosen
        self.pool = resolve_pool(model, pool)
        self.names = [*(stage.title.replace(" ", "-") for stage in chosen), "logits"]
        self.pools = dict[FeatureStage, FeaturePool]()
        self.norms = dict[FeatureStage, FinalNorm]()
        final = final_norm(model) if norm else None
        for stage in chosen:
            is_inner = stage.index is not None
            # the CLS token of the embedding is always the same
            self.pools[stage] = self.pool if is_inner else "mean"
            if final is not None and is_inner and final.width == stage.width:
                self.norms[stage] = final
        self.layers = tuple(self._layer(stage) for stage in chosen)

    def _layer(self, stage: FeatureStage) -> FeatureLayer:
        dim = stage.width
        if self.pools[stage] == "cls+mean":
            dim *= 2
        norm = self.norms.get(stage)
        return FeatureLayer(
            stage.index,
            stage.title,
            stage.kind,
            stage.module,
            dim,
            norm=None if norm is None else norm.module,
        )

    def read(self, images: Images) -> list[Tensor]:
        """Return the vectors (batch, dim) of a batch by layer, then its logits (batch, classes).

        They are fp32, on the CPU.
        """
        vectors: dict[int | None, Tensor] = {}

        def take(stage: FeatureStage, tokens: Tokens) -> None:
            pool = self.pools[stage]
            parts = list[Tensor]()
            if "cls" in pool:
                parts.append(self.normed(stage, tokens[:, stage.prefix.index("cls")]))
            if "mean" in pool:
                patches = tokens[:, len(stage.prefix) :]
                # as the model does: the mean of normalised tokens, or the normalised mean (timm's
                # fc_norm)
                norms_tokens = stage in self.norms and self.norms[stage].on_tokens
                if norms_tokens:
                    parts.append(self.normed(stage, patches).mean(1))
                else:
                    parts.append(self.normed(stage, patches.mean(1)))
            vectors[stage.index] = torch.cat(parts, 1).float().cpu()

        with (
            torch.no_grad(),
            evaluating(self.model),
            watching_stages(self.model, self.stages, take),
        ):
            logits = self.model(images).float().cpu()
        for stage in self.stages:
            if not vectors[stage.index].isfinite().all():
                raise NonFiniteError(
                    f"expected finite features, found NaN or infinity in {stage.title} of "
                    f"{self.model.alias}"
                )
        return [*(vectors[stage.index] for stage in self.stages), logits]

    def joined(self, batches: Sequence[Sequence[Tensor]]) -> Features:
        """Return the features of all batches."""
        *values, logits = (torch.cat(parts) for parts in zip(*batches))
        return Features(self.model.alias, self.layers, tuple(values), logits, self.pool)

    def normed(self, stage: FeatureStage, tokens: Tensor) -> Tensor:
        """Return tokens of a layer after the norm that is applied to it."""
        if stage not in self.norms:
            return tokens
        normed: Tensor = self.model.module.get_submodule(self.norms[stage].module)(tokens)
        return normed


def resolve_pool(model: Model, pool: FeaturePool | None) -> FeaturePool:
    """Return the pooling; None: that of the classifier.

    Raises UnsupportedError for the CLS of a model without one.
    """
    has_cls = "cls" in stages(model)[0].prefix
    if pool is None:
        reads_cls = model.anatomy.readout in ("cls", "cls+distillation")
        return "cls" if has_cls and reads_cls else "mean"
    if pool not in FEATURE_POOLS:
        raise UnknownNameError("pooling of features", pool, FEATURE_POOLS)
    if "cls" in pool and not has_cls:
        raise UnsupportedError(
            f"expected a CLS token for the pooling {pool!r}, found none in {model.alias} "
            f"({model.anatomy.family}); try the pooling 'mean'"
        )
    return pool


def _chosen(
    model: Model, layer: LayerChoice | Sequence[int] | None, *, embedding: bool = False
) -> tuple[FeatureStage, ...]:
    """Return layers by index from 0 (-1: the last), all for None.

    The embedding comes first; it is the only one for "embedding".
    """
    all_stages = stages(model)
    with_embedding = embedding or layer == EMBEDDING
    first = embedding_stage(model) if with_embedding else None
    if first is None and with_embedding:
        raise UnsupportedError(
            "expected a model whose first block is given the embedding of all patches, found "
            f"{model.alias} ({model.anatomy.family}); read its layers without embedding=True"
        )
    indices: Sequence[int]
    if layer is None:
        indices = range(len(all_stages))
    elif isinstance(layer, str):
        indices = ()
    elif isinstance(layer, int):
        indices = (layer,)
    else:
        indices = layer
    for index in indices:
        if not -len(all_stages) <= index < len(all_stages):
            raise InputError(
                f"expected a layer from 0 to {len(all_stages) - 1} of {model.alias}, found {index}"
            )
    numbers = sorted({index % len(all_stages) for index in indices})
    chosen = [all_stages[number] for number in numbers]
    return tuple(chosen) if first is None else (first, *chosen)


class FeatureCache:
    """The features of one model on one set of images, read in one way.

    root: the folder of the cache.
    about: the origin of the features as plain JSON values, without the layer.
    """

    def __init__(self, root: Path, about: Mapping[str, object]) -> None:
        if root.exists() and not root.is_dir():
            raise InputError(
                f"expected a folder for cached features at {root}, found a file; give another"
            )
        self.root = root
        self.origin = json.dumps(about, sort_keys=True)

    def file(self, name: str) -> Path:
        """Return the path of one layer's features, whether the file exists or not."""
        key = hashlib.sha256(self.origin.encode()).hexdigest()[:20]
        return self.root / key / f"{name}.npy"

    def recall(self, names: Sequence[str]) -> tuple[dict[str, Tensor], list[str]]:
        """Return the features (n, dim) of cached layers by name, and a note on every unusable file.

        Features are mapped from the files.
        """
        cached = dict[str, Tensor]()
        notes = list[str]()
        for name in names:
            path = self.file(name)
            with suppress(OSError):  # a file that cannot be read counts as damaged
                content: NDArray[np.uint8] = np.zeros(0, np.uint8)
                if path.stat().st_size:
                    content = np.memmap(path, np.uint8, "r")
                if content[-_SEAL:].tobytes() == self._seal(name, content[:-_SEAL]):
                    cached[name] = torch.from_numpy(np.lib.format.open_memmap(path, mode="c"))
            if path.exists() and name not in cached:
                notes.append(
                    f"cached features {path.relative_to(self.root)} ignored and built again: "
                    "incomplete, damaged or of another version"
                )
        return cached, notes

    @contextmanager
    def writing(self, name: str, shape: tuple[int, int]) -> Iterator[BinaryIO]:
        """Yield the file of one layer for fp32 rows.

        The file appears when the block ends without an exception. Raises StorageError when the disk
        is full.
        """
        with write_atomically(self.file(name)) as temporary, temporary.open("wb") as file:
            header = {"descr": "<f4", "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_2_0(file, header)
            yield file
            file.flush()
            file.write(self._seal(name, np.memmap(temporary, np.uint8, "r")))

    def _seal(self, name: str, content: NDArray[np.uint8]) -> bytes:
        """Return the SHA-256 of the content of a file, of its origin and of the version."""
        seal = hashlib.sha256(f"{VERSION} {name} {self.origin}".encode())
        seal.update(content.data)
        return seal.digest()
