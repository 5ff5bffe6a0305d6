"""For who works on this repository: mutants of the packs, benchmarks, and cutting GPU libraries to size."""
