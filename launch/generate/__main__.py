"""`python -m burst_rt.launch.generate`: one rank of a job that generates."""

from burst_rt.launch.generate.cli import command

if __name__ == "__main__":
    command(prog_name="burst-rt generate")
