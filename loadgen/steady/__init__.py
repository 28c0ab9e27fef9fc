"""Whether numbers describe a steady state: did the server keep up with what arrived, and which part of a run is steady.
Pure: stamps of requests in, verdicts out; real and predicted runs, searches and the live view ask the same functions.
"""
