"""The hub of a job: the process that all ranks are connected to, how it starts and is found."""
