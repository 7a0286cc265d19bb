"""What `vitlens features` draws of single images: colours of patches, matches, neighbours, heads, prompts."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from vitlens.figures.features_patches import Matches, correspondence_lines, patch_colour_rows
from vitlens.figures.features_retrieval import Found, retrieval_sheet
from vitlens.figures.features_templates import Wording, template_chart
from vitlens.figures.overlays import overlay_rows
from vitlens.files import RunRecord
from vitlens.runs.features_record import HEADS, aliases_of, chance_of, has_matches, has_table, heads_figures
from vitlens.runs.report import Drawn


def draw_looks(record: RunRecord) -> Iterator[Drawn]:
    """The figures of the images themselves, model by model."""
    yield from _patches(record)
    for alias in aliases_of(record):
        if has_matches(record, alias):
            yield _matches(record, alias)
        if record.has_arrays(f"retrieval-{alias}"):
            yield _retrieval(record, alias)
        if record.has_arrays(f"heads-{alias}"):
            yield from _heads(record, alias)
        yield from _language(record, alias)


def _patches(record: RunRecord) -> Iterator[Drawn]:
    if not record.has_arrays("patches"):
        return
    found: Any = record.arrays("patches")
    colours = {alias: found[f"colours_{alias}"] for alias in aliases_of(record) if f"colours_{alias}" in found}
    if colours:
        figure = patch_colour_rows(
            images=np.asarray(found["pixels"]) / 255,
            colours=colours,
            title="Patches coloured by their features: the first three principal components as red, green, blue",
        )
        caption = (
            "Patches of one colour have like features, within an image and across images of the same row (Oquab 2023). "
            "Colours mean nothing across models, and three components are a small part of the space (table below)."
        )
        yield Drawn("patches", figure, caption)


def _matches(record: RunRecord, alias: str) -> Drawn:
    found: Any = record.arrays(f"matches-{alias}")
    first, second, names = (np.asarray(found[key]) for key in ("first", "second", "names"))
    rows, columns = (int(side) for side in np.asarray(found["grid"]))
    places = [place for place in range(len(names)) if len(found[f"similarity_{place}"])]
    matches = [
        Matches(found[f"sources_{place}"], found[f"targets_{place}"], found[f"similarity_{place}"], (rows, columns))
        for place in places
    ]
    figure = correspondence_lines(
        pairs=[(first[place] / 255, second[place] / 255) for place in places],
        matches=matches,
        titles=[str(names[place]) for place in places],
        title=f"Patches that match best, of an image and its nearest neighbour, in {alias}",
    )
    caption = (
        "An arc joins two patches each of which is, of all patches of the other image, the most similar to the other "
        "(cosine). At most 15 are drawn, the most similar. Arcs between like parts say that features know parts; "
        "position embeddings alone also join what lies at the same place."
    )
    return Drawn(f"matches_{alias}", figure, caption)


def _retrieval(record: RunRecord, alias: str) -> Drawn:
    found: Any = record.arrays(f"retrieval-{alias}")
    same = found.get("same")
    queries = [
        Found(
            np.asarray(found["queries"][index]) / 255,
            str(found["query_names"][index]),
            np.asarray(found["neighbours"][index]) / 255,
            [str(name) for name in found["names"][index]],
            found["similarity"][index],
            None if same is None else [bool(one) for one in same[index]],
        )
        for index in range(len(found["queries"]))
    ]
    figure = retrieval_sheet(found=queries, title=f"Nearest images in the last layer's features of {alias} (cosine)")
    framed = "" if same is None else "; framed: whether they are of its class"
    caption = (
        f"Each query's nearest among {_searched(record)}, the nearest first, with their cosine similarity{framed}. The "
        "nearest there is need not be near."
    )
    return Drawn(f"retrieval_{alias}", figure, caption)


def _searched(record: RunRecord) -> str:
    """Where the neighbours come from."""
    options: Any = record.config["options"]
    if options.get("show"):
        return "the images shown"
    bank = record.config.get("bank")
    return "the images themselves" if bank is None else f"the {int(str(bank)):,} training images"


def _heads(record: RunRecord, alias: str) -> Iterator[Drawn]:
    found: Any = record.arrays(f"heads-{alias}")
    maps, reading, layer = np.asarray(found["maps"]), str(found["reading"]), int(found["layer"]) + 1
    for place, name in enumerate(heads_figures(record, alias)):
        start = HEADS * place
        part = 100 * maps[:, start : start + HEADS]
        figure = overlay_rows(
            images=np.asarray(found["pixels"]) / 255,
            maps=part,
            titles=[f"head {start + index + 1}" for index in range(part.shape[1])],
            title=f"What {reading} looks at in layer {layer} of {alias}, head by head",
            label="% of the attention",
        )
        caption = (
            "The share of its attention that each head gives to each patch. A head that looks at a part of the image "
            "need not use it: what that part does is shown by removing the head (vitlens ablate). In self-supervised "
            "ViTs some heads part object from background (Caron 2021)."
        )
        yield Drawn(name, figure, caption)


def _language(record: RunRecord, alias: str) -> Iterator[Drawn]:
    rows = [row for row in record.table("templates") if row["model"] == alias] if has_table(record, "templates") else []
    if rows:
        words = [_wording(row) for row in rows]
        figure = template_chart(
            ensemble=words[0],
            templates=words[1:],
            chance=chance_of(record),
            title=f"Zero-shot accuracy of {alias} by template",
        )
        caption = (
            "The same images and class names in other words. Filled dots differ from the ensemble by McNemar's exact "
            "test after Holm's correction; the spread of the dots is what the wording alone does."
        )
        yield Drawn(f"templates_{alias}", figure, caption)
    if record.has_arrays(f"prompts-{alias}"):
        found: Any = record.arrays(f"prompts-{alias}")
        prompts = [str(prompt) for prompt in found["prompts"]]
        figure = overlay_rows(
            images=np.asarray(found["pixels"]) / 255,
            maps=np.asarray(found["maps"]),
            titles=[prompt if len(prompt) < 24 else f"{prompt[:22]}…" for prompt in prompts],
            title=f"What of the image speaks, through attention, for a text: relevance in {alias}",
            label="relevance",
        )
        caption = (
            "Relevance (Chefer 2021) of the similarity of image and text. What every prompt lights up alike says more "
            "of the image than of the text."
        )
        yield Drawn(f"prompts_{alias}", figure, caption)


def _wording(row: Mapping[str, object]) -> Wording:
    value, low, high = (float(str(row[key])) for key in ("accuracy", "low", "high"))
    p = row.get("p_holm")
    return Wording(str(row["template"]), value, low, high, p is not None and float(str(p)) <= 0.05)
