"""What models were pretrained for, as their names and sources tell."""
