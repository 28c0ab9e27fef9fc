"""`loadgen calibrate`: a profile of modelled hardware, fitted to real runs."""
