"""The generated pages of the documentation, and the parts of Sphinx that the site adds.

`python -m docs.make` writes every generated page. Pages with numbers of reports are committed, and
a test fails if one is not current. Reference pages follow from the package; git ignores them, and
they are made before the site is built.
"""
