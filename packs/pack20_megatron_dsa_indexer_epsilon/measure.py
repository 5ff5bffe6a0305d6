"""How wrong loss and gradients are, by how far apart the index scores are. No verdict."""

from repro import D_ATTENTION, FACTS, HEADS, NAMES, B, D, H, S, errors, finish, inputs, release


def main():
    dsa = release()
    print(f"{'scores times':>12} {'under 1e-10':>12} " + " ".join(f"{name:>9}" for name in NAMES))
    for gain in (1, 2, 4, 8, 16, 32, 64):
        found = errors(dsa, inputs(S, B, HEADS, H, D_ATTENTION, D, gain))
        share = FACTS["metrics"].pop("probabilities under 1e-10")
        FACTS["metrics"][f"scores times {gain}"] = {"probabilities under 1e-10": share, **dict(zip(NAMES, found, strict=True))}
        print(f"{gain:>12} {share:>12.1%} " + " ".join(f"{error:>9.1e}" for error in found), flush=True)
    finish("MEASURED")


if __name__ == "__main__":
    main()
