"""What ``python -m userstream`` is made of: facts, a self-check, and how they are shown."""
