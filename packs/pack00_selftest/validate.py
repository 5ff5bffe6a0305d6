"""The deep check of the self-test's fix: lists of other lengths, of both signs, and none at all."""

from importlib.metadata import version

from repro import FACTS, check, compare, finish


def main():
    import reproducer_toy

    FACTS.update(file=reproducer_toy.__file__, version=version("reproducer-toy"), evidence="source")
    compare("control", "one element", reproducer_toy.total([2.0]), 2.0)
    for xs in ([1.0, -2.0], [0.5, 1.0, 1.5, 2.0], [float(i) for i in range(100)]):
        compare("trigger", f"{len(xs)} elements", reproducer_toy.total(xs), sum(xs))
    check("trigger", "no element", reproducer_toy.total([]) == 0)
    finish()


if __name__ == "__main__":
    main()
