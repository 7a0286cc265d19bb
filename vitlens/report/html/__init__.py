"""A document as one HTML file that fetches nothing, with the attention explorer (page), and the
explorer alone.
"""

from vitlens.report.html.fragment import explorer_fragment
from vitlens.report.html.whole import page, portfolio_page

__all__ = ["explorer_fragment", "page", "portfolio_page"]
