"""What a process knows of its job, and what the process reports to the job's launcher.

Needs the standard library and psutil alone.
"""
