"""`python -m vitlens` is the command line."""

from vitlens.cli.main import main

main()
