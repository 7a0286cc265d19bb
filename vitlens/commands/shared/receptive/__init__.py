"""The effective receptive field by depth: measured and read back by the commands that show it."""
