"""The generated pages of the documentation, and the parts of Sphinx that the site adds.

`python -m docs.make` writes every generated page; a test fails where one is not current.
"""
