"""The parts of a folder of images, by the usual names; and folders whose folders are no classes,
which are refused.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from vitlens.data.other_data import images_alone
from vitlens.data.walk import class_folders, images_below, images_in
from vitlens.errors import DataError, by_caller
from vitlens.names import plain_name

Role = Literal["train", "test", "val"]
_ROLES: Final[dict[Role, str]] = {
    "train": r"train|training|trn|trainval",
    "test": r"tests?|testing|tst|eval|evaluation|holdout",
    "val": r"val|valid|validation|validate|dev|devel",
}
_KINDS: Final = r"(?:sets?|data|dataset|images?|imgs?|split|part|folder|files)"
_ENDINGS: Final = re.compile(rf"{_KINDS}$")
_FILLERS: Final = re.compile(rf"{_KINDS}|seg|ilsvrc|clsloc")
_IMAGES: Final = frozenset(  # folders of images, whatever their class
    (
        "images",
        "image",
        "imgs",
        "img",
        "jpegimages",
        "photos",
        "pictures",
        "data",
        "raw",
        "original",
        "originals",
    )
)
_ABOUT_IMAGES: Final = frozenset(  # what is known of images, as images
    {
        "masks",
        "mask",
        "labels",
        "label",
        "annotations",
        "annotation",
        "trimaps",
        "segmentation",
        "segmentations",
        "segmentationclass",
        "segmentationobject",
        "groundtruth",
        "ground_truth",
        "gt",
        "depth",
        "thumbnails",
    }
)
_LABELLED: Final = re.compile(rf"(?:labell?ed|annotated)[-_ ]?(?:{_KINDS})?", re.IGNORECASE)
_UNLABELLED: Final = re.compile(
    rf"(?:un[-_ ]?labell?ed|un[-_ ]?annotated|no[-_ ]?labels?)[-_ ]?(?:{_KINDS})?", re.IGNORECASE
)
_DEEPEST: Final = 16  # folders that hold one folder alone


@dataclass(frozen=True)
class Parts:
    """The parts of a folder that hold class folders, and notes about folders that are no parts."""

    train: Path | None = None
    test: Path | None = None
    notes: tuple[str, ...] = ()


def role_of(name: str) -> Role | None:
    """Return the role of a folder by its name in any case (Train, test_set, seg_train, val2017),
    None for none.
    """
    found: set[Role] = set()
    for word in re.findall(r"[a-z]+", re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name).lower()):
        stem = _ENDINGS.sub("", word)
        roles: list[Role] = [role for role, words in _ROLES.items() if re.fullmatch(words, stem)]
        if not roles and not _FILLERS.fullmatch(word):
            return None
        found.update(roles)
    return found.pop() if len(found) == 1 else None


def labelled_folders(folder: Path) -> list[Path]:
    """Return the class folders of a folder, without those that are called unlabeled next to
    others."""
    children = class_folders(folder)
    labelled = [child for child in children if not _UNLABELLED.fullmatch(child.name)]
    return labelled or children


def find_parts(root: Path) -> Parts:
    """Return the parts of a folder, those without class folders left out.

    A part for test is used where one of its class folders is one of the training part: "test"
    first, then "val". Raises DataError where two folders could be the training part, and where no
    test part has a class of the training part.
    """
    by_role: dict[Role, list[Path]] = {"train": [], "test": [], "val": []}
    others: list[str] = []
    unlabelled: list[str] = []
    for child in class_folders(root):
        role = role_of(child.name)
        if role is None:
            others.append(child.name)
        elif holds_class_folders(child):
            by_role[role].append(_without_repetition(child, role))
        else:
            unlabelled.append(child.name)
    train = _only(by_role["train"], root)
    test, rejected = _test_part([*_preferred(by_role["test"]), *_preferred(by_role["val"])], train)
    if train is not None:
        unlabelled += [part.name for part in rejected]
    if train is None and test is None:
        return Parts()
    notes = []
    if unlabelled:
        notes.append(
            "not used, as without class folders of the training part, so without labels: "
            f"{listed(unlabelled)}"
        )
    if others:
        notes.append(f"not used, as beside the parts: {listed(others)}")
    return Parts(train, test, tuple(notes))


def _only(parts: Sequence[Path], root: Path) -> Path | None:
    if len(parts) > 1:
        exact = [part for part in parts if part.name == "train"]
        if len(exact) == 1:
            return exact[0]
        names = " and ".join(f"{part.relative_to(root).parts[0]}/" for part in parts[:3])
        raise DataError(
            f"expected one training part in {root}, found {names}; move the others out of the "
            "folder"
        )
    return parts[0] if parts else None


def _preferred(parts: Sequence[Path]) -> list[Path]:
    """Return parts of one role, those with the plainest names first."""
    return sorted(parts, key=lambda part: (len(part.name), part.name))


def _test_part(parts: Sequence[Path], train: Path | None) -> tuple[Path | None, list[Path]]:
    """Return the first part that has a class of the training part, and those before it that have
    none.
    """
    if train is None:
        return (parts[0] if parts else None), []
    known = {plain_name(folder.name) for folder in labelled_folders(train)}
    rejected: list[Path] = []
    for part in parts:
        if known & {plain_name(folder.name) for folder in labelled_folders(part)}:
            return part, rejected
        rejected.append(part)
    for part in rejected:
        names = [folder.name for folder in labelled_folders(part)]
        if len(names) > 1:
            raise DataError(
                f"expected classes of {train.name}/ in {part}, found {listed(names)}; name the "
                "folders of both parts alike"
            )
    return None, rejected


def holds_class_folders(folder: Path) -> bool:
    """Return True where a folder holds class folders, and not only a folder of images."""
    children = labelled_folders(folder)
    if len(children) == 1 and _is_generic(children[0].name):
        return bool(labelled_folders(children[0]))
    return bool(children)


def _without_repetition(part: Path, role: Role) -> Path:
    """Return the folder of a part's class folders: test_set/test_set/ and test/images/ hold them
    one level deeper.
    """
    children = labelled_folders(part)
    if len(children) == 1 and (role_of(children[0].name) == role or _is_generic(children[0].name)):
        return children[0] if labelled_folders(children[0]) else part
    return part


def unwrapped(root: Path) -> Path:
    """Return the folder of the class folders or parts, below folders that hold one folder alone."""
    folder = root
    result = root
    for _ in range(_DEEPEST):
        children = labelled_folders(folder)
        if len(children) != 1 or role_of(children[0].name) or images_in(children[0]):
            return result
        folder = children[0]
        folders = labelled_folders(folder)
        holds_parts = any(role_of(child.name) and holds_class_folders(child) for child in folders)
        if len(folders) > 1 or holds_parts or (folders and _is_generic(folder.name)):
            result = folder
    return result


def is_unlabelled(folder: Path) -> bool:
    """Return True where all folders are of images or of parts, without class folders in them."""
    children = labelled_folders(folder)
    if not children or any(holds_class_folders(child) for child in children):
        return False
    return all(role_of(child.name) for child in children) or is_of_images(children)


def is_of_images(children: Sequence[Path]) -> bool:
    """Return True for one folder that is called images, without folders of classes in it."""
    return (
        len(children) == 1 and _is_generic(children[0].name) and not labelled_folders(children[0])
    )


def require_classes(folder: Path) -> None:
    """Raise DataError where the folders of a folder are no classes.

    These are parts without class folders, images beside masks, and folders that all hold the same
    folders.
    """
    names = [child.name for child in labelled_folders(folder)]
    if is_unlabelled(folder):
        first = folder / names[0]
        table = by_caller(
            python=f"vitlens.load_data({str(first)!r}, labels='FILE.csv')",
            command=f"--data {first} --labels FILE.csv",
        )
        raise DataError(
            f"expected class folders in {listed(names)} of {folder}, found images without them, so "
            "without labels; "
            f"sort them into a folder a class, give {table}, or {images_alone(first)}"
        )
    about = [name for name in names if name.lower() in _ABOUT_IMAGES]
    images = [name for name in names if _is_generic(name)]
    if images and about and len(images) + len(about) == len(names):
        flat = next((name for name in images if images_in(folder / name)), None)
        if flat and (flat, about[0]) != ("images", "masks"):
            raise DataError(
                f"expected class folders in {folder}, found {flat}/ beside {about[0]}/; if these "
                "are masks, call them "
                f"images/ and masks/, else give {images_alone(folder / flat)}"
            )
        raise DataError(
            f"expected class folders in {folder}, found {images[0]}/ beside {about[0]}/; masks "
            "need their images in images/, in folders of the same names, and for the classes alone "
            "name "
            f"{folder / images[0]}"
        )
    for name in about:
        others = [folder / other for other in names if other not in about]
        if others and _repeats_names(folder / name, others):
            raise DataError(
                f"expected class folders in {folder}, found {name}/ next to them, of their images' "
                "names; for maps and "
                f"masks put the classes into images/ and the masks into masks/, else move {name}/ "
                "away"
            )
    shared = _shared_folders(folder)
    if shared:
        raise DataError(
            f"expected class folders in {folder}, found {listed(names)} that all hold "
            f"{listed(shared)}; name one of them ({folder / names[0]}), or call the parts train/ "
            "and test/"
        )


def _repeats_names(masks: Path, classes: Sequence[Path]) -> bool:
    """Return True where most images of a folder have the names of images in class folders next to
    it.
    """
    stems = {path.stem for folder in classes for path in images_below(folder)}
    listed_masks = [path.stem for path in images_below(masks)]
    return 2 * sum(
        stem in stems or stem.removesuffix("_mask") in stems for stem in listed_masks
    ) > len(listed_masks)


def _shared_folders(folder: Path) -> list[str]:
    """Return the folders that all folders of a folder hold, where these are most of them and they
    hold nothing else.
    """
    contents: list[set[str]] = []
    children = labelled_folders(folder)
    for child in children:
        inner = labelled_folders(child)
        if len(inner) == 1 and _is_generic(inner[0].name):
            inner = labelled_folders(inner[0])
        if not inner or images_in(child):
            return []
        contents.append({inside.name for inside in inner})
    if len(contents) < 2:
        return []
    shared = set.intersection(*contents)
    every = set.union(*contents)
    return sorted(shared) if 2 * len(shared) >= len(every) else []


def _is_generic(name: str) -> bool:
    return name.lower() in _IMAGES or _LABELLED.fullmatch(name) is not None


def listed(names: Sequence[str]) -> str:
    """Return the first names of folders, as text."""
    shown = ", ".join(f"{name}/" for name in names[:3])
    return shown + (f" and {len(names) - 3} more" if len(names) > 3 else "")
