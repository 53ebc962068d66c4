"""`Stream`, and the rooms of what it does: each a module of functions that take a lane."""
