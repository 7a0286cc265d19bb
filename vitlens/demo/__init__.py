"""`vitlens demo`: a page on this machine that shows what a model does with a picture.

It contains no analysis. `measure` serves the page, `page` builds it, `tabs` and `intervene` are its
tabs, `site` answers their requests with reports of commands, one at a time (`pool`).
"""
