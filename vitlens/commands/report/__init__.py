"""`vitlens report`: figures and report.md of an earlier run, made again."""
