"""`loadgen predict`: a run, or the paper's figures, computed in virtual time."""
