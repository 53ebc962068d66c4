"""What a program can be made to report, if its environment asks for it at the import.

`edges` puts a line into the log for each edge between streams, `ranges` puts NVTX ranges around
what userstream does. Both replace functions, so without them nothing is paid, not even a check.
"""
