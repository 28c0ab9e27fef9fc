"""The pages of runs and of what is made of runs, as a `loadgen.document`: one module a kind, `parts` for all."""
