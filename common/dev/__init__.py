"""For who works on this repository: benchmarks, and cutting GPU libraries to size."""
