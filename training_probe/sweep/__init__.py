"""The grid, cell after cell: what is run, what became of it, and how a sweep goes on after a kill."""
