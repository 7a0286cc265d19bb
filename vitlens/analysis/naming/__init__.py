"""By what a head attends, what it looks at and what it writes, in words, and whether the words
stand a test.
"""
