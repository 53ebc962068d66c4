"""What a program can be made to tell, if its environment asks for it when userstream is imported.

`edges` puts a line into the log for each edge between streams, `ranges` puts NVTX ranges around
what userstream does. Both replace functions: nobody else pays, not even for a question.
"""
