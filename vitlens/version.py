"""The version, in a module without imports, for packaging and the command line."""

__version__ = "1.0.0rc1"
