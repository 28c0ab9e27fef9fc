"""The pages of runs and of what is made of runs, as content (`loadgen.page`): one module a kind, `parts` for all."""
