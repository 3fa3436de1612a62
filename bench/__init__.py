"""Benchmarks: ratios against a peer or a limit, measured in one run, in alternating rounds, by medians.

What belongs here: what `make bench` runs, and how its figures are kept and shown. What does not: tests; an absolute
time on a noisy machine proves nothing and fails nothing.
"""
