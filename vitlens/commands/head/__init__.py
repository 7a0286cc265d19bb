"""`vitlens head`: one head's page: by what it attends, what it looks at, what it writes, and what
breaks without it.
"""
