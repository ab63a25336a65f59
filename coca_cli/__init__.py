"""What `coca-convert`, `coca-train` and `coca-eval` take and print.

A package of its own, because `import coca_hf` registers models, for which it imports torch and
transformers. That takes seconds, and neither `--help` nor a wrong option needs them: what does is
imported inside the commands.
"""
