"""Folders of images, by example."""

from collections.abc import Callable
from pathlib import Path
from typing import Final

from tests.kit.readables.example import WNIDS, Example, classes, parts, picture


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


def _dotted(root: Path) -> None:
    classes(root)
    picture(root / "..%2Felk" / "0.png", "elk")


def _linked(root: Path) -> None:
    classes(root, count=1)
    picture(root / ".cache" / "1.png", "dog")
    (root / "dog" / "more").symlink_to(root / ".cache")
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
    Example(
        "a folder of images whose name begins with a dot", _dotted, "read, with a note", "left out"
    ),
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
