"""Images as one type, Split: embedded scenes, torchvision's sets, folders and arrays."""
