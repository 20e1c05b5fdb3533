"""Planning: masks, layouts, problems, strategies and what they are forecast to take.
Needs Python alone: no torch, no MPI.
"""
