"""`python -m burst_rt.launch.train`: one rank of a training job, or of a measurement.

It is a measurement where `eval` is the first word.
"""

import sys

from burst_rt.launch.train.cli import eval_command, train_command

if __name__ == "__main__":
    if sys.argv[1:2] == ["eval"]:
        eval_command(sys.argv[2:], prog_name="burst-rt eval")
    else:
        train_command(prog_name="burst-rt train")
