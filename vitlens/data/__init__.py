"""The images: embedded scenes, torchvision's sets, folders and arrays, behind one type."""
