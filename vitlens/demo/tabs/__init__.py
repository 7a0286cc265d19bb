"""The tabs of the page, a module each: which control calls which view."""
