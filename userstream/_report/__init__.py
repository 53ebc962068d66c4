"""The parts of ``python -m userstream``: facts, the self-check, and how they are printed."""
