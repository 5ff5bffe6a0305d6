"""pytest, as a script that a lane can start: it runs inside the environment under test."""

import sys

import pytest

if __name__ == "__main__":
    sys.exit(pytest.main(sys.argv[1:]))
