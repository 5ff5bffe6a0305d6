"""Lanes: what lets a release's own code run on a machine without a GPU. One module a lane; see docs/evidence.md."""
