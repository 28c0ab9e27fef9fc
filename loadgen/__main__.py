"""`python -m loadgen`: the command `loadgen`, of the interpreter that is named."""

from loadgen.cli import main

if __name__ == "__main__":  # processes that are spawned import this too
    main()
