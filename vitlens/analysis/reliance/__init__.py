"""What models rely on: cues of images, interventions on each, and controls that change the pixels
as much.
"""
