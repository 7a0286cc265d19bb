"""Make the committed reports again: `python -m benchmarks.reports [NAME ...]`; without a name,
those that take minutes. `benchmarks.studies` makes the studies of one factor.

Each runs its command in a working folder with links to data and weights under short names, so that
no path of the machine is in it, and is copied to reports/NAME without arrays, weights, panels and
the tables of chapters that no report names, its figures with fewer pixels and 256 colours.
VITLENS_DATA names the folder of weights and photographs; VITLENS_REPORTS the working folder
(default: one in the system's temporary folder), where the models of `train-*-cifar10-jpeg` stay for
the reports after them.
"""

import json
import os
import re
import shlex
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Collection
from pathlib import Path
from typing import Final

from PIL import Image

from vitlens.cli.main import run
from vitlens.names import imagenet_indices

ROOT: Final = Path(__file__).parents[1]
DEIT: Final = "deit-tiny=timm:deit_tiny_patch16_224@deit_tiny.safetensors"
PAIR: Final = (
    "vit-mini=reports/train-vit-cifar10-jpeg resnet20=reports/train-cnn-cifar10-jpeg "
    "--data cifar10-jpeg"
)
LINKS: Final = {  # in the folder of the run -> below VITLENS_DATA
    "deit_tiny.safetensors": "weights/deit_tiny_patch16_224.safetensors",
    "square.png": "coco_masks/images/000000000257_truck.png",
    "photos": "photos",
    "coco_masks": "coco_masks",
}
# photographs whose licence allows to show them (CC BY, CC BY-SA), of COCO 2017
SHOWN: Final = (
    "000000000073_motorcycle",
    "000000000257_truck",
    "000000000309_teddy-bear",
    "000000000529_motorcycle",
    "000000001993_chair",
    "000000001993_bed",
)
# one file of each photograph: two of them have two objects
PHOTOGRAPHS: Final = ",".join(
    f"coco_masks/images/{name}.png" for name in SHOWN if name != "000000001993_bed"
)
FIVE: Final = ("bird", "cat", "dog", "horse", "ship")  # the classes of the transfer study
# methods of the library grad-cam, but scorecam, ablationcam and sess, which run a pass for each
# channel or crop
GRAD_CAM: Final = (
    "gradcam",
    "gradcam-plus-plus",
    "gradcam-element-wise",
    "xgradcam",
    "hirescam",
    "layercam",
    "eigencam",
    "eigengradcam",
    "segeigencam",
    "kpca-cam",
    "fem",
    "full-grad",
    "finercam",
    "shapleycam",
    "refinecam",
    "scorecam",
    "ablationcam",
    "sess",
    "randomcam",
)
QUICK: Final = {  # minutes
    "study-shortcut": "study",
    "study-digits": "study vit-digits cnn-digits",
    "audit-vit-shortcut": "audit vit-shortcut --at-least accuracy=0.6 --budget 6",
    "look-deit-tiny": "look square.png --model timm:deit_tiny_patch16_224@deit_tiny.safetensors "
    "--html",
    "stats-deit-tiny": f"stats {DEIT} --data photos --attributes animals.csv",
    "head-vit-digits": "head vit-digits L5.H2",
    "rollout-vit-digits": "rollout vit-digits --limit 3",
    "walkthrough-deit-tiny": f"walkthrough {DEIT.partition('=')[2]} --images square.png --layer 3 "
    "--head 1",
    "reversal": "reversal",
    "reversal-without-positions": "reversal --positions none",
    "reversal-sort": "reversal --task sort",
    "profile-vit-resnet-swin": "profile vit-small-224 timm:resnet50 "
    "timm:swin_tiny_patch4_window7_224 --random-weights --sizes 112,224,336 --batch-sizes 1,8",
    "features-deit-tiny": f"features {DEIT} --data photos --show "
    + ",".join(f"coco_masks/images/{name}.png" for name in SHOWN),
}
SLOW: Final = {  # up to two hours each, in this order: the pair is trained before it is compared
    "ablate-deit-tiny": f"ablate {DEIT} --data photos --replace mean,zero,resample",
    "explain-deit-tiny": f"explain {DEIT} --data coco_masks --target true --verify "
    "--no-counterfactuals --method "
    f"relevance,gradcam,gradient-rollout,rollout,attention,legrad --show {','.join(SHOWN)}",
    "explain-grad-cam-deit-tiny": f"explain {DEIT} --data coco_masks --target true --verify "
    "--no-counterfactuals --other-substrates none --limit 20 --method "
    f"{','.join(f'grad-cam:{name}' for name in GRAD_CAM)} --show {','.join(SHOWN[:2])}",
    "sae-deit-tiny": f"sae {DEIT} --layer 8 --data photos --attributes animals.csv --crops 22 "
    f"--tokens 4000000 --no-html --show {PHOTOGRAPHS}",
    "attack-deit-tiny": f"attack {DEIT} --data photos --limit 50 --steps pgd=10,cw=20 "
    "--self-checks few",
    "pretraining-shapes": "study --kind pretraining",
    "transfer-deit-tiny": f"study {DEIT.partition('=')[2]} --kind transfer --data cifar10-five "
    "--image-size 112",
    "train-vit-cifar10-jpeg": "train vit-mini --data cifar10-jpeg --recipe short",
    "train-cnn-cifar10-jpeg": "train resnet20 --data cifar10-jpeg --recipe short",
    "compare-cifar10-jpeg": f"compare {PAIR}",
    "features-cifar10-jpeg": f"features {PAIR}",
}
LAST_ANIMAL: Final = 397  # of ImageNet's classes in their order
SIDE: Final = 0.65  # of a figure's pixels
INNER: Final = 0.45  # of those of chapters, and of reports with many maps
SMALL: Final = ("explain-grad-cam-deit-tiny",)
TABLE: Final = re.compile(r"(?:chapters/[\w.-]+/)?tables/[\w.-]+\.csv")
KEPT: Final = (".md", ".json", ".html", ".png", ".csv")


def make(name: str) -> None:
    """One report, in the place of the committed one."""
    *before, line = {**QUICK, **SLOW}[name].split(" && ")
    work = Path(os.environ.get("VITLENS_REPORTS", Path(tempfile.gettempdir()) / "vitlens-reports"))
    prepare(work, Path(os.environ["VITLENS_DATA"]).resolve())
    os.chdir(work)
    for each in (*before, f"{line} --out reports/{name}"):
        if code := run([*shlex.split(each), "--overwrite", "--quiet"]):
            sys.exit(f"error: {each} ended with {code}")
    os.chdir(ROOT)
    copy_light(work / "reports" / name, ROOT / "reports" / name)


def prepare(work: Path, data: Path) -> None:
    """Link and unpack the data into the working folder: what is there is left."""
    work.mkdir(parents=True, exist_ok=True)
    for short, place in LINKS.items():
        if not (work / short).exists():
            (work / short).symlink_to(data / place)
    lines = [
        f"{path.name},{'yes' if imagenet_indices()[path.parent.name] <= LAST_ANIMAL else 'no'}"
        for path in sorted((work / "photos").glob("*/*.jpg"))
    ]
    (work / "animals.csv").write_text("\n".join(["file,animal", *lines]), encoding="utf-8")
    if not (cifar := work / "cifar10-jpeg").exists():
        for part in ("train", "test"):
            with zipfile.ZipFile(data / f"cifar10_jpeg_{part}.zip") as archive:
                archive.extractall(cifar)
    for part, count in (("train", 40), ("test", 100)):
        for word in FIVE:
            (five := work / "cifar10-five" / part / word).mkdir(parents=True, exist_ok=True)
            for path in sorted((cifar / part / word).iterdir())[:count]:
                shutil.copyfile(path, five / path.name)


def copy_light(source: Path, target: Path, *, kept: Collection[str] = KEPT) -> None:
    """Copy a run's folder without arrays and panels, with light figures.

    kept: suffixes of the files that are copied. Of the tables of chapters, those that a report
    names are copied.
    """
    shutil.rmtree(target, ignore_errors=True)
    named = named_tables(source)
    for path in sorted(source.rglob("*")):
        inner = path.relative_to(source)
        if not path.is_file() or path.suffix not in kept or {"arrays", "panels"} & set(inner.parts):
            continue
        in_chapter = inner.parts[0] == "chapters"
        if in_chapter and "tables" in inner.parts and path not in named:
            continue
        place = target / inner
        place.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".json":
            # without indentation, which is a third of these files; one value a line for git
            content = json.loads(path.read_text(encoding="utf-8"))
            lines = json.dumps(content, indent=0, ensure_ascii=False)
            place.write_text(f"{lines}\n", encoding="utf-8")
            continue
        if path.suffix != ".png":
            shutil.copyfile(path, place)
            continue
        with Image.open(path) as picture:
            is_small = in_chapter or source.name in SMALL
            side = INNER if is_small else SIDE
            size = (round(side * picture.width), round(side * picture.height))
            colours = 64 if is_small else 256
            picture.convert("RGB").resize(size, Image.Resampling.LANCZOS).quantize(
                colours, kmeans=1
            ).save(place, optimize=True)


def named_tables(folder: Path) -> set[Path]:
    """Return the tables that the reports of a run and of its chapters name."""
    tables = set()
    for report in folder.rglob("report.md"):
        for name in TABLE.findall(report.read_text(encoding="utf-8")):
            tables.add(report.parent / name)
    return tables


if __name__ == "__main__":
    for asked in sys.argv[1:] or QUICK:
        print(asked)
        make(asked)
