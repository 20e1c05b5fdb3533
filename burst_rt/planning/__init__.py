"""Planning: masks, layouts, problems, strategies, and forecasts of what a strategy takes.

Planning needs neither torch nor MPI: it is Python, with numpy for masks.
"""
