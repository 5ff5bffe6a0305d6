"""The self-test's fix: add all elements up."""

from common.transforms import replace

FIX = {"reproducer_toy/__init__.py": (replace("sum", r"xs\[0\] \* len\(xs\)", "sum(xs)"),)}
