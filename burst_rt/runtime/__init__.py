"""The runtime: ranks that join a group, agree on a call, perform its schedule, and leave.

The runtime does not know what a schedule is for.
"""
