"""Many runs on one start of a server: the same load again, a list of loads, the highest that meets an objective."""
