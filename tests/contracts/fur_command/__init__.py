"""The parts of a throw-away command, which are in test_sections."""
