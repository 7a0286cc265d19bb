"""Chapters: runs of other commands, each in its own folder within the folder of a larger run."""
