"""A result as people see it: one model (`content`), and a renderer for each place where it is shown."""
