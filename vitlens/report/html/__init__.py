"""A document as one HTML file that fetches nothing, and the attention explorer as another."""

from vitlens.report.html.fragment import explorer_fragment
from vitlens.report.html.whole import page, portfolio_page

__all__ = ["explorer_fragment", "page", "portfolio_page"]
