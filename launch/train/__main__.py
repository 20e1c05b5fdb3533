"""`python -m burst_rt.launch.train`: one rank of a training job."""

from burst_rt.launch.train.cli import command

if __name__ == "__main__":
    command(prog_name="burst-rt train")
