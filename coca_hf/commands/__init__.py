"""What `coca-convert`, `coca-train` and `coca-eval` take and print; `coca_hf/cli.py` runs them.

What takes seconds to import is imported inside the commands.
"""
