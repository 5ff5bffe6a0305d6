"""Where a release runs: the index, an environment for each release, and whether its files are what it installed."""
