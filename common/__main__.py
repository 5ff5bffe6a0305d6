import sys


def missing(module: str) -> str:
    """What to do about a library of ours that is not in the active environment."""
    name = {"markdown_it": "markdown-it-py"}.get(module.partition(".")[0], module.partition(".")[0].replace("_", "-"))
    return f"This needs {name}, which is not installed here: python -m pip install {name} (nox does it by itself)."


if __name__ == "__main__":
    try:
        from common.cli import main
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "common":
            raise
        print(missing(error.name), file=sys.stderr)
        sys.exit(2)
    sys.exit(main())
