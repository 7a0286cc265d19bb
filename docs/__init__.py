"""The documentation: pages in Markdown, what writes the generated ones (make/), and the site's
settings (conf.py).
"""
