"""Rows of several models as one page: Markdown tables, PNG plots, and how each number was made."""

from coca_hf.report.page import write_report

__all__ = ["write_report"]
