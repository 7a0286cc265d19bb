"""transformers' vision models (`hf:REPO`, `hf:FOLDER`), built without remote code."""
