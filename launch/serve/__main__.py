"""`python -m burst_rt.launch.serve`: one rank of a job that serves."""

from burst_rt.launch.serve.cli import command

if __name__ == "__main__":
    command(prog_name="burst-rt serve")
