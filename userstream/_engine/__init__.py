"""The engine: lanes, what orders them, and what waits for them."""
