"""Deciding: problem, formulation, solve, candidates; the public API and the command line."""
