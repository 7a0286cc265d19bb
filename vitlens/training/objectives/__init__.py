"""Objectives without labels: masked patches, agreement with a teacher, captions."""
