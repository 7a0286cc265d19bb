"""What vitlens costs on a GPU, part by part.

    python -m benchmarks.gpu [--part NAME[,NAME]] [--tiny] [--out FILE]
    python -m benchmarks.gpu --part train --minutes 5 --data TRAIN.zip,TEST.zip    again until it
        says that it is done

Run from the repository, with torch, torchvision, timm and what vitlens needs; foolbox is measured
beside it where it imports. Every part first compares itself with the CPU in fp32, then measures,
and stops after its two minutes; what is in FILE (JSON lines) for this machine and these versions is
not measured again, so the same command goes on where it stopped. Without a GPU, or with --tiny, all
parts run small in seconds, and the table says that its times mean nothing.
"""

import argparse
import shlex
import sys
import time
from pathlib import Path

from benchmarks.gpu.machine import machine
from benchmarks.gpu.registry import PARTS
from benchmarks.gpu.rows import Rows
from benchmarks.gpu.session import Session
from benchmarks.gpu.table import write_table
from vitlens.devices import resolve_device
from vitlens.errors import InputError

TABLE = Path(__file__).parents[1] / "gpu.md"


def main(arguments: list[str] | None = None) -> int:
    """Return the exit code: 0, 1 where something is missing, 2 for a wrong call."""
    words = sys.argv[1:] if arguments is None else arguments
    options = _parser().parse_args(words)
    device = resolve_device(options.device)
    tiny = options.tiny or device.type != "cuda"
    if tiny and not options.tiny:
        print("no GPU: small models and sizes, whose times mean nothing", file=sys.stderr)
    here = machine(device)
    rows = Rows(options.out)
    session = Session(
        device,
        here,
        rows,
        tiny=tiny,
        folder=options.out.parent / "training",
        data=options.data,
        minutes=options.minutes,
    )
    for name in options.part:
        part = PARTS[name]
        began = time.monotonic()
        try:
            with session.of_part(name, options.seconds or part.seconds):
                part.run(session)
        except InputError as error:
            print(error, file=sys.stderr)
            return 2
        print(f"{name}: {time.monotonic() - began:.1f} s in all", file=sys.stderr, flush=True)
    command = shlex.join(["python", "-m", "benchmarks.gpu", *words])
    table = options.table or (options.out.with_suffix(".md") if tiny else TABLE)
    measured = rows.of(device=here.device, versions=here.versions, tiny=tiny)
    write_table(table, measured, here, tiny=tiny, command=command)
    for line in session.missing:
        print(f"missing: {line}", file=sys.stderr)
    print(table)
    return 1 if session.missing else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    usual = ",".join(name for name, part in PARTS.items() if not part.apart)
    parser.add_argument(
        "--part", type=_parts, default=usual, help=f"of {', '.join(PARTS)} (all but train)"
    )
    parser.add_argument("--tiny", action="store_true", help="small models and sizes, also on a GPU")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/gpu/gpu.jsonl"), help="JSON lines (%(default)s)"
    )
    parser.add_argument(
        "--table", type=Path, help="markdown (benchmarks/gpu.md; small ones beside --out)"
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument(
        "--seconds", type=float, help="of a part, after which it stops (115; training 540)"
    )
    parser.add_argument("--minutes", type=float, default=5.0, help="of a training (5 or 15)")
    parser.add_argument(
        "--data",
        type=_paths,
        default=(),
        help="of train: the zips, or one folder with train/, test/",
    )
    return parser


def _parts(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    for name in names:
        if name not in PARTS:
            raise argparse.ArgumentTypeError(
                f"expected parts of {', '.join(PARTS)}, found {name!r}"
            )
    return names


def _paths(text: str) -> tuple[Path, ...]:
    paths = tuple(map(Path, text.split(",")))
    for path in paths:
        if not path.exists():
            raise argparse.ArgumentTypeError(f"expected a file or a folder, found none at {path}")
    return paths


if __name__ == "__main__":
    sys.exit(main())
