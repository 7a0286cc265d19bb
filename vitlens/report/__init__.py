"""A report: the document that a command makes of its record, and the renderers that show it."""
