"""From scratch to a checkpoint: recipe, loop, augmentation."""
