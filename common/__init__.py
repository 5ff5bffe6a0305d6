"""The runner of the reproducer packs: environment, run, verdict, receipt, text to attach. See docs/design.md."""

__version__ = "2026.11.0"
