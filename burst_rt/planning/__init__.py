"""Planning: masks, layouts, problems, strategies, and forecasts of what a strategy takes.

Planning is pure Python: it needs neither torch nor MPI.
"""
