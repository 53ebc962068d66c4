"""The engine: lanes, the edges between lanes, host waits, futures and held objects."""
