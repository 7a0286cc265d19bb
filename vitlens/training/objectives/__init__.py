"""What a training minimises when it does not classify: masked patches, agreement with a teacher,
captions.
"""
