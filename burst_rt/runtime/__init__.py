"""The runtime: ranks that work together.
They join, agree, perform a schedule and leave; what a schedule is for is not known here.
"""
