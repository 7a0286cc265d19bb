"""transformers' vision models (`hf:REPO`, `hf:FOLDER`): read as data, built from its own classes,
never remote code.
"""
