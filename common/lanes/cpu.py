"""Lane ``cpu``: a package of plain Python, or one made for CPUs, as it is. Evidence: ``device:cpu``.

It replaces nothing: this machine is what the package was made for.
"""


def prepare() -> None:
    """There is nothing to prepare."""
