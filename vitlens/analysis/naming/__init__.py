"""Three labels for every head, each tested by an intervention: what determines its attention, the
pattern of its attention, and what it writes.
"""
