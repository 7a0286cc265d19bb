"""Two folders of one command compared: what changed beyond chance, e.g. for a regression check before a release."""
