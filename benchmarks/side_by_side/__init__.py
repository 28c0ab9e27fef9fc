"""Clients measured side by side: how each is called, what it costs seen from outside, and the rows and tables of it."""
