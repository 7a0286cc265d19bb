"""Reliance on cues: interventions on images and controls that change the pixels as much."""
