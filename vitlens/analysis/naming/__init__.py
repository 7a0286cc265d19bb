"""Three labels for every head, each tested by an intervention.

They name the components that determine its attention, the pattern of its attention, and what it
writes.
"""
