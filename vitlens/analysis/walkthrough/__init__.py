"""One head's attention step by step, with the numbers of a model and an image, each step checked
against the model.
"""
