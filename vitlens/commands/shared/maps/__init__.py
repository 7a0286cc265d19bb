"""The checks of attribution maps that several commands run: their rows, and what a report concludes
from them.
"""
