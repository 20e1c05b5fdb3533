"""What a process knows of its job, and what it leaves for whoever started the job.
Needs the standard library and psutil alone.
"""
