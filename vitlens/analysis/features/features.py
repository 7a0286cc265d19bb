"""Features at every layer: one vector per image, or the tokens of its patches.

Features of images can be cached in files, one per layer; see cache.py.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, Final, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from vitlens.analysis.evaluation.evaluate import fitting_batch_size
from vitlens.analysis.features.cache import FeatureCache
from vitlens.data.identity import split_fingerprint
from vitlens.data.split import Split
from vitlens.devices import autocast, evaluating, in_bf16
from vitlens.errors import InputError, NonFiniteError, UnknownNameError, UnsupportedError
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


@dataclass(frozen=True)
class FeatureLayer:
    """A layer at which features were read.

    index: the index of the layer, from 0; None for the embedding.
    title: the name of the layer in figures, e.g. "block 5".
    kind: "block" or "stage"; the input of the first block is "embedding" or "stem".
    module: the name of the module whose output was read (for the embedding, its input).
    dim: the dimension of the features.
    norm: the name of the model's final norm if it was applied to the layer, else None.
    """

    index: int | None
    title: str
    kind: StageKind
    module: str
    dim: int
    norm: str | None


@dataclass(frozen=True, repr=False)
class Features(Summary):
    """One vector per image for each layer, from one pass.

    alias: the alias of the model.
    layers: the layers that were read. If the embedding is one of them, it comes first. It has no
        index, so block 0 is always layer 0.
    values (n, dim): the features of each layer, fp32 on the CPU. They may be mapped from a file, so
        they must not be written to.
    logits (n, classes): the logits of the same pass.
    pool: the tokens that a vector is made of.
    notes: remarks for a report.
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
        """Return True if the first layer is the embedding (a CNN's stem)."""
        return bool(self.layers) and self.layers[0].index is None

    def at(self, layer: LayerChoice = -1) -> Float[Tensor, "images dim"]:
        """Return the features of one layer by its index, from 0.

        -1 is the last layer that was read, "embedding" the embedding.
        """
        if layer == -1:
            return self.values[-1]
        value_of_layer = dict[LayerChoice, Tensor]()
        for feature_layer, value in zip(self.layers, self.values):
            if feature_layer.index is None:
                value_of_layer[EMBEDDING] = value
            else:
                value_of_layer[feature_layer.index] = value
        if layer not in value_of_layer:
            raise InputError(
                f"expected one of the layers {[*value_of_layer]} of {self.alias}, found {layer}"
            )
        return value_of_layer[layer]


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

    All layers are read in one pass.

    images (n, 3, height, width): pixels in [0, 1], or any form that `vitlens.images` takes.
    layer: the index of a layer from 0 (-1 for the last), several indices, or None for all layers.
    pool: "cls", "mean" (of the patches or cells, without prefix tokens) or "cls+mean" (both
        concatenated). None takes what the classifier reads: "cls" if it reads CLS, else "mean".
    norm: True to apply the model's final norm to each layer of the same width, as DINO does.
    embedding: True to read also the input of block 0 (for a CNN, the stem), as the first layer. Its
        CLS token is the same for every image, so it is always the mean of the patches. It is read
        without the final norm.
    batch_size: the number of images at a time; None chooses one that fits.

    Raises UnsupportedError if "cls" or "embedding" is asked of a model without it. Raises
    NonFiniteError with the name of a layer that is not finite.

    >>> import torch, vitlens
    >>> vit = vitlens.load("vit-digits")
    >>> read = vitlens.features(vit, torch.rand(4, 3, 32, 32))
    >>> read.at(-1).shape == (4, read.layers[-1].dim)
    True
    """
    require_features(model)
    layers = _choose_layers(model, layer, embedding=embedding)
    reader = _Reader(model, layers, pool, norm=norm)
    batches = as_parts(images).split(batch_size or fitting_batch_size(model))
    return reader.join([reader.read(batch.to(model.device)) for batch in batches])


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

    cache: a folder for the features, created if it is missing. Each layer is written to it batch by
        batch and then memory-mapped, so that memory does not grow with the images. The next run
        reads it from there. Several runs may share the folder. None keeps all features in memory.
        So does a model that `intervene`, a hook or another forward changes; a note then says so.
    precision: the precision of the passes, "fp32" or "bf16".
    processes: the processes that share the images. Each is given the complete split and reads its
        share. All but the first return None.
    advance: called with the number of images that were just read.

    All other parameters are those of `features`. The notes of the result have one line for every
    cached file that was ignored.
    """
    layers = _choose_layers(model, layer, embedding=embedding)
    reader = _Reader(model, layers, pool, norm=norm)
    scan = _Scan(
        split,
        batch_size=batch_size or fitting_batch_size(model),
        precision=precision,
        processes=processes or Processes(0, 1, model.device),
        advance=advance,
    )
    if cache is None:
        return _extract_to_memory(reader, scan)
    if is_tapped(model) or is_changed(model):
        note = (
            "the cache is not used, because an intervention, a hook or another forward "
            "changes the model"
        )
        result = _extract_to_memory(reader, scan)
        return None if result is None else replace(result, notes=(note,))
    store = None
    if scan.processes.is_first:
        origin = {
            "model": model_fingerprint(model),
            "data": split_fingerprint(split),
            "pool": reader.pool,
            "norm": norm,
            "precision": "bf16" if in_bf16(model.device, precision) else "fp32",
        }
        store = FeatureCache(cache, origin)
    return _extract_to_cache(reader, scan, store, norm=norm)


@dataclass(frozen=True)
class _Scan:
    """One pass over the images of a split, which several processes share.

    split: the images.
    batch_size: the number of images at a time in each process.
    precision: the precision of the passes.
    processes: the processes that share the images.
    advance: called with the number of images that this process has just read.
    """

    split: Split
    batch_size: int
    precision: str
    processes: Processes
    advance: Callable[[int], object]

    def chunks(self, reader: "_Reader") -> Iterator[Sequence[Tensor]]:
        """Yield the features of the images that all processes read together, chunk by chunk.

        A chunk has one tensor per layer and the logits, as in `_Reader.read`. Its images, and the
        chunks, are in the order of the split.
        """
        device = reader.model.device
        count = self.processes.count
        widths = [0]  # of each layer, then of the logits; [0] until this process has read an image
        for chunk in torch.arange(len(self.split)).split(self.batch_size * count):
            share = chunk[self.processes.index :: count]
            # as (images, widths of all layers): one tensor to exchange. The last chunk may be so
            # small that this process has no image of it.
            joined = torch.zeros(0, sum(widths))
            if len(share):
                (batch,) = self.split.pick(share).batches(self.batch_size, device=device)
                with autocast(device, self.precision):
                    parts = reader.read(batch.images)
                widths = [part.shape[1] for part in parts]
                joined = torch.cat(parts, 1)
            gathered = self.processes.gathered(joined)
            self.advance(len(share))
            yield gathered.split(widths, 1)


def _extract_to_memory(reader: "_Reader", scan: _Scan) -> Features | None:
    """Read all images and return their features in the first process, None in the others."""
    batches = list[Sequence[Tensor]]()
    for parts in scan.chunks(reader):  # all processes read their share, the first keeps all
        if scan.processes.is_first:
            batches.append(parts)
    return reader.join(batches) if batches else None


def _extract_to_cache(
    reader: "_Reader", scan: _Scan, store: "FeatureCache | None", *, norm: bool
) -> Features | None:
    """Read the layers that are not cached, cache them, and return all layers from the cache.

    store: the cache in the first process, None in the others, which do not touch the files.
    norm: True to apply the model's final norm.
    """
    processes = scan.processes
    cached = dict[str, Tensor]()
    notes = list[str]()
    if store is not None:
        cached, notes = store.recall(reader.names)
    # Only the first process knows what is missing. It tells the others by a sum over processes. The
    # names are those of the layers, then of the logits. The stages are those of the layers only.
    is_missing_here = [float(store is not None and name not in cached) for name in reader.names]
    is_missing = processes.total(torch.tensor(is_missing_here)).bool().tolist()
    if any(is_missing):
        missing_stages = [stage for stage, missing in zip(reader.stages, is_missing) if missing]
        missing_reader = _Reader(reader.model, missing_stages, reader.pool, norm=norm)
        # every pass gives logits, which may be cached already
        names_to_write = [name for name in missing_reader.names if name not in cached]
        _write_layers(missing_reader, scan, store, names_to_write)
        if store is not None:
            written, _ = store.recall(names_to_write)
            cached.update(written)
    else:
        share_of_process = range(processes.index, len(scan.split), processes.count)
        scan.advance(len(share_of_process))
    if store is None:
        return None
    in_order = [cached[name] for name in reader.names]  # the last are the logits
    return Features(
        alias=reader.model.alias,
        layers=reader.layers,
        values=tuple(in_order[:-1]),
        logits=in_order[-1],
        pool=reader.pool,
        notes=tuple(notes),
    )


def _write_layers(
    reader: "_Reader", scan: _Scan, store: "FeatureCache | None", names: Sequence[str]
) -> None:
    """Read the layers of a reader at all images, and write those with these names to the cache.

    store: the cache in the first process; None in the others, which only read their share.
    """
    files = dict[str, BinaryIO]()
    with ExitStack() as stack:
        for parts in scan.chunks(reader):
            if store is None:
                continue
            for name, part in zip(reader.names, parts):
                if name not in names:
                    continue
                if name not in files:  # the first chunk says how wide the layer is
                    shape = (len(scan.split), part.shape[1])
                    files[name] = stack.enter_context(store.writing(name, shape))
                files[name].write(part.numpy().astype("<f4", copy=False).tobytes())


def patch_tokens(
    model: Model,
    images: Images,
    layers: Sequence[LayerChoice] = (-1,),
    *,
    norm: bool = True,
    batch_size: int | None = None,
) -> tuple[Float[Tensor, "images rows columns dim"], ...]:
    """Return the tokens of the patches (a CNN's cells) of layers on their grid, in one pass.

    They are without prefix tokens, fp32 on the CPU.

    layers: the index of each layer from 0, -1 for the last. "embedding" stands for the patches that
        enter block 0, which are read without a norm.
    norm: True to apply the model's final norm. If the model applies it to the pooled vector only,
        it is applied to each token here.

    Raises UnsupportedError if the order of the tokens is unknown.
    """
    chosen = list[FeatureStage]()
    for layer in layers:
        (stage,) = _choose_layers(model, layer)
        chosen.append(stage)
    reader = _Reader(model, chosen, "mean", norm=norm)  # only for its final norm
    parts = dict[FeatureStage, list[Tensor]]()
    for stage in chosen:
        if stage.grid is None:
            raise UnsupportedError(
                f"expected tokens with a place in the image, found {stage.title} of {model.alias}, "
                "whose order is unknown; try a ViT or a CNN"
            )

    def take(stage: FeatureStage, tokens: Tokens) -> None:
        """Add the patches of a batch; called after each stage."""
        patches = reader.normalise(stage, tokens[:, len(stage.prefix) :])
        # cloned, because a later block may write into the same memory
        parts.setdefault(stage, []).append(patches.float().cpu().clone())

    with torch.no_grad(), evaluating(model), watching_stages(model, chosen, take):
        for batch in images.split(batch_size or fitting_batch_size(model)):
            model(batch.to(model.device))
    on_grids = list[Tensor]()
    for stage in chosen:
        assert stage.grid is not None  # checked above
        on_grids.append(torch.cat(parts[stage]).unflatten(1, stage.grid))
    return tuple(on_grids)


class _Reader:
    """Reads layers of a model in one forward pass for each batch.

    Tokens are pooled during the pass and not kept.

    model: the model.
    stages: the layers that are read.
    pool: the tokens that a vector is made of.
    names: the name of each layer's file; the last is that of the logits.
    pools: the pooling of each layer; it differs from `pool` for the embedding.
    norms: the model's final norm, for the layers that it is applied to.
    layers: the description of each layer.
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
            is_embedding = stage.index is None
            # the CLS token of the embedding is the same for every image
            self.pools[stage] = "mean" if is_embedding else self.pool
            if final is not None and not is_embedding and final.width == stage.width:
                self.norms[stage] = final
        self.layers = tuple(self._layer(stage) for stage in chosen)

    def _layer(self, stage: FeatureStage) -> FeatureLayer:
        dim = stage.width
        if self.pools[stage] == "cls+mean":
            dim *= 2
        norm = self.norms.get(stage)
        return FeatureLayer(
            index=stage.index,
            title=stage.title,
            kind=stage.kind,
            module=stage.module,
            dim=dim,
            norm=None if norm is None else norm.module,
        )

    def read(self, images: Images) -> list[Tensor]:
        """Return the vectors (batch, dim) of each layer, then the logits (batch, classes).

        They are fp32, on the CPU.
        """
        vectors: dict[int | None, Tensor] = {}

        def take(stage: FeatureStage, tokens: Tokens) -> None:
            """Pool the tokens of a stage; called after each stage."""
            pool = self.pools[stage]
            parts = list[Tensor]()
            if "cls" in pool:
                parts.append(self.normalise(stage, tokens[:, stage.prefix.index("cls")]))
            if "mean" in pool:
                patches = tokens[:, len(stage.prefix) :]
                # as in the model: the mean of normalised tokens, or (timm's fc_norm) the
                # normalised mean of tokens
                norm_is_on_tokens = stage in self.norms and self.norms[stage].on_tokens
                if norm_is_on_tokens:
                    parts.append(self.normalise(stage, patches).mean(1))
                else:
                    parts.append(self.normalise(stage, patches.mean(1)))
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

    def join(self, batches: Sequence[Sequence[Tensor]]) -> Features:
        """Return the features of all batches, each as `read` returns it."""
        # from the layers of each batch to the batches of each layer; the last are the logits
        joined = [torch.cat(parts) for parts in zip(*batches)]
        return Features(
            alias=self.model.alias,
            layers=self.layers,
            values=tuple(joined[:-1]),
            logits=joined[-1],
            pool=self.pool,
        )

    def normalise(self, stage: FeatureStage, tokens: Tensor) -> Tensor:
        """Return the tokens of a layer after the final norm, if it is applied to this layer."""
        if stage not in self.norms:
            return tokens
        norm = self.model.module.get_submodule(self.norms[stage].module)
        normalised: Tensor = norm(tokens)
        return normalised


def resolve_pool(model: Model, pool: FeaturePool | None) -> FeaturePool:
    """Return the pooling, or for None that of the classifier.

    Raises UnsupportedError if the pooling takes CLS and the model has none.
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


def _choose_layers(
    model: Model, layer: LayerChoice | Sequence[int] | None, *, embedding: bool = False
) -> tuple[FeatureStage, ...]:
    """Return the layers with these indices in their order, without repeats; for None all layers.

    layer: an index from 0 (-1 for the last), several indices, None, or "embedding" for the
        embedding only.
    embedding: True to return also the embedding, as the first layer.
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
