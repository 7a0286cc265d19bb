"""Writes the pair of models that comes with the package from two run folders, in half precision.

vitlens train vit-micro --data digits --epochs 20 --seed 0 --out runs/vit-digits
vitlens train resnet20 --data digits --epochs 10 --seed 0 --out runs/cnn-digits
python benchmarks/bundle.py runs/vit-digits runs/cnn-digits
vitlens evaluate vit-digits cnn-digits
"""

import sys
from pathlib import Path

import vitlens
from vitlens.models.loading import load
from vitlens.models.saved import save
from vitlens.names import BUNDLED

LIMIT = 3_000_000  # bytes, both together


def main() -> None:
    place = Path(vitlens.__file__).parent / "models" / "bundled"
    files = [place / name / "model.safetensors" for name in BUNDLED]
    for folder, file in zip(sys.argv[1:], files, strict=True):
        save(load(folder), file, half=True)
    size = sum(file.stat().st_size for file in files)
    print(f"{size:,} bytes, {LIMIT:,} allowed")
    if size > LIMIT:
        sys.exit("too large to come with the package")


if __name__ == "__main__":
    main()
