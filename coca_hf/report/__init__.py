"""Rows of several models as one page: Markdown tables, PNG plots, and how each number was made."""

from coca_hf.report.read import read_tables
from coca_hf.report.write import not_together, read_page, tables_markdown, write_report

__all__ = ["not_together", "read_page", "read_tables", "tables_markdown", "write_report"]
