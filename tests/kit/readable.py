"""Everything that is read, noted or refused: folders, tables, masks and weights, by example.

The tests try every entry; docs/readable.md is made from the same list (`python -m docs.make`).
"""

import argparse
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, Literal

import numpy as np
import torch
from PIL import Image, ImageFilter
from safetensors.torch import save_file
from torch import Tensor

import vitlens

Outcome = Literal["read", "read, with a note", "refused"]
GREYS: Final = {
    "cat": 40,
    "dog": 80,
    "elk": 120,
    "tench": 40,
    "goldfish": 80,
    "valid": 40,
    "invalid": 80,
    "caf\u00e9": 40,
    "great_dane": 80,
    "007": 120,
}
WNIDS: Final = ("n01440764", "n01443537")  # tench, goldfish
OBJECT: Final = (slice(10, 30), slice(12, 40))  # rows and columns of the object of a mask
SIZE: Final = (48, 64)


@dataclass(frozen=True)
class Example:
    """An example of what can be loaded, or is refused.

    what: in words, for the documentation; make: writes it into a folder; outcome: what loading it
    does; meaning: what it is read as, or what the refusal asks for.
    """

    what: str
    make: Callable[[Path], object]
    outcome: Outcome
    meaning: str


def picture(path: Path, name: str, *, size: tuple[int, int] = (8, 6), **how: Any) -> None:
    """Write an image whose grey level shows its class."""
    path.parent.mkdir(parents=True, exist_ok=True)
    grey = GREYS[name]
    Image.new("RGB", size, (grey, grey, grey)).save(path, **how)


def classes(
    root: Path, *, names: tuple[str, ...] = ("cat", "dog"), count: int = 2, suffix: str = ".png"
) -> None:
    """Write a folder for each class."""
    for name in names:
        for number in range(count):
            picture(root / name / f"{number}{suffix}", name)


def parts(*names: str, below: str = "") -> Callable[[Path], None]:
    """Write parts of these names with class folders."""

    def make(root: Path) -> None:
        for name in names:
            classes(root / name / (name if below == "again" else below))

    return make


def _with_flat_test(root: Path) -> None:
    parts("train", "val")(root)
    picture(root / "test" / "0.png", "elk")


def _tiny_imagenet(root: Path) -> None:
    for part in ("train", "val"):
        for wnid, name in zip(WNIDS, ("tench", "goldfish")):
            picture(root / part / wnid / "images" / "0.png", name)
    picture(root / "test" / "images" / "0.png", "elk")


def _wnids(root: Path) -> None:
    for wnid, name in zip(WNIDS, ("tench", "goldfish")):
        picture(root / wnid / "0.png", name)


def _junk(root: Path) -> None:
    classes(root)
    for name in ("@eaDir", "lost+found", "#recycle", "__MACOSX", ".ipynb_checkpoints"):
        picture(root / name / "0.png", "elk")


def _linked(root: Path) -> None:
    classes(root, count=1)
    picture(root / ".elsewhere" / "1.png", "dog")
    (root / "dog" / "more").symlink_to(root / ".elsewhere")
    (root / "dog" / "loop").symlink_to(root / "dog")


def _suffixes(root: Path) -> None:
    for number, (suffix, kind) in enumerate(
        (("jfif", "JPEG"), ("jpe", "JPEG"), ("AVIF", "AVIF"), ("webp", "WEBP"))
    ):
        picture(root / "cat" / f"{number}.{suffix}", "cat", format=kind, quality=100)
    picture(root / "dog" / "without_a_suffix", "dog", format="PNG")


def _unknown_suffixes(root: Path) -> None:
    picture(root / "cat" / "0.dat", "cat", format="PNG")
    picture(root / "dog" / "0.001", "dog", format="PNG")


def _copies(root: Path) -> None:
    classes(root)
    for name in ("0.png.bak", "0.png~", "0.png.part"):
        picture(root / "cat" / name, "dog", format="PNG")


def _half_labelled(root: Path) -> None:
    classes(root / "labeled")
    picture(root / "unlabeled" / "0.png", "elk")


def _with_unlabelled(root: Path) -> None:
    classes(root)
    picture(root / "Unlabelled" / "0.png", "elk")


def _half_labelled_train(root: Path) -> None:
    classes(root / "train" / "labeled")
    picture(root / "train" / "unlabeled" / "0.png", "elk")
    classes(root / "test")


def _heic(root: Path) -> None:
    classes(root)
    (root / "elk").mkdir()
    (root / "elk" / "0.heic").write_bytes(b"\0\0\0\x18ftypheic" + bytes(40))


def _cases(root: Path) -> None:
    classes(root / "train")
    classes(root / "test", names=("cat",))
    picture(root / "test" / "Dog" / "0.png", "dog")


def _flat(*names: str) -> Callable[[Path], None]:
    def make(root: Path) -> None:
        for name in names:
            picture(root / name / "0.png", "cat")

    return make


def _flat_masks(root: Path) -> None:
    classes(root / "images")
    picture(root / "masks" / "0.png", "cat")


def _beside_masks(root: Path) -> None:
    classes(root)
    classes(root / "masks")


def _yolo(root: Path) -> None:
    for part in ("train", "valid"):
        picture(root / part / "images" / "0.png", "cat")
        (root / part / "labels").mkdir()


def _unlike(root: Path) -> None:
    for part, names in (
        ("train", ("caf\u00e9", "great_dane", "007")),
        ("test", ("cafe\u0301", "Great Dane", "7")),
    ):
        for name, folder in zip(("cat", "dog", "elk"), names):
            picture(root / part / folder / "0.png", name)


def _unknown_test(root: Path) -> None:
    parts("train", "val")(root)
    for name in ("unknown", "other"):
        picture(root / "test" / name / "0.png", "elk")


def _videos(root: Path) -> None:
    classes(root)
    (root / "elk").mkdir()
    (root / "elk" / "0.mp4").write_bytes(b"\0\0\0\x18ftypisom" + bytes(40))


def _beside_a_picture(root: Path) -> None:
    parts("train", "test")(root / "archive" / "data")
    picture(root / "logo.png", "elk")


def _link_to_itself(root: Path) -> None:
    classes(root)
    (root / "loop").symlink_to("loop")


def _disjoint(root: Path) -> None:
    classes(root / "train")
    classes(root / "test", names=("valid", "elk"))


def _files(**contents: bytes) -> Callable[[Path], None]:
    def make(root: Path) -> None:
        root.mkdir(parents=True, exist_ok=True)
        for name, content in contents.items():
            (root / name.replace("__", ".")).write_bytes(content)

    return make


FOLDERS: Final = (
    Example(
        "a folder a class", classes, "read", "classes by name; a seeded fifth is held out for test"
    ),
    Example("`train/` and `test/` with class folders", parts("train", "test"), "read", "the parts"),
    Example(
        "`Training/` and `Testing/`", parts("Training", "Testing"), "read", "the parts, in any case"
    ),
    Example(
        "`Train_set/` and `validation/`", parts("Train_set", "validation"), "read", "the parts"
    ),
    Example("`train2017/` and `val2017/`", parts("train2017", "val2017"), "read", "the parts"),
    Example("`trainset/` and `dev/`", parts("trainset", "dev"), "read", "the parts"),
    Example(
        "`seg_train/seg_train/`, `seg_test/seg_test/`",
        parts("seg_train", "seg_test", below="again"),
        "read",
        "the parts, one folder deeper",
    ),
    Example(
        "`train/`, `val/` and a flat `test/` without labels",
        _with_flat_test,
        "read, with a note",
        "`val/` is the test part",
    ),
    Example(
        "Tiny ImageNet with `val/` in class folders",
        _tiny_imagenet,
        "read, with a note",
        "`val/` is the test part",
    ),
    Example(
        "`dataset/<class>/`, one folder too deep",
        lambda root: classes(root / "dataset"),
        "read, with a note",
        "the folders below",
    ),
    Example(
        "`archive/train/` and `archive/test/`",
        lambda root: parts("train", "test")(root / "archive"),
        "read, with a note",
        "the parts below",
    ),
    Example(
        "classes that are called like parts: `valid/`, `invalid/`",
        lambda root: classes(root, names=("valid", "invalid")),
        "read",
        "classes, as they hold images themselves",
    ),
    Example(
        "wnid folders (`n01440764`)", _wnids, "read", "ImageNet's names, of the classes that occur"
    ),
    Example(
        "a class in two spellings: `dog/` and `Dog/`",
        _cases,
        "read",
        "one class, where no part has both",
    ),
    Example(
        "`train/`, `val/` and a `test/` of other folders",
        _unknown_test,
        "read, with a note",
        "`val/` is the test part",
    ),
    Example("`trainval/` and `test/`", parts("trainval", "test"), "read", "the parts"),
    Example(
        "parts that write a class in two ways (`great_dane`, `Great Dane`; `007`, `7`; accents)",
        _unlike,
        "read",
        "one class",
    ),
    Example(
        "a class of other files, as of videos", _videos, "read, with a note", "left out and named"
    ),
    Example(
        "`archive/data/train/` beside an image",
        _beside_a_picture,
        "read, with a note",
        "the parts below; the image is left out",
    ),
    Example("a link to itself", _link_to_itself, "read", "ignored"),
    Example("`@eaDir/`, `lost+found/`, `__MACOSX/`, hidden folders", _junk, "read", "ignored"),
    Example("linked folders and loops of links", _linked, "read", "followed, each folder once"),
    Example(
        "images with an unknown suffix (`.dat`, `.001`)",
        _unknown_suffixes,
        "read",
        "by their first bytes",
    ),
    Example("copies (`.bak`, `~`, `.part`)", _copies, "read", "ignored"),
    Example(
        "`labeled/<class>/` beside `unlabeled/`",
        _half_labelled,
        "read, with a note",
        "the folders of `labeled/`",
    ),
    Example("`unlabeled/` beside class folders", _with_unlabelled, "read, with a note", "no class"),
    Example(
        "`train/labeled/<class>/` beside `train/unlabeled/`",
        _half_labelled_train,
        "read, with a note",
        "the labelled ones",
    ),
    Example(
        ".jfif, .jpe, .avif, .webp, and images without a suffix",
        _suffixes,
        "read",
        "by suffix or first bytes",
    ),
    Example(
        "HEIC, JP2, JPEG XL, SVG, raw photographs",
        _heic,
        "read, with a note",
        "left out, counted and named; save them as PNG or JPEG",
    ),
    Example(
        "folders that all hold the same folders (folds, domains)",
        parts("fold1", "fold2"),
        "refused",
        "name one of them, or call them train/ and test/",
    ),
    Example(
        "`images/<class>/` beside flat `masks/`",
        _flat_masks,
        "refused",
        "masks in folders as their images",
    ),
    Example(
        "class folders beside `masks/<class>/`",
        _beside_masks,
        "refused",
        "`images/<class>/` and `masks/<class>/`",
    ),
    Example(
        "`images/` beside `Masks/`",
        _flat("images", "Masks"),
        "refused",
        "call them `images/` and `masks/`",
    ),
    Example(
        "`JPEGImages/` beside `SegmentationClass/`",
        _flat("JPEGImages", "SegmentationClass"),
        "refused",
        "`images/` and `masks/`, or `--images`",
    ),
    Example(
        "flat `train/` and `test/`",
        _flat("train", "test"),
        "refused",
        "class folders, or `--labels FILE.csv`",
    ),
    Example(
        "`train/images/` beside `train/labels/` (detection)",
        _yolo,
        "refused",
        "class folders, or `--labels FILE.csv`",
    ),
    Example(
        "parts without a class in common", _disjoint, "refused", "the same names in both parts"
    ),
    Example(
        "`train/` beside `train_set/`",
        parts("train_set", "training", "test"),
        "refused",
        "one training part",
    ),
    Example(
        "CIFAR's batches",
        _files(data_batch_1=b"", batches__meta=b""),
        "refused",
        "`--data cifar10 --data-dir FOLDER`",
    ),
    Example(
        "a data set of `save_to_disk`",
        _files(dataset_info__json=b"{}", state__json=b"{}"),
        "refused",
        "save its images into class folders",
    ),
    Example(
        "a folder of archives or tables (tar, zip, Parquet, TFRecord)",
        _files(a__tar=b"x"),
        "refused",
        "unpack them",
    ),
)


def _labelled(
    text: str | bytes, *, names: tuple[str, str, str] = ("a", "b", "c")
) -> Callable[[Path], Path]:
    """Write images a.png (a cat), b.png and c.png (dogs), and a table."""

    def make(root: Path) -> Path:
        folder = root / "flat"
        for place, name in zip(names, ("cat", "dog", "dog")):
            picture(folder / f"{place}.png", name)
        table = root / "labels.csv"
        table.write_bytes(text if isinstance(text, bytes) else text.encode())
        return table

    return make


TABLES: Final = (
    Example(
        "a line of titles, commas",
        _labelled("file,label\na.png,cat\nb.png,dog\nc.png,dog\n"),
        "read",
        "names",
    ),
    Example("no titles", _labelled("a.png,cat\nb.png,dog\nc.png,dog\n"), "read", "names"),
    Example(
        "labels first", _labelled("label,file\ncat,a.png\ndog,b.png\ndog,c.png\n"), "read", "names"
    ),
    Example(
        "semicolons, a byte order mark, quotes",
        _labelled('\ufeff"file";"label"\n"a.png";"cat"\nb.png;dog\nc.png;dog'),
        "read",
        "names",
    ),
    Example(
        "tabs, in UTF-16",
        _labelled("file\tlabel\na.png\tcat\nb.png\tdog\nc.png\tdog\n".encode("utf-16")),
        "read",
        "names",
    ),
    Example("blanks", _labelled("a.png cat\nb.png dog\nc.png dog\n"), "read", "names"),
    Example("names without suffix", _labelled("id,class\na,cat\nb,dog\nc,dog\n"), "read", "names"),
    Example(
        "paths",
        _labelled(
            "file,label\n/data/a.png,cat\nflat\\b.png,dog\nx/c.png,dog\n", names=("a", "b", "x/c")
        ),
        "read",
        "the last parts of a path count",
    ),
    Example(
        "further columns beside one that is called label",
        _labelled("id,age,label\na,3,cat\nb,4,dog\nc,5,dog\n"),
        "read",
        "names",
    ),
    Example(
        "wnids, with boxes as Kaggle's ImageNet",
        _labelled(
            "ImageId,PredictionString\na,n01440764 1 2 3 4 \nb,n01443537 1 2 3 4 \nc,n01443537 5 6 "
            "7 8\n"
        ),
        "read",
        "ImageNet's names",
    ),
    Example(
        "a column called split, of test and val",
        _labelled("file,label,split\na.png,cat,test\nb.png,dog,Test\nc.png,dog,val\n"),
        "read, with a note",
        "the parts",
    ),
    Example(
        "a column called part, of other words",
        _labelled("file,part,label\na.png,left,cat\nb.png,right,dog\nc.png,right,dog\n"),
        "read",
        "a further column",
    ),
    Example(
        "a column called partition, of other words",
        _labelled("file,label,partition\na.png,cat,left\nb.png,dog,right\nc.png,dog,right\n"),
        "refused",
        "train, val or test",
    ),
    Example(
        "class indices",
        _labelled("file,label\na.png,0\nb.png,1\nc.png,1.0\n"),
        "read",
        "indices from 0",
    ),
    Example(
        "indices that count from 1",
        _labelled("file,label\na.png,1\nb.png,2\nc.png,2\n"),
        "read, with a note",
        "indices from 0, as they are",
    ),
    Example(
        "labels first, with files that are called 0.png, 1.png, 2.png",
        _labelled("label,id\n1,2\n1,1\n0,0\n", names=("0", "1", "2")),
        "read",
        "the column that is not called label has the files",
    ),
    Example(
        "names of files with accents in one character or two",
        _labelled(
            "file,label\ne\u0301.png,cat\n\u00ea.png,dog\n\u00fc.png,dog\n",
            names=("\u00e9", "\u00ea", "\u00fc"),
        ),
        "read",
        "names",
    ),
    Example(
        "lines that end as on an old Mac",
        _labelled("file,label\ra.png,cat\rb.png,dog\rc.png,dog\r"),
        "read",
        "names",
    ),
    Example(
        "images without a line, lines without an image",
        _labelled("a.png,cat\nb.png,dog\nz.png,dog\n"),
        "read, with a note",
        "left out and counted",
    ),
    Example(
        "an empty label, or NaN",
        _labelled("file,label\na.png,nan\nb.png,dog\n"),
        "refused",
        "leave the line out",
    ),
    Example(
        "two labels for one image", _labelled("a.png,cat\na.png,dog\n"), "refused", "leave one out"
    ),
    Example(
        "the name of several images",
        _labelled("file,label\nb.png,cat\n", names=("x/b", "y/b", "c")),
        "refused",
        "their paths",
    ),
    Example(
        "commas in a name without quotes",
        _labelled("file,label\na.png,cat, grey\nb.png,dog\nc.png,dog\n"),
        "refused",
        "quotes",
    ),
    Example(
        "negative or fractional numbers",
        _labelled("a.png,-1\nb.png,0.5\n"),
        "refused",
        "indices or names",
    ),
    Example("one column", _labelled("490\n361\n171\n"), "refused", "FILE,LABEL lines"),
    Example(
        "one column a class (one-hot)",
        _labelled("image,cat,dog\na,1,0\nb,0,1\nc,0,1\n"),
        "refused",
        "one column of labels",
    ),
    Example(
        "no name that is an image's",
        _labelled("file,label\nz.png,cat\n"),
        "refused",
        "check the names",
    ),
    Example("no text", _labelled(b"\xff\xfe\x00"), "refused", "save it as UTF-8"),
)


def _masked(
    values: np.ndarray | Image.Image, *, suffix: str = ".png", turned: int = 1
) -> Callable[[Path], None]:
    """Write an image with a bright object, and a mask; turned: the image's EXIF orientation."""

    def make(root: Path) -> None:
        for place in ("images", "masks"):
            (root / place).mkdir(parents=True)
        pixels = np.zeros((*SIZE, 3), np.uint8)
        pixels[OBJECT] = 255
        exif = Image.Exif()
        exif[0x0112] = turned
        Image.fromarray(pixels).save(root / "images" / "a.png", exif=exif.tobytes())
        image = values if isinstance(values, Image.Image) else Image.fromarray(values)
        image.save(root / "masks" / f"a{suffix}")

    return make


def levels(inside: int = 255, outside: int = 0) -> np.ndarray:
    """Return a mask of two values."""
    mask = np.full(SIZE, outside, np.uint8)
    mask[OBJECT] = inside
    return mask


def _more(*values: int) -> np.ndarray:
    """Return a mask of further values in strips."""
    mask = levels(values[0])
    for number, value in enumerate(values[1:]):
        mask[32 + 4 * number : 36 + 4 * number] = value
    return mask


def _palette(mask: np.ndarray, colours: Mapping[int, tuple[int, int, int]]) -> Image.Image:
    image = Image.fromarray(mask).convert("L")
    image = Image.frombytes("P", image.size, image.tobytes())
    table = [0] * 768
    for index, colour in colours.items():
        table[3 * index : 3 * index + 3] = colour
    image.putpalette(table)
    return image


def _transparent() -> Image.Image:
    image = Image.new("RGBA", SIZE[::-1])
    image.putalpha(Image.fromarray(levels()))
    return image


_VOC: Final = {5: (128, 0, 128), 255: (224, 224, 192)}
_RED: Final = {0: (0, 0, 0), 1: (128, 0, 0)}
_INVERSE: Final = {0: (255, 255, 255), 1: (0, 0, 0)}
_TURNED: Final = Image.fromarray(levels()).transpose(Image.Transpose.ROTATE_270)


def _in_classes(root: Path) -> None:
    """Write the image and the mask into a class's folder, and the same names into another."""
    _masked(levels())(root / "made")
    for place in ("images", "masks"):
        for name in ("cat", "dog"):
            (root / place).mkdir(exist_ok=True)
            shutil.copytree(root / "made" / place, root / place / name)
    shutil.rmtree(root / "made")


def _two_masks(root: Path) -> None:
    _masked(levels())(root)
    shutil.copy(root / "masks" / "a.png", root / "masks" / "a.bmp")


MASKS: Final = (
    Example("`images/<class>/` with `masks/<class>/`", _in_classes, "read", "masks and labels"),
    Example("two masks of one image (`a.png`, `a.bmp`)", _two_masks, "refused", "move one away"),
    Example("0 and 255", _masked(levels()), "read", "the larger value"),
    Example("0 and 1", _masked(levels(1)), "read", "the larger value"),
    Example("1 bit", _masked(Image.fromarray(levels()).convert("1")), "read", "white"),
    Example("JPEG", _masked(levels(), suffix=".jpg"), "read", "the brighter half"),
    Example(
        "soft edges",
        _masked(Image.fromarray(levels()).filter(ImageFilter.GaussianBlur(0.7))),
        "read",
        "the brighter half",
    ),
    Example("16 bits", _masked(levels().astype(np.uint16) * 257), "read", "the larger value"),
    Example("a palette of two colours", _masked(_palette(levels(1), _RED)), "read", "index 1"),
    Example(
        "a palette of greys",
        _masked(_palette(np.where(levels() > 0, 0, 1).astype(np.uint8), _INVERSE)),
        "read",
        "white",
    ),
    Example(
        "a colour on black",
        _masked(_palette(levels(1), {1: (0, 0, 1)}).convert("RGB")),
        "read",
        "the colour",
    ),
    Example(
        "opaque RGBA",
        _masked(Image.fromarray(levels()).convert("RGBA")),
        "read",
        "the larger value",
    ),
    Example(
        "a turned photograph (EXIF), the mask as stored",
        _masked(levels(), turned=6),
        "read",
        "turned with it",
    ),
    Example(
        "a turned photograph (EXIF), the mask as displayed",
        _masked(_TURNED, turned=6),
        "read",
        "as it is",
    ),
    Example(
        "a palette of classes with a border of 255 (VOC)",
        _masked(_palette(_more(5, 255), _VOC)),
        "refused",
        "one mask an object, of 0 and 255",
    ),
    Example("class indices", _masked(_more(1, 2)), "refused", "one mask an object, of 0 and 255"),
    Example(
        "instances", _masked(_more(100, 200, 255)), "refused", "one mask an object, of 0 and 255"
    ),
    Example(
        "a wide unknown border (trimap)",
        _masked(_more(255, 128)),
        "refused",
        "one mask an object, of 0 and 255",
    ),
    Example(
        "three colours",
        _masked(_palette(_more(1, 2), {1: (0, 150, 0), 2: (150, 0, 0)}).convert("RGB")),
        "refused",
        "one mask an object, of 0 and 255",
    ),
    Example(
        "class indices with a border of 255, in WebP",
        _masked(_more(5, 255), suffix=".webp"),
        "refused",
        "one mask an object, of 0 and 255",
    ),
    Example("WebP of two values", _masked(levels(), suffix=".webp"), "read", "the brighter half"),
    Example("nothing but 0", _masked(levels(0)), "refused", "a mask with an object"),
    Example("1 and 2", _masked(levels(2, 1)), "refused", "0 for the background"),
    Example("an alpha channel", _masked(_transparent()), "refused", "a mask without transparency"),
)


@cache
def weights(prefix: str = "") -> dict[str, Tensor]:
    """Return the weights of a small ViT of ours, with a prefix of every name."""
    state = vitlens.load("vit-micro@random", seed=1).module.state_dict()
    return {f"{prefix}{name}": value for name, value in state.items()}


def _body(prefix: str = "") -> dict[str, Tensor]:
    return {
        name: value
        for name, value in weights(prefix).items()
        if not name.startswith(f"{prefix}head.")
    }


def _saved(content: Callable[[], object], name: str = "weights.pth") -> Callable[[Path], Path]:
    def make(root: Path) -> Path:
        torch.save(content(), root / name)
        return root / name

    return make


def _as_safetensors(root: Path) -> Path:
    save_file(weights(), root / "weights.pth")
    return root / "weights.pth"


def _bytes(content: bytes, name: str = "weights.pth") -> Callable[[Path], Path]:
    def make(root: Path) -> Path:
        (root / name).write_bytes(content)
        return root / name

    return make


def _arrays(root: Path) -> Path:
    np.savez(root / "weights.npz", **{"Transformer/encoder_norm/scale": np.zeros(4)})
    return root / "weights.npz"


def _folder(root: Path) -> Path:
    torch.save(weights(), root / "weights.pth")
    return root


def _options() -> argparse.Namespace:
    return argparse.Namespace(
        lr=0.1, out=Path("runs"), more=SimpleNamespace(a=1), best=np.float64(0.5)
    )


class Unknown:
    """A type of the user's own code."""


def _fc_norm() -> dict[str, Tensor]:
    renamed = {}
    for name, value in weights().items():
        renamed[f"fc_{name}" if name.startswith("norm.") else name] = value
    return renamed


_LORA: Final = "base_model.model.blocks.0.attn.qkv.lora_A.default.weight"
WEIGHTS: Final = (
    Example("a state dict of `torch.save`", _saved(weights), "read", "by name"),
    Example("safetensors, whatever the suffix", _as_safetensors, "read", "by the first bytes"),
    Example(
        "`torch.save` in a file called .safetensors",
        _saved(weights, "weights.safetensors"),
        "read",
        "by the first bytes",
    ),
    Example(
        "`model_best.pth.tar` of timm, with its options",
        _saved(
            lambda: {"state_dict": weights(), "args": _options(), "metric": np.float64(3)},
            "model_best.pth.tar",
        ),
        "read, with a note",
        "the weights; options are not made",
    ),
    Example(
        "a training file of torchvision's references",
        _saved(lambda: {"model": weights(), "optimizer": {"state": {}}, "args": _options()}),
        "read, with a note",
        "the weights",
    ),
    Example(
        "a training file of DINO",
        _saved(
            lambda: {
                "teacher": _body("module.backbone.")
                | {"module.head.mlp.0.weight": torch.zeros(2, 2)},
                "student": _body("module."),
                "args": _options(),
            }
        ),
        "read, with a note",
        "the teacher, without a classifier",
    ),
    Example(
        "averaged weights beside the last ones",
        _saved(lambda: {"state_dict": {"a": torch.zeros(1)}, "state_dict_ema": weights()}),
        "read, with a note",
        "the average",
    ),
    Example(
        "averaged weights as `net_ema`, `swa_model`, `averaged_model`",
        _saved(
            lambda: {
                "net": {"a": torch.zeros(1)},
                "net_ema": weights(),
                "optimizer": {"a": torch.zeros(1)},
            }
        ),
        "read, with a note",
        "the average",
    ),
    Example(
        "`{'ema': {'module': ...}}`",
        _saved(lambda: {"model": {"a": torch.zeros(1)}, "ema": {"module": weights()}}),
        "read, with a note",
        "the average",
    ),
    Example(
        "one state dict under another key",
        _saved(lambda: {"my_network": weights(), "epoch": 3}),
        "read, with a note",
        "that state dict",
    ),
    Example(
        "one state dict at any depth, beside an optimizer's",
        _saved(
            lambda: {"run": {"last": {"my_network": weights()}, "optimizer": {"a": torch.zeros(1)}}}
        ),
        "read, with a note",
        "that state dict",
    ),
    Example(
        "blocks that are compiled, checkpointed or sharded (`blocks.0._orig_mod.`)",
        _saved(
            lambda: {
                name.replace("blocks.0.", "blocks.0._orig_mod."): value
                for name, value in weights().items()
            }
        ),
        "read, with a note",
        "taken out of the names",
    ),
    Example(
        "prefixes of all names: `module._orig_mod.model.net.`",
        _saved(lambda: weights("module._orig_mod.model.net.")),
        "read, with a note",
        "taken off",
    ),
    Example(
        "`model.*` beside `criterion.weight` (Lightning)",
        _saved(lambda: weights("model.") | {"criterion.weight": torch.ones(3)}),
        "read, with a note",
        "the rest is left out",
    ),
    Example(
        "`module.*` beside `n_averaged`",
        _saved(lambda: weights("module.") | {"n_averaged": torch.tensor(3)}),
        "read, with a note",
        "the rest is left out",
    ),
    Example(
        "`model.*` beside `ema_model.*`",
        _saved(
            lambda: (
                {name: value + 1 for name, value in weights("model.").items()}
                | weights("ema_model.")
            )
        ),
        "read, with a note",
        "the average",
    ),
    Example(
        "`base_encoder.*` beside `momentum_encoder.*` (MoCo)",
        _saved(
            lambda: (
                {name: value + 1 for name, value in _body("module.momentum_encoder.").items()}
                | _body("module.base_encoder.")
            )
        ),
        "read, with a note",
        "the base encoder",
    ),
    Example(
        "`backbone.*` beside `classifier.*`",
        _saved(
            lambda: (
                _body("backbone.")
                | {f"classifier.{name}": weights()[f"head.{name}"] for name in ("weight", "bias")}
            )
        ),
        "read, with a note",
        "with the classifier",
    ),
    Example(
        "`backbone.*` beside `head.*`",
        _saved(
            lambda: (
                _body("backbone.")
                | {f"head.{name}": weights()[f"head.{name}"] for name in ("weight", "bias")}
            )
        ),
        "read, with a note",
        "with the classifier",
    ),
    Example("no classifier", _saved(_body), "read, with a note", "features alone"),
    Example(
        "a pretraining of MAE, with decoder",
        _saved(
            lambda: {
                "model": _body()
                | {"mask_token": torch.zeros(2), "decoder_embed.weight": torch.zeros(2, 2)}
            }
        ),
        "read, with a note",
        "the encoder, features alone",
    ),
    Example(
        "`fc_norm` in place of `norm`",
        _saved(_fc_norm),
        "refused",
        "`--model-file` with global_pool='avg'",
    ),
    Example(
        "unmerged adapters (LoRA)",
        _saved(lambda: weights("base_model.model.") | {_LORA: torch.zeros(2, 2)}),
        "refused",
        "merge them first",
    ),
    Example(
        "two state dicts under other keys",
        _saved(lambda: {"first": weights(), "second": weights()}),
        "refused",
        "save one of them",
    ),
    Example(
        "two networks of one form (an ensemble)",
        _saved(lambda: weights("models.0.") | weights("models.1.")),
        "refused",
        "save one of them",
    ),
    Example(
        "a classifier without its bias",
        _saved(lambda: {name: value for name, value in weights().items() if name != "head.bias"}),
        "refused",
        "the whole checkpoint",
    ),
    Example(
        "arrays of NumPy in place of tensors",
        _saved(lambda: {name: value.numpy() for name, value in weights().items()}),
        "refused",
        "torch.from_numpy",
    ),
    Example(
        "int8 without scales",
        _saved(
            lambda: {
                name: value.to(torch.int8) if value.ndim == 2 else value
                for name, value in weights().items()
            }
        ),
        "refused",
        "weights before quantisation",
    ),
    Example(
        "types of your own code (OmegaConf, AttributeDict, a whole model)",
        _saved(lambda: {"state_dict": weights(), "extra": Unknown()}),
        "refused",
        "the command that converts a trusted file",
    ),
    Example(
        "a pointer of git-lfs",
        _bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"),
        "refused",
        "download it again",
    ),
    Example("a web page", _bytes(b"<!DOCTYPE html><html></html>"), "refused", "download it again"),
    Example(
        "ONNX",
        _bytes(b"\x08\x08\x12\x07pytorch" + bytes(40)),
        "refused",
        "torch.save or safetensors",
    ),
    Example(
        "HDF5 (Keras)",
        _bytes(b"\x89HDF\r\n\x1a\n" + bytes(40), "weights.h5"),
        "refused",
        "torch.save or safetensors",
    ),
    Example(
        "msgpack (Flax)",
        _bytes(b"\x81\xa6params\x81\xa1a" + bytes(40), "flax_model.msgpack"),
        "refused",
        "torch.save or safetensors",
    ),
    Example(
        "arrays of JAX (AugReg `.npz`)", _arrays, "refused", "timm's command that converts them"
    ),
    Example(
        "the index of a model in several files",
        _bytes(b'{"weight_map": {}}', "model.safetensors.index.json"),
        "refused",
        "hf:FOLDER",
    ),
    Example(
        "the beginning of a file", _bytes(b"PK\x03\x04" + bytes(99)), "refused", "download it again"
    ),
    Example(
        "an archive", _bytes(b"\x1f\x8b" + bytes(40), "weights.tar.gz"), "refused", "unpack it"
    ),
    Example("a folder", _folder, "refused", "name the file in it"),
    Example("an empty file", _bytes(b""), "refused", "take another copy"),
)


def hub_folder(root: Path, state: Mapping[str, Tensor], **config: object) -> Path:
    """Return a folder of timm's hub, with its weights' path."""
    save_file(
        {name: value.contiguous() for name, value in state.items()}, root / "model.safetensors"
    )
    content = {"architecture": "vit_tiny_patch16_224", "pretrained_cfg": config}
    (root / "config.json").write_text(json.dumps(content))
    return root / "model.safetensors"
