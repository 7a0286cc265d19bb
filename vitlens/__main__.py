"""The command line as `python -m vitlens`."""

from vitlens.cli.main import main

main()
