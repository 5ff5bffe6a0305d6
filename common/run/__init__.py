"""One run: overlay, process, verdict, receipt; many at a time, and what changed."""
