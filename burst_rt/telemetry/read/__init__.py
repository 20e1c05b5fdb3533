"""What reads a job: viewers of a running one; records, and the traces and summaries of records."""
