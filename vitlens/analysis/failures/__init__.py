"""Where and why models fail: error taxonomy, image traits, shape bias, common corruptions,
disturbed images.
"""
