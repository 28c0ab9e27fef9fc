"""Modelled hardware: what a step costs on GPUs that are not here, and the same engine in virtual time."""
