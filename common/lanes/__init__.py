"""Lanes: what lets a release's own code run on a machine without a GPU. One module a lane, and what starts one; see docs/evidence.md."""
