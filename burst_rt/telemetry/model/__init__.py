"""What a job is: the one model, fed with messages, which answers all viewers in plain data."""
