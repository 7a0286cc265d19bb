"""Find the parts of a folder of images by name, and refuse folders without classes.

A class folder is any visible folder with an image below it. Its name is generic if it says nothing
about a class, such as images/.
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
# names of each part
_ROLES: Final[dict[Role, str]] = {
    "train": r"train|training|trn|trainval",
    "test": r"tests?|testing|tst|eval|evaluation|holdout",
    "val": r"val|valid|validation|validate|dev|devel",
}
_KINDS: Final = r"(?:sets?|data|dataset|images?|imgs?|split|part|folder|files)"
_ENDINGS: Final = re.compile(rf"{_KINDS}$")
# words that may stand next to the name of a part
_FILLERS: Final = re.compile(rf"{_KINDS}|seg|ilsvrc|clsloc")
_IMAGES: Final = frozenset(  # folders of images of any class
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
_ABOUT_IMAGES: Final = frozenset(  # folders of annotations of images, stored as images
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
_DEEPEST: Final = 16  # most nested folders that hold only one folder
_MOST_LISTED: Final = 3  # most folders in a message


@dataclass(frozen=True)
class _Candidate:
    """A folder whose name is that of a part, and that holds class folders.

    name: its name below the root, such as "train".
    folder: the folder of its class folders: itself, or one level deeper, as in train/images/.
    """

    name: str
    folder: Path


@dataclass(frozen=True)
class Parts:
    """The parts of a folder that hold class folders.

    train: the training part, or None.
    test: the test part, or None.
    notes: notes about folders that are no parts.
    """

    train: Path | None = None
    test: Path | None = None
    notes: tuple[str, ...] = ()


def role_of(name: str) -> Role | None:
    """Return the role of a folder by its name, or None.

    Names may have any case and form (Train, test_set, seg_train, val2017).
    """
    roles: set[Role] = set()
    with_spaces = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name)  # testSet -> test Set
    for word in re.findall(r"[a-z]+", with_spaces.lower()):
        stem = _ENDINGS.sub("", word)  # testset -> test
        word_roles = {role for role, pattern in _ROLES.items() if re.fullmatch(pattern, stem)}
        if not word_roles and not _FILLERS.fullmatch(word):
            return None
        roles |= word_roles
    return roles.pop() if len(roles) == 1 else None


def labelled_folders(folder: Path) -> list[Path]:
    """Return the class folders of a folder, without those called unlabeled next to others."""
    children = class_folders(folder)
    labelled = [child for child in children if not _UNLABELLED.fullmatch(child.name)]
    return labelled or children


def find_parts(root: Path) -> Parts:
    """Return the parts of a folder, without those that hold no class folders.

    A test part is used only if it shares a class with the training part. "test" is tried first,
    then "val". Raises DataError if two folders could be the training part, and if no test part has
    a class of the training part.
    """
    by_role: dict[Role, list[_Candidate]] = {"train": [], "test": [], "val": []}
    others: list[str] = []
    unlabelled: list[str] = []
    for child in class_folders(root):
        role = role_of(child.name)
        if role is None:
            others.append(child.name)
        elif holds_class_folders(child):
            by_role[role].append(_Candidate(child.name, _without_repetition(child, role)))
        else:
            unlabelled.append(child.name)
    train = _training_part(by_role["train"], root)
    test_candidates = _plainest_first(by_role["test"]) + _plainest_first(by_role["val"])
    test, rejected = _test_part(test_candidates, train)
    if train is not None:
        unlabelled += [part.name for part in rejected]
    if train is None and test is None:
        return Parts()
    notes = []
    if unlabelled:
        notes.append(
            "not used, because they lack the class folders of the training part and so "
            f"have no labels: {list_names(unlabelled)}"
        )
    if others:
        notes.append(f"not used, because they are next to the parts: {list_names(others)}")
    return Parts(
        train=None if train is None else train.folder,
        test=None if test is None else test.folder,
        notes=tuple(notes),
    )


def _training_part(parts: Sequence[_Candidate], root: Path) -> _Candidate | None:
    """Return the training part among candidates: if there are several, the one called train.

    Raises DataError if there is no such one.
    """
    if len(parts) <= 1:
        return parts[0] if parts else None
    called_train = [part for part in parts if part.name == "train"]
    if len(called_train) == 1:
        return called_train[0]
    names = [f"{part.name}/" for part in parts[:_MOST_LISTED]]
    raise DataError(
        f"expected one training part in {root}, found {' and '.join(names)}; move the others out "
        "of the folder"
    )


def _plainest_first(parts: Sequence[_Candidate]) -> list[_Candidate]:
    """Return parts of one role, sorted by the length of their names."""
    return sorted(parts, key=lambda part: (len(part.name), part.name))


def _test_part(
    parts: Sequence[_Candidate], train: _Candidate | None
) -> tuple[_Candidate | None, list[_Candidate]]:
    """Return the first part with a class of the training part, and the rejected parts before it.

    Raises DataError if no part with several classes has one of the training part.
    """
    if train is None:
        return (parts[0] if parts else None), []
    train_classes = {plain_name(folder.name) for folder in labelled_folders(train.folder)}
    rejected: list[_Candidate] = []
    for part in parts:
        part_classes = {plain_name(folder.name) for folder in labelled_folders(part.folder)}
        if train_classes & part_classes:
            return part, rejected
        rejected.append(part)
    for part in rejected:
        names = [folder.name for folder in labelled_folders(part.folder)]
        if len(names) > 1:
            raise DataError(
                f"expected classes of {train.name}/ in {part.folder}, found {list_names(names)}; "
                "name the folders of both parts alike"
            )
    return None, rejected


def holds_class_folders(folder: Path) -> bool:
    """Return True if a folder holds class folders, and not only a folder of images."""
    children = labelled_folders(folder)
    if len(children) == 1 and _is_generic(children[0].name):
        return bool(labelled_folders(children[0]))
    return bool(children)


def _without_repetition(part: Path, role: Role) -> Path:
    """Return the folder that holds a part's class folders.

    It is one level deeper in test_set/test_set/ and test/images/.
    """
    children = labelled_folders(part)
    if len(children) != 1:
        return part
    child = children[0]
    is_repetition = role_of(child.name) == role or _is_generic(child.name)
    return child if is_repetition and labelled_folders(child) else part


def unwrap_folder(root: Path) -> Path:
    """Return the folder of the class folders or parts, below folders that hold only one folder.

    For archive/data/ with train/ and test/, it is archive/data/.
    """
    # `folder` goes down one level a round. `result` stays at the last folder that certainly holds
    # several classes or parts, or one class.
    folder = root
    result = root
    for _ in range(_DEEPEST):
        children = labelled_folders(folder)
        if len(children) != 1:  # several classes or parts, or none
            return result
        child = children[0]
        is_part = role_of(child.name) is not None
        is_class = bool(images_in(child))
        if is_part or is_class:  # nothing more to unwrap
            return result
        folder = child
        grandchildren = labelled_folders(folder)
        holds_parts = any(
            role_of(child.name) and holds_class_folders(child) for child in grandchildren
        )
        is_single_class = len(grandchildren) == 1 and _is_generic(folder.name)  # images/cat/
        # else the folder itself may be the one class, so it is not the result yet
        if len(grandchildren) > 1 or holds_parts or is_single_class:
            result = folder
    return result


def is_unlabelled(folder: Path) -> bool:
    """Return True if all folders are of images or of parts, without class folders in them."""
    children = labelled_folders(folder)
    if not children or any(holds_class_folders(child) for child in children):
        return False
    return all(role_of(child.name) for child in children) or is_of_images(children)


def is_of_images(children: Sequence[Path]) -> bool:
    """Return True for one folder that is called images, without class folders in it."""
    if len(children) != 1:
        return False
    return _is_generic(children[0].name) and not labelled_folders(children[0])


def require_classes(folder: Path) -> None:
    """Raise DataError if the folders of a folder are no classes.

    These are parts without class folders, images next to masks, and folders that all hold the same
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
            f"expected class folders in {list_names(names)} of {folder}, found images without "
            f"them, so without labels; sort them into a folder a class, give {table}, or "
            f"{images_alone(first)}"
        )
    _refuse_masks(folder, names)
    shared = _shared_folders(folder)
    if shared:
        raise DataError(
            f"expected class folders in {folder}, found {list_names(names)} that all hold "
            f"{list_names(shared)}; name one of them ({folder / names[0]}), or call the parts "
            "train/ and test/"
        )


def _refuse_masks(folder: Path, names: Sequence[str]) -> None:
    """Raise DataError if some of a folder's folders hold masks or other images about images."""
    mask_names = [name for name in names if name.lower() in _ABOUT_IMAGES]
    image_names = [name for name in names if _is_generic(name)]
    if image_names and mask_names and len(image_names) + len(mask_names) == len(names):
        # folders of images and of masks, and no others
        masks = mask_names[0]
        with_images = [name for name in image_names if images_in(folder / name)]
        is_named_for_masks = with_images[:1] == ["images"] and masks == "masks"
        if with_images and not is_named_for_masks:
            images = with_images[0]
            raise DataError(
                f"expected class folders in {folder}, found {images}/ next to {masks}/; if these "
                "are masks, call them images/ and masks/, else give "
                f"{images_alone(folder / images)}"
            )
        # named for masks, or with class folders inside: the inner folders do not agree
        raise DataError(
            f"expected class folders in {folder}, found {image_names[0]}/ next to {masks}/; masks "
            "need their images in images/, in folders of the same names; for the classes without "
            f"masks name {folder / image_names[0]}"
        )
    # class folders next to a folder of their masks
    class_folder_paths = [folder / name for name in names if name not in mask_names]
    for masks in mask_names:
        if class_folder_paths and _repeats_names(folder / masks, class_folder_paths):
            raise DataError(
                f"expected class folders in {folder}, found {masks}/ next to them, of their "
                "images' names; for maps and masks put the classes into images/ and the masks into "
                f"masks/, else move {masks}/ away"
            )


def _repeats_names(masks: Path, classes: Sequence[Path]) -> bool:
    """Return True if most images of a folder have the names of images in class folders."""
    image_stems = {path.stem for folder in classes for path in images_below(folder)}
    mask_count = 0
    match_count = 0
    for path in images_below(masks):
        mask_count += 1
        if path.stem in image_stems or path.stem.removesuffix("_mask") in image_stems:
            match_count += 1
    return 2 * match_count > mask_count


def _shared_folders(folder: Path) -> list[str]:
    """Return the names that occur in every folder of a folder, or [].

    They are returned only if they are at least half of all names, and if no folder holds images at
    its top. The folders are then parts, not classes.
    """
    contents: list[set[str]] = []
    children = labelled_folders(folder)
    for child in children:
        inner = labelled_folders(child)
        if len(inner) == 1 and _is_generic(inner[0].name):
            inner = labelled_folders(inner[0])
        if not inner or images_in(child):
            return []
        contents.append({grandchild.name for grandchild in inner})
    if len(contents) < 2:
        return []
    shared = set.intersection(*contents)
    if 2 * len(shared) < len(set.union(*contents)):
        return []
    return sorted(shared)


def _is_generic(name: str) -> bool:
    """Return True for the name of a folder of images of any class."""
    return name.lower() in _IMAGES or _LABELLED.fullmatch(name) is not None


def list_names(names: Sequence[str]) -> str:
    """Return the first names of folders, as text."""
    text = ", ".join(f"{name}/" for name in names[:_MOST_LISTED])
    if len(names) > _MOST_LISTED:
        text += f" and {len(names) - _MOST_LISTED} more"
    return text
