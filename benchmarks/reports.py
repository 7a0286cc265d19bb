"""Make the committed reports again: `python -m benchmarks.reports [NAME ...]`; without a name, those that take minutes.

Each runs its command in a folder with links to data and weights under short names, so that no path of the machine is
in it, and is copied to reports/NAME without arrays, weights and panels, its figures with fewer pixels and 256 colours.
VITLENS_DATA names the folder of weights and photographs.
"""

import os
import shlex
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Final

from PIL import Image

from vitlens.cli.main import run

ROOT: Final = Path(__file__).parents[1]
DEIT: Final = "deit-tiny=timm:deit_tiny_patch16_224@deit_tiny.safetensors"
LINKS: Final = {  # in the folder of the run -> below VITLENS_DATA
    "deit_tiny.safetensors": "weights/deit_tiny_patch16_224.safetensors",
    "square.png": "coco_masks/images/000000000257_truck.png",
    "photos": "photos",
    "coco_masks": "coco_masks",
    "cifar10-jpeg": "cifar10-jpeg",
}
QUICK: Final = {  # minutes
    "study-digits": "study",
    "audit-vit-digits": "audit vit-digits --at-least accuracy=0.9",
    "look-deit-tiny": "look square.png --model timm:deit_tiny_patch16_224@deit_tiny.safetensors --html",
    "stats-deit-tiny": f"stats {DEIT} --data photos",
    "rollout-vit-digits": "rollout vit-digits --limit 3",
    "walkthrough-deit-tiny": f"walkthrough {DEIT.partition('=')[2]} --images square.png --layer 3 --head 1",
    "profile-vit-resnet-swin": "profile vit-tiny resnet20 resnet18 timm:swin_tiny_patch4_window7_224 --random-weights",
}
SLOW: Final = {  # up to two hours each
    "ablate-deit-tiny": f"ablate {DEIT} --data photos --replace mean,zero,resample",
    "explain-deit-tiny": f"explain {DEIT} --data coco_masks --target true --verify --no-counterfactuals",
    "attack-deit-tiny": f"attack {DEIT} --data photos --limit 50",
    "architecture-digits": "study --kind architecture",
    "patch-size-digits": "study --kind patch-size",
    "positions-digits": "study --kind positions",
    "pooling-digits": "study --kind pooling",
    "data-digits": "study --kind data",
    "swin-digits": "study --kind swin",
    "transfer-deit-tiny": f"study {DEIT} --kind transfer --data photos --image-size 112",
}
SIDE: Final = 0.65  # of a figure's pixels
INNER: Final = 0.45  # of those of chapters
KEPT: Final = (".md", ".json", ".html", ".png", ".csv")


def make(name: str) -> None:
    """One report, in the place of the committed one."""
    line = {**QUICK, **SLOW}[name]
    data = Path(os.environ["VITLENS_DATA"]).resolve()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for short, place in LINKS.items():
            if (data / place).exists():
                Path(short).symlink_to(data / place)
        code = run([*shlex.split(line), "--out", f"reports/{name}", "--quiet"])
        os.chdir(ROOT)
        if code:
            sys.exit(f"error: {line} ended with {code}")
        copy_light(Path(folder) / "reports" / name, ROOT / "reports" / name)


def copy_light(source: Path, target: Path) -> None:
    """A run's folder without arrays, panels and the tables of chapters, and with light figures."""
    shutil.rmtree(target, ignore_errors=True)
    for path in sorted(source.rglob("*")):
        inner = path.relative_to(source)
        if not path.is_file() or path.suffix not in KEPT or {"arrays", "panels"} & set(inner.parts):
            continue
        if inner.parts[0] == "chapters" and "tables" in inner.parts:
            continue
        place = target / inner
        place.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix != ".png":
            shutil.copyfile(path, place)
            continue
        with Image.open(path) as picture:
            side = INNER if inner.parts[0] == "chapters" else SIDE
            size = (round(side * picture.width), round(side * picture.height))
            colours = 64 if inner.parts[0] == "chapters" else 256
            picture.convert("RGB").resize(size, Image.Resampling.LANCZOS).quantize(colours).save(place, optimize=True)


if __name__ == "__main__":
    for asked in sys.argv[1:] or QUICK:
        print(asked)
        make(asked)
