"""`Stream`, and modules of functions that take its lane: capture, raw memory, attributes ..."""
