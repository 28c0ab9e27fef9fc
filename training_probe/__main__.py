"""`python -m training_probe`: the command `training_probe`, of the interpreter that is named."""

from training_probe.cli import main

if __name__ == "__main__":  # processes that are spawned import this too
    main()
