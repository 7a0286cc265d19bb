"""Controlled comparisons that `vitlens study --kind` trains: their variants, measurements and
reports.
"""
